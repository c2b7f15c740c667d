"""What is asked of a server: sessions of one or more turns, made up or read from files, and the JSON body of each turn.

Owns lengths, contents and the formats of files. Knows neither connections nor clocks. Pure: the same seed makes the same prompts.

A line of a prompt file is {"prompt": text or token ids} or {"messages": [...]}, with "output_tokens" if it says how long the
answer is. A line of a conversation file is {"messages": [...]}, or ShareGPT's {"conversations": [{"from": "human", "value":
...}]}: what the user says is sent turn by turn, and what the assistant says is left to the server. Traces are in Mooncake's
format (https://github.com/kvcache-ai/Mooncake, FAST'25): when requests came, how long they were, and which blocks of tokens they
had in common. Blocks with the same id have the same tokens, so requests that share a prefix in the trace share it here."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.client import USAGE_FIELDS, UsageReports
from bench.options import PROMPTS, ServeOptions, WorkloadOptions
from common.errors import ConfigError, needs_file
from common.text.tokenizer_manager import TokenizerManager

Ids: TypeAlias = NDArray[np.int32]
ChatTurn: TypeAlias = dict[str, Any]
T = TypeVar("T")
TRIED_WORDS, FEWEST_WORDS = 8192, 32
_SHARE_GPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True, slots=True)
class LoadTurn:
    """One request of a session: what it adds to the prompt, and the length of its answer."""

    content: str | Ids
    """The whole prompt, or the next message of its user: text, or token ids, [tokens] int32."""
    output_tokens: int
    input_tokens: int = 0
    """The length of the content; 0: not known."""
    before: tuple[ChatTurn, ...] = ()
    """Messages ahead of it, such as a system message."""

    @property
    def as_text(self) -> str:
        assert isinstance(self.content, str), "chats, and sessions of several turns, consist of texts"
        return "".join([*(f"{message['content']}\n" for message in self.before), self.content])


@dataclass(frozen=True, slots=True)
class LoadSession:
    """One request, or several of a conversation, each with the answers so far before it."""

    turns: tuple[LoadTurn, ...]
    due_s: float | None = None
    """When it begins, from the beginning of the run; None: the load decides."""

    def prompt(self, answers: Sequence[str]) -> str | list[int]:
        """The prompt of the turn after these answers, for completions: all texts so far, one after the other."""
        *earlier, turn = self.turns[: len(answers) + 1]
        if not isinstance(turn.content, str):
            assert not answers, "a session of several turns consists of texts"
            ids: list[int] = turn.content.tolist()
            return ids
        return "".join([*(past.as_text + answer for past, answer in zip(earlier, answers, strict=True)), turn.as_text])

    def messages(self, answers: Sequence[str]) -> list[ChatTurn]:
        """The messages of the turn after these answers, for chats."""
        messages: list[ChatTurn] = []
        for number, turn in enumerate(self.turns[: len(answers) + 1]):
            if number:
                messages.append({"role": "assistant", "content": answers[number - 1]})
            assert isinstance(turn.content, str), "a chat takes text"
            messages += [*turn.before, {"role": "user", "content": turn.content}]
        return messages


class RequestBodies:
    """Makes the bodies of a run's requests."""

    def __init__(self, bench: ServeOptions, model: str, usage: UsageReports) -> None:
        self._is_chat = bench.target.backend == "openai-chat"
        self._common: dict[str, Any] = {"model": model, "stream": True, "temperature": bench.load.temperature}
        self._common |= USAGE_FIELDS[usage] | ({"ignore_eos": True} if bench.ignores_eos else {})
        self._extra = bench.load.extra

    def body(self, session: LoadSession, answers: Sequence[str]) -> bytes:
        """The turn of this session that follows these answers."""
        output_tokens = session.turns[len(answers)].output_tokens
        if self._is_chat:
            own = {"messages": session.messages(answers), "max_completion_tokens": output_tokens}
        else:
            own = {"prompt": session.prompt(answers), "max_tokens": output_tokens}
        return msgspec.json.encode(self._common | own | self._extra)


@dataclass(frozen=True, slots=True)
class LoadSessions:
    """All sessions of a run."""

    warmups: list[LoadSession]
    """Sent first, and not measured. They are like the others, but no whole prompt that is made up is the same."""
    measured: list[LoadSession]


def sessions_of(bench: ServeOptions, model: str) -> LoadSessions:
    """What is sent. model: the server's name of it, which is also its tokenizer unless another is given. Raises ConfigError."""
    options, warmups = bench.workload, bench.load.num_warmups
    if options.is_from_file:
        read = sessions_of_file(options, is_chat=bench.target.backend == "openai-chat")
        return LoadSessions(list(islice(cycle(read), warmups)), read)
    words = prompt_vocabulary(options.tokenizer or model, options.prompts)
    if options.dataset_name == "trace":
        lines = read_trace(options)
        fresh = 1 + max(max(line.hash_ids, default=0) for line in lines)  # warm-ups have blocks of their own
        firsts = [
            msgspec.structs.replace(line, hash_ids=[fresh + (number << 32) + block for block in line.hash_ids])
            for number, line in enumerate(islice(cycle(lines), warmups))
        ]
        return LoadSessions(trace_sessions(options, words, firsts), trace_sessions(options, words, lines))
    made = list(MADE_UP[options.dataset_name](options, words, (options.num_prompts or PROMPTS) + warmups))
    return LoadSessions(made[len(made) - warmups :], made[: len(made) - warmups])


# ---- made-up prompts: the tokens that they consist of, and their lengths ----


@dataclass(frozen=True, slots=True)
class PromptVocabulary:
    """The tokens that made-up prompts consist of, and how they are sent. A prompt of n tokens that is sent as text has n tokens
    for the server too, so its words are tokens that stay what they are when their text is read again."""

    ids: Ids
    """The tokens to choose from, [tokens] int32."""
    write: Callable[[Ids], str | Ids]
    """Makes what is sent of some of them: a text, or the ids themselves."""
    added_tokens: int = 0
    """Tokens that the server adds to a prompt by itself, such as one for its beginning."""

    def draw(self, random: np.random.Generator, tokens: int) -> Ids:
        """This many random tokens, [tokens] int32."""
        return self.ids[random.integers(0, len(self.ids), tokens)]

    def turn(self, ids: Ids, output_tokens: int) -> LoadTurn:
        return LoadTurn(self.write(ids), output_tokens, len(ids) + self.added_tokens)


def prompt_vocabulary(tokenizer: str, prompts: str) -> PromptVocabulary:
    """The words of a tokenizer: a folder, a Hugging Face name, or demo. prompts: text or ids. Raises ConfigError."""
    try:
        manager = TokenizerManager(tokenizer)
    except ConfigError as error:
        raise ConfigError(f"prompts cannot be made up without the model's tokenizer: give --tokenizer ({error})") from error
    added = manager.backend.get_added_tokens_decoder()
    plain = np.array(sorted(set(manager.backend.get_vocab(with_added_tokens=False).values()) - set(added)), np.int32)
    if prompts == "ids":
        return PromptVocabulary(plain, lambda ids: ids)
    words = _words(manager, plain)
    if len(words) < FEWEST_WORDS:
        raise ConfigError(f"--tokenizer {tokenizer}: only {len(words)} of its tokens are words; send --prompts ids")
    return PromptVocabulary(words, lambda ids: manager.backend.decode(ids.tolist()), len(manager.encode("")))


def _words(manager: TokenizerManager, ids: Ids) -> Ids:
    """Those of these tokens that are a word with a space before it, and are read as the same token again. At most TRIED_WORDS are
    looked at, the same ones each time."""
    if len(ids) > TRIED_WORDS:
        ids = np.sort(np.random.default_rng(0).choice(ids, TRIED_WORDS, replace=False))
    pairs = [[token, token] for token in ids.tolist()]
    texts = manager.backend.decode_batch(pairs)
    read = manager.backend.encode_batch(texts, add_special_tokens=False)
    kept = [pair[0] for pair, text, again in zip(pairs, texts, read, strict=True) if _is_word_twice(text) and again.ids == pair]
    return np.array(kept, np.int32)


def _is_word_twice(text: str) -> bool:
    words = [part for part in text.split(" ") if part]
    return len(words) == 2 and words[0] == words[1] and words[0].isalpha()


def random_sessions(options: WorkloadOptions, words: PromptVocabulary, count: int) -> Iterator[LoadSession]:
    """Prompts of random tokens, each after the prefix that all have. Conversations have it in their first turn only."""
    random = np.random.default_rng(options.seed)
    prefix = words.draw(random, options.random_prefix_len)
    turns = options.conversation_turns if options.dataset_name == "conversation" else 1
    for _ in range(count):
        yield LoadSession(tuple(_random_turn(options, words, random, prefix if not n else prefix[:0]) for n in range(turns)))


def prefix_sessions(options: WorkloadOptions, words: PromptVocabulary, count: int) -> Iterator[LoadSession]:
    """Groups of prompts with a common prefix, in random order. Every group has as many prompts as the others, or one more."""
    random = np.random.default_rng(options.seed)
    groups = options.prefix_repetition_num_prefixes
    prefixes = [words.draw(random, options.prefix_repetition_prefix_len) for _ in range(groups)]
    for group in random.permutation(np.arange(count) % groups):
        ids = np.concatenate([prefixes[group], words.draw(random, options.prefix_repetition_suffix_len)])
        yield LoadSession((words.turn(ids, options.prefix_repetition_output_len),))


MADE_UP = {"random": random_sessions, "conversation": random_sessions, "prefix_repetition": prefix_sessions}


def _random_turn(options: WorkloadOptions, words: PromptVocabulary, random: np.random.Generator, prefix: Ids) -> LoadTurn:
    own = max(0, options.random_input_len - words.added_tokens)
    tokens = _length(random, own, options.random_range_ratio, 0)
    if not tokens and not len(prefix):
        raise ConfigError(f"--random-input-len {options.random_input_len} leaves nothing for a prompt: make it larger")
    output = _length(random, options.random_output_len, options.random_range_ratio, 1)
    return words.turn(np.concatenate([prefix, words.draw(random, tokens)]), output)


def _length(random: np.random.Generator, mean: int, ratio: float, least: int) -> int:
    return max(least, int(random.integers(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio)) + 1)))


# ---- files ----


NotNegative: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class _PromptLine(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[ChatTurn] = []
    output_tokens: NotNegative = 0


class _ShareGptMessage(msgspec.Struct):
    who: str = msgspec.field(name="from")
    value: str


class _ConversationLine(msgspec.Struct):
    messages: list[ChatTurn] = []
    conversations: list[_ShareGptMessage] = []
    output_tokens: NotNegative = 0


class TraceRequest(msgspec.Struct):
    """A line of a trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds."""
    input_length: AtLeast1
    output_length: AtLeast1
    hash_ids: list[NotNegative]
    """The blocks of the prompt; the last one may be cut short."""


def sessions_of_file(options: WorkloadOptions, *, is_chat: bool) -> list[LoadSession]:
    """The prompts or conversations of a file, each line once, or again and again until there are enough. Raises ConfigError."""
    path = options.dataset_path
    if options.dataset_name == "custom":
        sessions = [_prompt(options, is_chat, number, line) for number, line in _read_lines(path, _PromptLine)]
    else:
        sessions = [_conversation(options, number, line) for number, line in _read_lines(path, _ConversationLine)]
    return list(islice(cycle(sessions), options.num_prompts or len(sessions)))


def read_trace(options: WorkloadOptions) -> list[TraceRequest]:
    """The part of the trace that is to be sent, in the order of its times. Raises ConfigError."""
    kept: list[TraceRequest] = []
    for number, line in _read_lines(options.dataset_path, TraceRequest):
        if len(line.hash_ids) * options.trace_block_tokens < line.input_length:
            raise _refused(options.dataset_path, number, f"it has too few hash_ids for {line.input_length} tokens")
        kept.append(line)
    kept.sort(key=lambda line: line.timestamp)
    first_ms = kept[0].timestamp
    if options.trace_duration_s:
        kept = [line for line in kept if line.timestamp - first_ms < 1000 * options.trace_duration_s]
    if options.num_prompts > len(kept):
        raise ConfigError(f"--num-prompts {options.num_prompts}: this part of the trace has only {len(kept)} requests")
    return kept[: options.num_prompts or None]


def trace_sessions(options: WorkloadOptions, words: PromptVocabulary, lines: Sequence[TraceRequest]) -> list[LoadSession]:
    """The sessions of a trace. The first request is due at 0. Prompts have the scaled lengths, less what the server adds by
    itself."""
    first_ms, scale = lines[0].timestamp, options.trace_length_scale
    sessions: list[LoadSession] = []
    for line in lines:
        tokens = max(1, round(line.input_length * scale) - words.added_tokens)
        ids = prompt_of_blocks(words, line.hash_ids, tokens, options.trace_block_tokens * scale)
        turn = words.turn(ids, max(1, round(line.output_length * scale)))
        sessions.append(LoadSession((turn,), (line.timestamp - first_ms) / 1000 / options.trace_speed))
    return sessions


def prompt_of_blocks(words: PromptVocabulary, blocks: list[int], tokens: int, block_tokens: float) -> Ids:
    """The first `tokens` tokens of these blocks, [tokens] int32. block_tokens: where it is not whole, block k ends at k + 1
    times it, rounded up, so that a prompt always has blocks enough."""
    ends = np.ceil(block_tokens * np.arange(len(blocks) + 1)).astype(np.int64)
    parts: list[Ids] = []
    for block, begin, end in zip(blocks, ends[:-1], ends[1:], strict=True):
        if begin >= tokens:
            break
        parts.append(words.draw(np.random.default_rng(block), math.ceil(block_tokens))[: end - begin])
    return np.concatenate(parts)[:tokens]


def _prompt(options: WorkloadOptions, is_chat: bool, number: int, line: _PromptLine) -> LoadSession:
    output = line.output_tokens or options.custom_output_len
    if (line.prompt is None) == (not line.messages):
        raise _refused(options.dataset_path, number, "it must have either prompt or messages")
    if line.prompt is None:
        *before, last = line.messages
        if not is_chat:
            raise _refused(options.dataset_path, number, "messages are for --backend openai-chat")
        if last.get("role") != "user" or not isinstance(last.get("content"), str):
            raise _refused(options.dataset_path, number, "its last message must be a text of the user")
        return LoadSession((LoadTurn(last["content"], output, before=tuple(before)),))
    if not line.prompt or (is_chat and not isinstance(line.prompt, str)):
        raise _refused(options.dataset_path, number, "the prompt is empty, or consists of token ids, which a chat does not take")
    if isinstance(line.prompt, str):
        return LoadSession((LoadTurn(line.prompt, output),))
    return LoadSession((LoadTurn(np.array(line.prompt, np.int32), output, len(line.prompt)),))


def _conversation(options: WorkloadOptions, number: int, line: _ConversationLine) -> LoadSession:
    output = line.output_tokens or options.custom_output_len
    messages = line.messages
    if line.conversations:
        messages = [{"role": _SHARE_GPT.get(each.who, each.who), "content": each.value} for each in line.conversations]
    turns: list[LoadTurn] = []
    before: list[ChatTurn] = []
    for message in messages:
        match message:
            case {"role": "user", "content": str(text)} if text:
                turns.append(LoadTurn(text, output, before=tuple(before)))
                before = []
            case {"role": "assistant"}:
                pass
            case {"role": "system", "content": str(_)}:
                before.append(message)
            case _:
                raise _refused(options.dataset_path, number, f"a message is no text of user, assistant or system: {message}")
    if not turns:
        raise _refused(options.dataset_path, number, "the user says nothing")
    return LoadSession(tuple(turns))


def _read_lines(path: str, kind: type[T]) -> list[tuple[int, T]]:
    """The lines of a file with their numbers; empty ones are skipped. Raises ConfigError, which names the line."""
    with needs_file(f"--dataset-path: {path} cannot be read"):
        lines = Path(path).read_bytes().splitlines()
    decoder, read = msgspec.json.Decoder(kind), []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                read.append((number, decoder.decode(line)))
            except msgspec.DecodeError as error:
                raise _refused(path, number, str(error)) from error
    if not read:
        raise ConfigError(f"--dataset-path: {path} is empty")
    return read


def _refused(path: str, line: int, reason: str) -> ConfigError:
    return ConfigError(f"--dataset-path: line {line} of {path} cannot be used: {reason}")
