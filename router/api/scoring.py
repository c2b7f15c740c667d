"""POST /rerank, POST /score and their other names: how well two texts fit each other, or how likely tokens come next.

Owns their fields and answers, and by what the served model judges a pair of texts: one that makes embeddings by their cosine, one
with a reranker's chat template by how likely its answer is "yes" rather than "no". Fields: https://jina.ai/reranker;
vllm/entrypoints/pooling/scoring/protocol.py at https://github.com/vllm-project/vllm; ScoringRequest in
python/sglang/srt/entrypoints/openai/protocol.py at https://github.com/sgl-project/sglang.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from common.errors import BadRequest, Conflict
from common.ranges import TokenId
from common.sampling_params import MAX_LOGPROB_IDS
from common.text.embedding import EmbeddingMode
from common.text.tokenizer_manager import TokenizerManager
from router.api.answers import embedding_in
from router.api.bodies import object_in
from router.api.completions import CompletionRequest, PairPrompt, PromptField, require_few_ids
from router.api.embeddings import MAX_INPUTS, NumbersShape, PromptFields, PromptUsage
from router.api.fields import Unsupported, read_fields
from router.requests import ChoiceDelta

_RERANKS = 'the answer can only be "yes" or "no"'
"""What the chat templates say that make a reranker of a model, such as Qwen3-Reranker's, in lower case."""
_TRUNCATION = dict.fromkeys(("truncate_prompt_tokens", "truncation_side"), ())
_COMMON = {**_TRUNCATION, "max_tokens_per_query": (0,), "max_tokens_per_doc": (0,), "use_activation": (True,)}
RERANK = Unsupported({**_COMMON, "rank_fields": (["text"],), "max_chunks_per_doc": ()})
SCORE = Unsupported({**_COMMON, "add_special_tokens": (True,), "return_pooled_hidden_states": (False,)})

MAX_SIZE = 2**22
Texts: TypeAlias = str | list[str]


class TextDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    """The document."""


class RerankFields(PromptFields, frozen=True, kw_only=True):
    """The body of POST /rerank."""

    query: str
    """What is searched for."""
    documents: Annotated[list[str | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS)]
    """What may fit it: up to 256 texts."""
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Send so many of the best; without it or with 0: all."""
    return_documents: bool = True
    """Send the documents too."""
    instruction: str | None = None
    """What a fit is, for a reranker's chat template."""
    instruct: str | None = None
    """SGLang's name of instruction."""


class ScoreFields(PromptFields, frozen=True, kw_only=True):
    """The body of POST /score: text_1 and text_2, or queries with documents or items, as vLLM's; or query, items and
    label_token_ids, as SGLang's."""

    text_1: Texts | None = None
    """One text, for all of the other; or as many."""
    text_2: Texts | None = None
    """What is compared with text_1: up to 256 texts."""
    queries: Texts | None = None
    """Another name of text_1."""
    documents: Texts | None = None
    """With queries: another name of text_2."""
    items: str | list[str | list[int]] | None = None
    """With queries: another name of text_2. With query: what follows it, up to 256 texts or token ids."""
    query: str | list[int] | None = None
    """What each prompt begins with, as text or token ids."""
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LOGPROB_IDS)] | None = None
    """With query and items: tokens that may come next, whose probabilities are the scores."""
    apply_softmax: bool = False
    """The probabilities of an item add up to 1."""
    item_first: bool = False
    """The prompt begins with the item."""


Scores: TypeAlias = list[list[float]]
_Write: TypeAlias = Callable[["ScoreShape", Scores], msgspec.Struct]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(CompletionRequest):
    """Prompts of which scores are made."""

    write: _Write
    """Makes the answer."""
    pairs: tuple[tuple[int, int], ...] = ()
    """The numbers of two prompts whose embeddings are compared, for each score; () where tokens are scored."""
    softmax: bool = True
    """Whether the scores of the tokens add up to 1."""


class RerankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """The number of the document."""
    document: TextDocument | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class RerankBody(msgspec.Struct, frozen=True):
    """The answer of POST /rerank: the best document first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[RerankedDocument]


class PairScore(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoresBody(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /score."""

    id: str
    object: Literal["list", "scoring"]
    created: int
    model: str
    data: list[PairScore] | msgspec.UnsetType = msgspec.UNSET
    """For pairs of texts, in their order."""
    scores: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    """For each item the probability of each of label_token_ids."""
    usage: PromptUsage


class Judge:
    """How the served model judges a pair of texts. model: its name. embedding: how it makes embeddings; None: it makes none."""

    def __init__(self, model: str, embedding: EmbeddingMode | None, tokenizer: TokenizerManager) -> None:
        self.model = model
        self._embedding = embedding
        self._verdicts: tuple[int, ...] = ()
        """The tokens with which "yes" and "no" begin; () for a model that is no reranker."""
        if _RERANKS in tokenizer.chat_template.lower():
            self._verdicts = tuple(tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
        self._instructions = [name for name in ("instruction", "instruct") if tokenizer.reads(name)]
        """How the chat template calls what the client says of a fit."""

    def request(
        self, fields: PromptFields, pairs: Sequence[tuple[str, str]], field: str, write: _Write, instruction: str | None = None
    ) -> ScoreRequest:
        """field: which held the second ones. Raises BadRequest."""
        named: dict[str, Any] = {"fields": fields.sampling(self.model), "max_tokens": 1, "prompt_field": field, "write": write}
        if instruction is not None and not (self._verdicts and self._instructions):
            problem = "is for rerankers whose chat template reads it: leave it out"
            raise BadRequest(f"instruction {problem}", field="instruction", code="unsupported_parameter")
        if self._verdicts:
            told = {} if instruction is None else dict.fromkeys(self._instructions, instruction)
            prompts = tuple(PairPrompt(query, document, told) for query, document in pairs)
            _require_few(sum(map(len, prompts)), field)
            return ScoreRequest(prompts=prompts, logprobs=0, logprob_ids=self._verdicts, **named)
        if self._embedding is None:
            raise BadRequest(
                f"{self.model} judges no pairs of texts: start the router with --pooling last, mean or cls if it was trained for "
                "embeddings, or with the --chat-template of a reranker. Any model serves POST /v1/score with query, items and "
                "label_token_ids",
                field="model",
                code="unsupported_model",
            )
        numbers = {text: number for number, text in enumerate(dict.fromkeys(chain.from_iterable(pairs)))}
        of_pairs = tuple((numbers[first], numbers[second]) for first, second in pairs)
        return ScoreRequest(prompts=tuple(numbers), pooling=self._embedding.pooling, pairs=of_pairs, **named)


def _require_few(size: int, field: str) -> None:
    """Raises BadRequest. size: characters or token ids of all prompts: they may be many times what the body holds."""
    if size > MAX_SIZE:
        raise BadRequest(f"{field} make prompts of {size} characters or token ids, more than {MAX_SIZE}: send fewer", field=field)


def read_rerank(judge: Judge, body: bytes, context_tokens: int | None = None) -> ScoreRequest:
    """The body of POST /rerank. Raises BadRequest."""
    fields = read_fields(object_in(body, context_tokens), RerankFields, RERANK)
    documents = [one if isinstance(one, str) else one.text for one in fields.documents]
    instruction = fields.instruct if fields.instruction is None else fields.instruction
    pairs = [(fields.query, document) for document in documents]
    return judge.request(fields, pairs, "documents", partial(_reranked, fields, documents), instruction)


def _reranked(fields: RerankFields, documents: Sequence[str], shape: "ScoreShape", scores: Scores) -> RerankBody:
    results = [
        RerankedDocument(
            index=index, relevance_score=score[0], document=TextDocument(text) if fields.return_documents else msgspec.UNSET
        )
        for index, (text, score) in enumerate(zip(documents, scores, strict=True))
    ]
    results.sort(key=lambda result: -result.relevance_score)
    return RerankBody(shape.id, shape.model, shape.prompt_usage, results[: fields.top_n or None])


_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"))


def read_score(judge: Judge, body: bytes, context_tokens: int | None = None) -> ScoreRequest:
    """The body of POST /score. Raises BadRequest."""
    require_few_ids(body, context_tokens, "query")
    fields = read_fields(object_in(body, context_tokens), ScoreFields, SCORE)
    given = {name: value for name in ("query", *dict.fromkeys(chain(*_PAIRS))) if (value := getattr(fields, name)) is not None}
    if given.keys() == {"query", "items"} and fields.label_token_ids:
        return _read_labels(fields, judge.model)
    field = next((second for first, second in _PAIRS if given.keys() == {first, second}), None)
    if field is None or fields.label_token_ids is not None or fields.apply_softmax or fields.item_first:
        ways = "text_1 and text_2, queries and documents, or queries and items, and nothing else"
        problem = f"send {ways}; or query, items and label_token_ids, with apply_softmax and item_first if you want"
        raise BadRequest(problem, field=next(iter(given), "text_1"))
    firsts, seconds = ([value] if isinstance(value, str) else value for value in given.values())
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds) or not 1 <= len(seconds) <= MAX_INPUTS or not all(isinstance(text, str) for text in seconds):
        rule = f"1 to {MAX_INPUTS} texts, and as many as the other if that has more than one"
        raise BadRequest(f"{field} must have {rule}", field=field)
    return judge.request(fields, list(zip(firsts, seconds, strict=True)), field, _pair_scores)


def _pair_scores(shape: "ScoreShape", scores: Scores) -> ScoresBody:
    data = [PairScore(index=index, score=score[0]) for index, score in enumerate(scores)]
    return ScoresBody(id=shape.id, object="list", created=shape.created, model=shape.model, data=data, usage=shape.prompt_usage)


def _label_scores(shape: "ScoreShape", scores: Scores) -> ScoresBody:
    return ScoresBody(
        id=shape.id, object="scoring", created=shape.created, model=shape.model, scores=scores, usage=shape.prompt_usage
    )


def _read_labels(fields: ScoreFields, model: str) -> ScoreRequest:
    query: Any = fields.query
    items: Any = [fields.items] if isinstance(fields.items, str) else fields.items
    labels = tuple(fields.label_token_ids or ())
    if len(set(labels)) < len(labels):
        raise BadRequest("label_token_ids holds a token twice: send each once", field="label_token_ids")
    if not 1 <= len(items) <= MAX_INPUTS or any(isinstance(item, str) != isinstance(query, str) for item in items):
        raise BadRequest(f"items must hold 1 to {MAX_INPUTS} texts, or lists of token ids if query is one", field="items")
    _require_few(len(query) * len(items) + sum(map(len, items)), "items")
    joined = [item + query if fields.item_first else query + item for item in items]
    prompts: tuple[PromptField, ...] = tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in joined)
    return ScoreRequest(
        fields=fields.sampling(model),
        max_tokens=1,
        prompts=prompts,
        prompt_field="items",
        logprobs=0,
        logprob_ids=labels,
        softmax=fields.apply_softmax,
        write=_label_scores,
    )


class ScoreShape(NumbersShape[ScoreRequest]):
    """/rerank and /score"""

    def whole(self, choices: Sequence[ChoiceDelta]) -> bytes:
        scores = self._cosines(choices) if self.request.pairs else [self._likelihoods(choice) for choice in choices]
        return msgspec.json.encode(self.request.write(self, scores))

    def _cosines(self, choices: Sequence[ChoiceDelta]) -> Scores:
        vectors = np.array([np.frombuffer(embedding_in(choice), dtype="<f4") for choice in choices], dtype=np.float64)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= np.where(lengths > 0, lengths, 1)
        return [[float(vectors[first] @ vectors[second])] for first, second in self.request.pairs]

    def _likelihoods(self, choice: ChoiceDelta) -> list[float]:
        """Raises Conflict."""
        told, wanted = dict(choice.logprobs[0].top), self.request.logprob_ids
        if not told.keys() >= set(wanted):
            raise Conflict("an instance of an older release has served this, which knows no scores: upgrade it")
        logprobs = np.array([told[token_id] for token_id in wanted])
        if self.request.softmax:
            logprobs -= np.logaddexp.reduce(logprobs)
        likelihoods: list[float] = np.exp(logprobs).tolist()
        return likelihoods
