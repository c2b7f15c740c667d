"""The intake: turns what a client wrote into requests in tokens.

Owns the tokenizing (on threads of its own, so that long prompts block neither the loop nor short prompts), the limits of the
context, ids and seeds; and what a chat asks of the served model: what its template gets, how its answer is read, and what the
template or the format of answers cannot do. Does not know HTTP, instances or messages.
"""

import dataclasses
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from msgspec import structs
from msgspec.structs import replace

from common.config import RouterConfig
from common.errors import BadRequest, NotFound
from common.ids import ID_BYTES, Digest, Variant, pack_ids, unpack_ids
from common.messages import AnswerParts
from common.pages.radix_cache import BlockNames
from common.sampling_params import MAX_BAD_WORDS, SamplingParams
from common.text.embedding import EmbeddingMode
from common.text.tokenizer_manager import ChatOptions, TokenizerManager
from router.api.answers import Accepted
from router.api.chat import ChatRequest
from router.api.completions import CompletionRequest, PairPrompt
from router.api.errors import ContextExceeded, no_room, shown
from router.api.fields import ALL_TOKENS, MAX_PRIORITY, ReadRequest, biases_of
from router.api.logprobs import MAX_PAIRS, TokenTexts, check_prompt_pairs, most_tokens_with
from router.api.parsing.formats import answer_format
from router.api.parsing.grammars import answer_grammar
from router.api.parsing.parser import AnswerReading
from router.api.routes import MAX_CHARS, Detokenized, DetokenizeFields, Tokenized, TokenizeRequest
from router.api.scoring import Judge
from router.api.threads import SharedThreads
from router.core import RouterCore
from router.requests import ClientRequest, Places, RequestSpec

TAIL_TOKENS = 16
"""The end of a prompt: it holds the mark with which the prompt opens the answer's thoughts, if it does."""
_SWITCHES = ("enable_thinking", "thinking")
"""What chat templates call the switch for thoughts (Qwen 3 and GLM 4.5; DeepSeek V3.1)."""


class ChatPlanner:
    """Plans chats with one model, named `model` in errors."""

    def __init__(self, tokenizer: TokenizerManager, model: str, config: RouterConfig) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._format = answer_format(tokenizer.chat_template, config.tool_parser, config.reasoning_parser)

    def options(self, request: ChatRequest) -> ChatOptions:
        """What the template gets. Raises BadRequest for what the model's template does not do."""
        if request.tools.shown and not self._tokenizer.reads_tools:
            fix = "leave tools out, or start the router with a --chat-template that does"
            raise BadRequest(f"the chat template of {self._model} does not show tools to the model: {fix}", field="tools")
        arguments, effort = request.fields.chat_template_kwargs, request.fields.reasoning_effort
        for name in arguments:
            if not self._tokenizer.reads(name):
                message = f"the chat template of {self._model} does not read {shown(name)!r}: leave it out"
                raise BadRequest(message, field=f"chat_template_kwargs.{shown(name)}")
        verbosity = request.fields.verbosity
        hints = ("reasoning_effort", effort, "none", request.effort_field), ("verbosity", verbosity, "medium", "verbosity")
        for name, hint, usual, field in hints:
            if hint is not None and self._tokenizer.reads(name):
                arguments = {name: hint, **arguments}
            elif hint not in (None, usual) and field:
                message = f"the chat template of {self._model} does not use {name}: leave it out"
                raise BadRequest(message, field=field, code="unsupported_parameter")
        return ChatOptions(
            tools=request.tools.shown,
            add_generation_prompt=request.fields.add_generation_prompt,
            continue_final_message=request.fields.continue_final_message,
            arguments=arguments if request.thinking is None else self._thinking(request) | arguments,
        )

    def _thinking(self, request: ChatRequest) -> dict[str, Any]:
        """What tells the template whether the model is to think. Raises BadRequest when it must and cannot, or the other way."""
        wanted = request.thinking != "disabled"
        switches = {name: wanted for name in _SWITCHES if self._tokenizer.reads(name)}
        if not switches and (self._format.thoughts is not None) != wanted and request.thinking != "adaptive":
            problem = "does not let the model think" if wanted else "always lets the model think"
            raise BadRequest(f"the chat template of {self._model} {problem}: leave thinking out", field="thinking")
        return switches

    def require_known_calls(self, request: ChatRequest) -> None:
        """Raises BadRequest for calls in a format that is not known."""
        if request.tools.callable and self._format.tools is None:
            fix = "leave tools out, or start the router with --tool-parser"
            raise BadRequest(f"the format of the tool calls of {self._model} is not known: {fix}", field="tools")

    def completed(self, request: ChatRequest, accepted: Accepted) -> Accepted:
        """The accepted request with what follows from the format of its answers: their grammar, the marks that the detokenizer
        must show though it skips other special tokens, and how their texts are read. Raises BadRequest."""
        tools = self._format.tools if request.tools.callable else None
        marks = self._format.marks(calls=tools is not None)
        if not marks:
            return accepted
        opened = self._opens_thoughts(request, accepted.specs[0].prompt)
        field = request.grammar_field
        grammar = answer_grammar(request.tools, self._format, request.grammar, field=field, opened=opened)
        special = self._tokenizer.special_tokens.items()
        shown_marks = tuple(token for text, token in special if any(text in mark for mark in marks))
        specs = tuple(
            dataclasses.replace(spec, sampling=structs.replace(spec.sampling, grammar=grammar), shown=shown_marks)
            for spec in accepted.specs
        )
        separates = request.fields.separate_reasoning
        new_parser = self._format.new_parser(request.tools.callable, separates=separates, opened=opened)
        if new_parser is None:
            return dataclasses.replace(accepted, specs=specs)
        if request.text_alone_field:
            problem = "is for answers of text alone: leave it out, or use POST /v1/chat/completions"
            raise BadRequest(f"{request.text_alone_field} {problem}", field=request.text_alone_field)
        thinks, names = separates and self._format.thoughts is not None, tuple(one.name for one in request.tools.callable)
        specs = tuple(_told_apart(spec, AnswerParts(thoughts=thinks, opened=opened, functions=names)) for spec in specs)
        reading = AnswerReading(new_parser)
        if tools is not None:
            earlier = sum(len(message.get("tool_calls", ())) for message in request.messages)
            reading = AnswerReading(new_parser, lambda name, number: tools.new_id(name, earlier + number))
        return dataclasses.replace(accepted, specs=specs, reading=reading)

    def _opens_thoughts(self, request: ChatRequest, prompt: bytes) -> bool:
        """Whether the answer begins within thoughts. A user's message may hold the mark too, so it counts at the very end."""
        thoughts = self._format.thoughts
        if thoughts is None or thoughts.always:
            return thoughts is not None
        if request.fields.continue_final_message:
            text = str(request.messages[-1].get("content"))
            return text.rfind(thoughts.begin) > text.rfind(thoughts.end)
        tail = self._tokenizer.decode(unpack_ids(prompt[-TAIL_TOKENS * ID_BYTES :]).tolist(), skip_special_tokens=False)
        return tail.rstrip().endswith(thoughts.begin)


def _told_apart(spec: RequestSpec, parts: AnswerParts) -> RequestSpec:
    """The choice with the parts of its answer, where the detokenizer needs to know them. It looks for
    stop tokens, too, because instances do not know what is the answer. Under a grammar instances do:
    stop tokens come only where the answer may end."""
    sampling = spec.sampling
    if not (parts.thoughts or spec.stop or sampling.stop_token_ids):
        return spec
    spec = dataclasses.replace(spec, parts=parts)
    if sampling.grammar is not None or not sampling.stop_token_ids:
        return spec
    return dataclasses.replace(
        spec, sampling=structs.replace(sampling, stop_token_ids=()), stop_token_ids=sampling.stop_token_ids
    )


SEED_BITS = 63
ENCODING_THREADS, LONG_ENCODING_THREADS = 4, 2
SHORT_CHARS = 1_000
"""Shorter texts are encoded on the loop's thread: that takes less time than waking another thread and waiting for its turn."""
MAX_WAITING_BODY_BYTES = 256 * 2**20
"""Large bodies that wait to be read, or are read: beyond this many bytes of them, others are refused."""
LONG_CHARS = 2**16
"""Longer texts have threads of their own: each takes from tens of milliseconds to seconds."""
USUAL_TOKEN_CHARS = 4
"""A text with more characters than this for each token of the context is probably too long. So its tokens are counted first,
piece by piece, until they are too many: all of a text of 16 MiB takes seconds."""
CUT_TOKENS = 64
"""A piece may have so many tokens more than its part of the text: the cut splits tokens, and a piece gets special tokens of its
own."""
MAX_TOKEN_CHARS = 512
"""No tokenizer has longer tokens, so a text with more characters than this for each token of the context is too long."""

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_AS_ASKED = ("temperature", "top_p", "min_p", "ignore_eos", "min_tokens", *_PENALTIES)
"""Fields that are parameters of sampling as they are."""

R = TypeVar("R")
Encode: TypeAlias = Callable[[], Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A prompt in packed token ids. echo: its text if the answer repeats it. blocks: their names, if the router needs them.
    adapter: see `RequestSpec`."""

    packed: bytes
    echo: str = ""
    blocks: BlockNames | None = None
    adapter: str = ""


class Intake:
    """Turns requests of the API into specs. model: the name that clients must use."""

    def __init__(self, core: RouterCore, tokenizer: TokenizerManager, model: str, config: RouterConfig) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self.token_text: TokenTexts = tokenizer.token_text
        """The text of single tokens."""
        self._model = model
        self._chats = ChatPlanner(tokenizer, model, config)
        self._chat_max_tokens = config.default_max_tokens or None
        self._longest_timeout_s = config.max_request_timeout_s
        self.writers = SharedThreads(1, "answer-writer")
        """For answers that take long to write. One: the threads share one interpreter with the loop."""
        self._threads = SharedThreads(ENCODING_THREADS, "tokenizer")
        self._long_threads = SharedThreads(LONG_ENCODING_THREADS, "long-tokenizer")
        self._waiting_body_bytes = Places(MAX_WAITING_BODY_BYTES, "bytes of large bodies")

    async def read_large(self, reader: Callable[[bytes, int], R], body: bytes, owner: str = "") -> R:
        """What a large body asks for. owner: see `RequestSpec`. Raises BadRequest, Overloaded."""
        places = min(len(body), MAX_WAITING_BODY_BYTES // 2)  # however large it is, it is read when few others wait
        with self._waiting_body_bytes.held(owner, places):
            return await self._long_threads.run(owner, partial(reader, body, self.context_tokens))

    async def accept(self, request: ReadRequest, client: ClientRequest) -> Accepted:
        """Raises BadRequest, NotFound, Overloaded."""
        if isinstance(request, ChatRequest):
            return await self.accept_chat(request, client)
        assert isinstance(request, CompletionRequest)
        return await self.accept_completion(request, client)

    async def accept_chat(self, request: ChatRequest, client: ClientRequest) -> Accepted:
        """Raises BadRequest, NotFound, Overloaded."""
        texts = list(request.texts())
        size = request.size_chars(texts)
        self._check(request, size)
        options = self._chats.options(request)
        self._chats.require_known_calls(request)
        encode = partial(self._tokenizer.encode_chat, request.messages, options, request.prompt_field)
        prompts = await self._encode(request, client, [(texts, encode)], size)
        accepted = self._chats.completed(request, await self._accept(request, client, prompts))
        spec = accepted.specs[0]
        spec.sampling.validate()
        self._check_grammar(spec.sampling, spec.grammar_field)
        return accepted

    async def accept_completion(self, request: CompletionRequest, client: ClientRequest) -> Accepted:
        """Raises BadRequest, NotFound, Overloaded."""
        self._check(request, max(map(len, request.prompts)))
        parts: list[tuple[Sequence[str], Encode]] = []
        for prompt in request.prompts:
            match prompt:
                case str():
                    parts.append(([prompt], partial(self._tokenizer.encode, prompt, field=request.prompt_field)))
                case PairPrompt():
                    options = ChatOptions(arguments=prompt.arguments)
                    encode = partial(self._tokenizer.encode_chat, prompt.messages, options, request.prompt_field)
                    parts.append(([prompt.query, prompt.document], encode))
                case _:
                    parts.append(((), partial(tuple, prompt)))
        return await self._accept(request, client, await self._encode(request, client, parts, sum(map(len, request.prompts))))

    async def tokenize(self, asked: TokenizeRequest, owner: str = "") -> Tokenized:
        """owner: see `RequestSpec`. Raises BadRequest, NotFound, Overloaded."""
        tokenizer, prompt, fields = self._tokenizer, asked.prompt, asked.fields
        self.adapter_in(fields.model)
        if isinstance(prompt, str):
            size = len(prompt)
            encode = partial(tokenizer.encode, prompt, add_special_tokens=fields.add_special_tokens is not False)
        else:
            size = prompt.size_chars(prompt.texts())
            encode = partial(tokenizer.encode_chat, prompt.messages, options=self._chats.options(prompt))
        if size > MAX_CHARS:
            raise BadRequest(f"messages must have at most {MAX_CHARS} characters", field="messages")

        def work() -> Tokenized:
            ids = encode()
            strings = tokenizer.token_strings(ids) if fields.return_token_strs else None
            return Tokenized(count=len(ids), max_model_len=self.context_tokens, tokens=ids, token_strs=strings)

        with self._core.requests.places.held(owner, 1):
            return await self._run(work, size, owner)

    async def detokenize(self, asked: DetokenizeFields, owner: str = "") -> Detokenized:
        """owner: see `RequestSpec`. Raises BadRequest, NotFound, Overloaded."""
        self.adapter_in(asked.model)
        ids, skip = asked.tokens, asked.skip_special_tokens

        def work() -> Detokenized:
            self._check_ids(ids, "tokens")
            text = self._tokenizer.decode(ids, skip_special_tokens=skip)
            return Detokenized(prompt=text, text=text)

        with self._core.requests.places.held(owner, 1):
            return await self._run(work, len(ids), owner)

    def judge(self, embedding: EmbeddingMode | None) -> Judge:
        return Judge(self._model, embedding, self._tokenizer)

    def tokenizer_info(self) -> dict[str, Any]:
        """With the names of a tokenizer_config.json."""
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": None, **self._tokenizer.marks}
        return named | {"chat_template": self._tokenizer.chat_template, "model_max_length": self.context_tokens}

    @property
    def context_tokens(self) -> int:
        """Longest prompt and answer together: the checkpoint's limit, or less when the fleet's memory holds less."""
        model, own = self._core.fleet.model, self._tokenizer.context_tokens
        return own if model is None else min(own, model.context_tokens)

    def close(self) -> None:
        for threads in (self._threads, self._long_threads, self.writers):
            threads.close()

    def adapter_in(self, model: str | None, field: str = "model") -> str:
        """The LoRA adapter that a client means by the name of a model, its own or base:name; "": the model alone. Raises
        NotFound."""
        if model is None or model == self._model:
            return ""
        for name in (model, model.removeprefix(f"{self._model}:")):
            if self._core.fleet.adapters.entry(name) is not None:
                return name
        raise NotFound(f"model {shown(model)!r} is not served here: use {self._model!r}", field=field, code="model_not_found")

    def evicted_adapters(self, request: ReadRequest) -> list[str]:
        """Those of its adapters that are to be loaded again. Raises NotFound."""
        entries = {name: self._core.fleet.adapters.entry(name) for name in self._adapters_of(request, 1) if name}
        return [name for name, entry in entries.items() if entry is not None and not entry.is_loaded]

    def _adapters_of(self, request: ReadRequest, prompts: int) -> list[str]:
        """The adapter of each prompt. Raises NotFound."""
        of_model = self.adapter_in(request.fields.model)
        named = [self.adapter_in(name, "lora_path") if name else of_model for name in request.adapters]
        return named if len(named) > 1 else (named or [of_model]) * prompts

    def _check(self, request: ReadRequest, longest: int) -> None:
        """Check what depends on the served model and on flags, before time is spent on the prompt. longest: the length of the
        longest prompt, in characters or token ids. Raises BadRequest."""
        timeout_s, longest_s, context = request.fields.timeout, self._longest_timeout_s, self.context_tokens
        if timeout_s is not None and timeout_s > longest_s:
            rule = f"at most {longest_s:g} seconds (--max-request-timeout-s)"
            raise BadRequest(f"timeout must be {rule}, is {timeout_s:g}", field="timeout")
        if longest > context * MAX_TOKEN_CHARS:
            raise ContextExceeded(context, f"{request.prompt_field} is far longer", request.prompt_field)

    async def _encode(
        self, request: ReadRequest, client: ClientRequest, prompts: Sequence[tuple[Sequence[str], Encode]], size: int
    ) -> list[_Encoded]:
        """Each prompt in tokens. prompts: the texts of each, and what encodes it. size: characters and token ids of all. Choices
        that wait here, `fields.n` for each prompt, count against --max-requests. Raises Overloaded, BadRequest."""
        context, field = self.context_tokens, request.prompt_field
        fleet, salt = self._core.fleet, request.fields.cache_salt or ""
        page_size, weights = fleet.caches.page_size, fleet.weights.target
        names = self._adapters_of(request, len(prompts))
        entries = [fleet.adapters.entry(name) for name in names]
        variants = [Variant(weights, Digest("") if entry is None else entry.digest) for entry in entries]

        def work() -> list[_Encoded]:
            for texts, _ in prompts:
                self._require_fit(texts, context, field)
            encoded: list[_Encoded] = []
            for (texts, encode), name, variant in zip(prompts, names, variants, strict=True):
                ids = encode()
                if len(ids) > context - request.has_answer:
                    raise ContextExceeded(context, no_room(field, len(ids), context - 1 if request.has_answer else None), field)
                self._check_ids(ids, field)
                packed = pack_ids(ids)
                blocks = BlockNames.of(packed, page_size, variant, salt) if page_size else None
                echo = "".join(texts) or self._tokenizer.decode(ids) if request.echo else ""
                encoded.append(_Encoded(packed, echo, blocks, name))
            return encoded

        self._core.requests.reserve(client, len(prompts) * request.fields.n)
        return await self._run(work, size, client.owner)

    async def _run(self, work: Callable[[], R], size: int, owner: str) -> R:
        """Do the work where texts of this size are encoded. Raises what the work raises."""
        if size < SHORT_CHARS:
            return work()
        threads = self._threads if size <= LONG_CHARS else self._long_threads
        return await threads.run(owner, work)

    def _require_fit(self, texts: Sequence[str], context: int, prompt_field: str) -> None:
        """Raises BadRequest when a prompt of these texts is sure to be longer than the context, after no more work than a prompt
        takes that just fits."""
        if sum(map(len, texts)) <= max(LONG_CHARS, context * USUAL_TOKEN_CHARS):
            return
        tokens = 0
        for text in texts:
            for first in range(0, len(text), LONG_CHARS):
                piece = self._tokenizer.encode(text[first : first + LONG_CHARS], field=prompt_field)
                tokens += max(0, len(piece) - CUT_TOKENS)
                if tokens > context:
                    raise ContextExceeded(context, f"{prompt_field} has more, so shorten it", prompt_field)

    async def _accept(self, request: ReadRequest, client: ClientRequest, prompts: Sequence[_Encoded]) -> Accepted:
        fields, prompt_field, context = request.fields, request.prompt_field, self.context_tokens
        stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
        if client.owner and fields.priority < 0:
            raise BadRequest("priority must be 0 or more where API keys share the fleet: leave it out", field="priority")
        seed = secrets.randbits(SEED_BITS) if fields.seed is None else fields.seed
        words = request.fields.bad_words
        bad_words = await self._threads.run(client.owner, partial(self._bad_words, words)) if words else ()
        base = self._sampling(request, bad_words)
        specs: list[RequestSpec] = []
        tokens = [len(prompt.packed) // ID_BYTES for prompt in prompts]
        check_prompt_pairs(tokens, fields.n, request.prompt_logprobs, in_stream=fields.stream)
        most = None if fields.stream else most_tokens_with(request.logprobs, len(prompts) * fields.n)
        samples: Counter[bytes] = Counter()  # of each prompt: equal prompts go on counting, or they would get equal answers
        for prompt in prompts:
            packed = prompt.packed
            if not packed:
                raise BadRequest(f"{prompt_field} is empty: send at least one token of text", field=prompt_field)
            prompt_tokens = len(packed) // ID_BYTES
            limit = self._max_new_tokens(prompt_tokens, request, most, context)
            if fields.min_tokens > limit:
                raise BadRequest(f"min_tokens is {fields.min_tokens}, but the answer has at most {limit}: lower it", "min_tokens")
            sampling = replace(base, max_new_tokens=limit)
            sampling.validate()
            sampling.check_prompt(prompt_tokens)
            for _ in range(fields.n):
                index = len(specs)
                signed = (seed + samples[packed] + 2**63) % 2**64 - 2**63  # within 64 bits
                params = replace(sampling, seed=signed)
                samples[packed] += 1
                specs.append(
                    RequestSpec(
                        request_id=client.choice_id(index),
                        index=index,
                        prompt=packed,
                        sampling=params,
                        stop=stop,
                        priority=MAX_PRIORITY if client.is_from_batch else fields.priority,
                        timeout_s=fields.timeout,
                        skip_special_tokens=fields.skip_special_tokens,
                        include_stop=fields.include_stop_str_in_output,
                        owner=client.owner,
                        salt=fields.cache_salt or "",
                        session=client.session,
                        adapter=prompt.adapter,
                        blocks=prompt.blocks,
                        grammar_field="tools" if request.grammar is None else request.grammar_field,
                    )
                )
        echoes = tuple(prompt.echo for prompt in prompts for _ in range(fields.n))
        prompt_tokens = sum(len(prompt.packed) for prompt in prompts) // ID_BYTES
        return Accepted(tuple(specs), prompt_tokens, echoes)

    def _sampling(self, request: ReadRequest, bad_words: tuple[tuple[int, ...], ...]) -> SamplingParams:
        """What the request says of sampling, without what depends on the prompt and the choice. Raises BadRequest."""
        fields = request.fields
        biases = biases_of(fields)
        self._check_ids(fields.stop_token_ids, "stop_token_ids")
        self._check_ids([token_id for token_id, _ in biases], "logit_bias")
        self._check_ids(request.logprob_ids, "label_token_ids")
        sampling = SamplingParams(
            max_new_tokens=1,
            **{name: getattr(fields, name) for name in _AS_ASKED},
            top_k=0 if fields.top_k == ALL_TOKENS else fields.top_k,
            stop_token_ids=tuple(dict.fromkeys(fields.stop_token_ids)),
            logit_bias=biases,
            bad_words=bad_words,
            logprobs=request.logprobs,
            logprob_ids=request.logprob_ids,
            prompt_logprobs=request.prompt_logprobs,
            grammar=request.grammar,
            pooling=request.pooling,
        )
        self._check_grammar(sampling, request.grammar_field)
        return sampling

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each spelling of each text. Spaces before a text do not count. Raises BadRequest."""
        sequences: list[tuple[int, ...]] = []
        for word in words:
            spelled = self._tokenizer.spellings(word.lstrip(), field="bad_words")
            if not spelled:
                raise BadRequest(f"bad_words holds {word!r}, which has no tokens: leave it out", field="bad_words")
            sequences += spelled
        if len(set(sequences)) > MAX_BAD_WORDS:
            problem = f"has {len(set(sequences))} spellings in tokens, of which a request gets at most {MAX_BAD_WORDS}"
            raise BadRequest(f"bad_words {problem}: send fewer", field="bad_words")
        return tuple(dict.fromkeys(sequences))

    def _check_grammar(self, sampling: SamplingParams, field: str) -> None:
        """field: what asks for a grammar, if there is one. Raises BadRequest when the fleet has none, and when a stop token has
        text: an answer that a grammar describes would end in its middle."""
        if sampling.grammar is None:
            return
        if not self._core.fleet.holds_grammars:
            fix = "leave it out, or start the instances with --grammar on"
            raise BadRequest(f"{field}: the instances run with --grammar off, so no answer can be held to it: {fix}", field=field)
        for token_id in sampling.stop_token_ids:
            if text := self._tokenizer.decode([token_id], skip_special_tokens=True):
                rule = f"{token_id} is the text {text!r}: leave it out: the grammar says where the answer ends"
                raise BadRequest(f"stop_token_ids: {rule}", field="stop_token_ids")

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raises BadRequest when one of these is no token of the model."""
        largest_id = self._tokenizer.vocab_size - 1
        if ids and (min(ids) < 0 or max(ids) > largest_id):
            raise BadRequest(f"{field} holds token ids that are not between 0 and {largest_id}", field=field)

    def _max_new_tokens(self, prompt_tokens: int, request: ReadRequest, most: int | None, context: int) -> int:
        """What the client asked for; otherwise what the context and the largest decode instance leave, but no more than the
        default if there is one. most: see `most_tokens_with`. Raises BadRequest when the context has no room for it."""
        asked = request.max_tokens
        if asked is None or request.ends_with_context:
            default = request.default_max_tokens or self._chat_max_tokens if asked is None else asked
            line = self._core.fleet.candidates.lines["decode"]
            memory = line[-1].capacity_tokens if line else context
            room = max(1, min(context, memory) - prompt_tokens)
            return min(limit for limit in (room, default, most) if limit is not None)
        name = request.max_tokens_field
        if prompt_tokens + asked > context and request.has_answer:
            after = f"after the {prompt_tokens} of {request.prompt_field} it has room for {context - prompt_tokens}"
            raise ContextExceeded(context, f"{after}, but {name} is {asked}, so lower it", name)
        if most is not None and asked > most:
            fix = f"lower {name} to {most}, ask for fewer choices or alternatives, or send stream=true"
            raise BadRequest(f"one whole answer gets at most {MAX_PAIRS} log probabilities: {fix}", field=name)
        return asked
