"""What waited for a slow reader is sent as one piece for each choice."""

import pytest

from common.messages import Ending, Finished, TokenLogprob, TokenLogprobs
from router import outbox
from router.outbox import ChoiceDelta, joined


def test_pieces_of_each_choice_become_one_with_the_last_ones_ending() -> None:
    done = Finished(reason="length")
    one, two, three, of_prompt = (TokenLogprob(number, -1.0, 1) for number in (1, 2, 3, 9))
    pieces = [
        ChoiceDelta(0, "a", (1,), None, (one,), (of_prompt,)),
        ChoiceDelta(1, "x", (7,)),
        ChoiceDelta(0, "", (2, 3), None, (two, three)),
        ChoiceDelta(0, "c", (), done),
    ]
    first = ChoiceDelta(0, "ac", (1, 2, 3), done, (one, two, three), (of_prompt,))
    assert joined(pieces) == [first, ChoiceDelta(1, "x", (7,))]


def test_joining_builds_no_text_on_the_way_however_many_pieces_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that is joined to what came before copies all of it: 27,000 pieces would stop the loop for seconds."""
    built: list[ChoiceDelta] = []

    def build(
        index: int,
        text: str,
        token_ids: tuple[int, ...],
        ending: Ending | None,
        logprobs: TokenLogprobs,
        prompt_logprobs: TokenLogprobs,
    ) -> ChoiceDelta:
        built.append(ChoiceDelta(index, text, token_ids, ending, logprobs, prompt_logprobs))
        return built[-1]

    pieces = [ChoiceDelta(number % 2, " word", (number,)) for number in range(1_000)]
    monkeypatch.setattr(outbox, "ChoiceDelta", build)
    assert joined(pieces) == built and len(built) == 2
    assert built[1].token_ids == tuple(range(1, 1_000, 2)) and built[1].text == " word" * 500
