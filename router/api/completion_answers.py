"""The answers of POST /v1/completions as JSON.

Owns their shape, and the prompt that `echo` puts in front of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from common.ids import unpack_ids
from common.messages import Failed, Finished, TokenLogprob
from router.api.answers import OpenAIFinish, OpenAIShape, TokenIds, WholeChoice, finish_of
from router.api.completions import CompletionRequest
from router.api.logprobs import CompletionLogprobs, PromptLogprobs, TextPlace
from router.outbox import ChoiceDelta


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: OpenAIFinish | None = None
    logprobs: CompletionLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


@dataclass(slots=True, kw_only=True, eq=False)
class CompletionShape(OpenAIShape[CompletionRequest]):
    """/v1/completions"""

    chunk_object: ClassVar[str] = "text_completion"
    whole_object: ClassVar[str] = "text_completion"

    _places: dict[int, TextPlace] = field(default_factory=dict, init=False)
    """For each choice: behind the text of the tokens that were written with their logprobs."""

    def events(self, delta: ChoiceDelta, *, opens: bool) -> bytes:
        if self.asked.hides_answer:
            ending = delta.ending if isinstance(delta.ending, Failed | None) else Finished(reason="length")
            delta = replace(delta, text="", token_ids=(), logprobs=(), ending=ending)
        return super(CompletionShape, self).events(delta, opens=opens)

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        if self.asked.hides_answer:
            ending = Finished(reason="length")
            choices = [
                WholeChoice(prompt_logprobs=choice.prompt_logprobs, cached_tokens=choice.cached_tokens, ending=ending)
                for choice in choices
            ]
        return super(CompletionShape, self).whole(choices)

    def _chunk_choices(self, delta: ChoiceDelta, *, opens: bool) -> Iterable[msgspec.Struct]:
        index, parts = delta.index, list[msgspec.Struct]()
        if opens and self.asked.echo:
            logprobs = self._logprobs(index, (), delta.prompt_logprobs)
            parts.append(TextChoice(index, self.accepted.echoes[index], None, logprobs))
        logprobs = self._logprobs(index, delta.logprobs) if delta.logprobs else None
        ids = self._ids(delta.token_ids)
        if delta.text or logprobs is not None or ids:
            parts.append(TextChoice(index, delta.text, None, logprobs, ids))
        finish = finish_of(delta.ending)
        if finish is not None:
            parts.append(TextChoice(index, "", finish))
        return parts

    def _whole_choice(self, index: int, choice: WholeChoice) -> msgspec.Struct:
        asked = self.asked
        prompt: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
        if asked.fields.prompt_logprobs is not None:
            prompt = self.logprob_writer(asked.fields.prompt_logprobs).prompt(choice.prompt_logprobs)
        echo = self.accepted.echoes[index] if asked.echo else ""
        logprobs = self._logprobs(index, choice.logprobs, choice.prompt_logprobs if asked.echo else None)
        return TextChoice(index, echo + choice.text, choice.finish, logprobs, self._ids(choice.token_ids), prompt)

    def _logprobs(
        self, index: int, tokens: Sequence[TokenLogprob], prompt: Sequence[TokenLogprob] | None = None
    ) -> CompletionLogprobs | None:
        """The next tokens of a choice. prompt: its tokens from the second on, if they come first."""
        if self.asked.logprobs is None:
            return None
        echoed: tuple[int, Sequence[TokenLogprob], str] | None = None
        if prompt is not None:
            echoed = int(unpack_ids(self.accepted.specs[index].prompt[:4])[0]), prompt, self.accepted.echoes[index]
        place = self._places.setdefault(index, TextPlace(self.token_texts))
        skips = self.asked.fields.skip_special_tokens
        return self.logprob_writer(self.asked.logprobs).completion(tokens, place, skips_special=skips, prompt=echoed)
