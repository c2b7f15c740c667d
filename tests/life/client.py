"""Clients of a simulated fleet, and what the router measures of them.

Owns what each client has been told. Knows no instances.
"""

from dataclasses import dataclass, field

from common.ids import RequestId
from common.messages import Ending, TokenLogprob
from router.requests import ClientRequest
from router.timelines import Durations, RequestTimes
from simulation.planned_fleet import PlannedObserver


@dataclass(slots=True, eq=False)
class ReceivedAnswer:
    """What a client has got of one choice."""

    request_id: RequestId
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    cached_tokens: int = 0
    versions: list[tuple[int, str]] = field(default_factory=list)
    """From which token on which weights computed."""


class Client:
    """One HTTP request: its choices share one `ClientRequest`. What it has got is read when it is looked at."""

    def __init__(self, *request_ids: RequestId) -> None:
        self.request = ClientRequest()
        self.cut_off = False
        """Its router has died: nothing comes any more."""
        self._answers = [ReceivedAnswer(request_id) for request_id in request_ids]

    def stop_reading(self) -> None:
        """From now on whatever comes is too much."""
        self.request.limit_chars = 0

    @property
    def answers(self) -> list[ReceivedAnswer]:
        """One for each choice."""
        for delta in self.request.take():
            answer = self._answers[delta.index]
            answer.token_ids += delta.token_ids
            answer.text += delta.text
            answer.logprobs += delta.logprobs
            answer.prompt_logprobs += delta.prompt_logprobs
            answer.cached_tokens += delta.cached_tokens
            answer.versions += delta.versions
            if delta.ending is not None:
                answer.endings.append(delta.ending)
        return self._answers

    @property
    def ended(self) -> bool:
        """Every choice has its ending, or none will come."""
        return self.cut_off or all(answer.endings for answer in self.answers)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first choice. The properties below are the first choice's too."""
        return self.answers[0].token_ids

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def endings(self) -> list[Ending]:
        return self.answers[0].endings


class ClientObserver(PlannedObserver):
    """The router's measurements. seconds_between: of tokens of one answer, all answers together. durations: what instances told
    of attempts."""

    def __init__(self) -> None:
        super().__init__()
        self.endings: list[Ending] = []
        self.seconds_to_first: list[float] = []
        self.seconds_between: list[float] = []
        self.durations: list[Durations] = []

    def first_token(self, seconds: float, predicted_s: float | None) -> None:
        super().first_token(seconds, predicted_s)
        self.seconds_to_first.append(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self.seconds_between.append(seconds)

    def ended(self, ending: Ending, times: RequestTimes, attempts: int) -> None:
        self.endings.append(ending)

    def phases(self, durations: Durations) -> None:
        self.durations.append(durations)
