"""The detokenizer's core: each answer in order, exactly once, with exactly one ending.

Also answers that are opened again, in a new detokenizer or in the one that has them, and the cut into batches: no frame is too
large and nothing is lost or reordered.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.ids import AttemptId, Incarnation, InstanceId, pack_ids
from common.mail import MAX_FRAME_BYTES
from common.messages import (
    AnswerMessage,
    Ending,
    ExpectAnswer,
    Failed,
    Finished,
    ForgetAnswer,
    Probed,
    Standing,
    TextDelta,
    TokenBatch,
    TokenDelta,
)
from common.text.detokenizer import BATCH_BYTES, BATCH_DELTAS, Detokenizer, DetokenizerLimits, cut
from tests.builders import key
from tests.common.text.tiny import tiny_tokenizer

EOS = 1
TEXT = "one 日本 🙂🙂 STOP two"
LENGTH = Finished("length")


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer().encode(text).ids)


def tokens(*deltas: TokenDelta) -> TokenBatch:
    return TokenBatch(deltas=deltas)


def answer(text: str, ending: Ending = LENGTH, of: AttemptId | None = None) -> TokenDelta:
    return TokenDelta(of or key(), 0, ids_of(text), ending)


def received(detokenizer: Detokenizer, messages: Iterable[AnswerMessage], now: float = 0.0) -> list[TextDelta]:
    texts: list[TextDelta] = []
    for message in messages:
        brought = detokenizer.receive(message, now)
        assert len({delta.key for delta in brought}) == len(brought), "at most one delta per key"
        texts += brought
    return texts


def only(deltas: Sequence[TextDelta]) -> TextDelta:
    (delta,) = deltas
    return delta


@pytest.fixture
def detokenizer() -> Detokenizer:
    return Detokenizer(tiny_tokenizer())


# --- text and endings ------------------------------------------------------------------------------------------------------


STOPPED = Finished("stop", matched=ids_of("!")[0])


@pytest.mark.parametrize(
    ("opened", "ids", "ending", "text", "expected"),
    [
        (ExpectAnswer(key=key()), ids_of(TEXT), LENGTH, TEXT, LENGTH),
        (ExpectAnswer(key=key(), skip_special_tokens=False), ids_of("hello!"), STOPPED, "hello", STOPPED),
        (ExpectAnswer(key=key()), (*ids_of("a"), EOS, *ids_of("b")), LENGTH, "ab", LENGTH),
        (ExpectAnswer(key=key(), stop=("STOP",)), ids_of("one ST"), LENGTH, "one ST", LENGTH),
        (ExpectAnswer(key=key(), stop=("ST",)), ids_of("a ST"), LENGTH, "a ", Finished("stop", "ST")),
        (ExpectAnswer(key=key(), stop=("ST",), include_stop=True), ids_of("a ST"), LENGTH, "a ST", Finished("stop", "ST")),
        (ExpectAnswer(key=key(), include_stop=True), ids_of("hello!"), STOPPED, "hello!", STOPPED),
        (ExpectAnswer(key=key(), skip_special_tokens=False), (*ids_of("a"), EOS), LENGTH, "a<|im_end|>", LENGTH),
    ],
    ids=[
        "an answer becomes text with its ending",
        "the token that ended the answer is counted but is no text",
        "an end of text that is ignored stays a token without text",
        "text that only began a stop string comes with the ending",
        "a stop string wins over the ending that comes with it",
        "a stop string that is included is text",
        "so is the token that ended the answer",
        "special tokens are text for those who want them",
    ],
)
def test_a_whole_answer_in_one_delta(
    detokenizer: Detokenizer, opened: ExpectAnswer, ids: tuple[int, ...], ending: Ending, text: str, expected: Ending
) -> None:
    got = only(received(detokenizer, [opened, tokens(TokenDelta(key(), 0, ids, ending))]))
    assert got == TextDelta(key(), 0, ids, text, expected)
    assert detokenizer.open_answers == 0


def test_one_batch_of_tokens_brings_one_delta_per_request(detokenizer: Detokenizer) -> None:
    a, b, c, d, e = ids_of("hello")[0], *ids_of(" wxyz")[:4]
    received(detokenizer, [ExpectAnswer(key=key("a")), ExpectAnswer(key=key("b"))])
    deltas = detokenizer.receive(
        tokens(TokenDelta(key("a"), 0, (a,)), TokenDelta(key("b"), 0, (b, c)), TokenDelta(key("a"), 1, (d, e))), 0.0
    )
    assert [(delta.key, delta.token_ids) for delta in deltas] == [(key("a"), (a, d, e)), (key("b"), (b, c))]


def test_an_incomplete_character_appears_when_the_answer_ends(detokenizer: Detokenizer) -> None:
    cut = ids_of("🤖")[:-1]
    assert len(cut) >= 1
    first = only(received(detokenizer, [ExpectAnswer(key=key()), tokens(TokenDelta(key(), 0, cut))]))
    assert first.text == ""
    last = only(received(detokenizer, [tokens(TokenDelta(key(), len(cut), (), Failed("gone")))]))
    assert (last.text, last.ending) == ("\ufffd", Failed("gone"))


def test_a_context_is_honoured(detokenizer: Detokenizer) -> None:
    ids = ids_of("🤖!")
    opened = ExpectAnswer(key=key(), context=pack_ids(ids[:1]))
    assert only(received(detokenizer, [opened, tokens(TokenDelta(key(), 0, ids[1:], LENGTH))])).text == "🤖!"


# --- stop strings ----------------------------------------------------------------------------------------------------------


def test_a_stop_string_across_tokens_ends_the_answer_at_once_and_is_trimmed(detokenizer: Detokenizer) -> None:
    received(detokenizer, [ExpectAnswer(key=key(), stop=("STOP",))])
    got = [
        only(received(detokenizer, [tokens(TokenDelta(key(), number, (token_id,)))]))
        for number, token_id in enumerate(ids_of("one ST"))
    ]
    assert "".join(delta.text for delta in got) == "one "
    number = len(got)
    last = only(received(detokenizer, [tokens(TokenDelta(key(), number, ids_of("OP two")))]))
    assert (last.text, last.ending) == ("", Finished("stop", "STOP"))
    assert tiny_tokenizer().decode(list(last.token_ids)).startswith("OP")
    assert last.token_ids != ids_of("OP two")
    assert received(detokenizer, [tokens(TokenDelta(key(), number + 9, (5,), LENGTH))]) == []
    assert detokenizer.dropped == {"after the end": 1}


def rendered(stop: str, ids: tuple[int, ...], min_tokens: int, include_stop: bool) -> tuple[str, Ending]:
    """By decoding the whole answer so far after each token, as vLLM defines `min_tokens`: a stop string ends the answer if it
    ends in the text of a token behind those."""
    before = ""
    for count in range(1, len(ids) + 1):
        text = tiny_tokenizer().decode(list(ids[:count]))
        if text.endswith("\ufffd"):
            continue  # an incomplete character
        at = text.find(stop, max(0, len(before) + 1 - len(stop)))
        if count > min_tokens and at >= 0:
            return text[: at + len(stop) if include_stop else at], Finished("stop", stop)
        before = text
    return before, LENGTH


@given(
    min_tokens=st.integers(0, 30),
    cut=st.integers(0, 30),
    include_stop=st.booleans(),
    stop=st.sampled_from(["STOP", "🙂", "o 日"]),
)
def test_stop_strings_within_the_first_tokens_end_nothing_also_when_the_answer_is_resumed(
    min_tokens: int, cut: int, include_stop: bool, stop: str
) -> None:
    ids = ids_of(TEXT + TEXT)
    detokenizer = Detokenizer(tiny_tokenizer())
    opened = ExpectAnswer(key=key(), stop=(stop,), min_tokens=min_tokens, include_stop=include_stop)
    got = received(detokenizer, [opened, *(tokens(TokenDelta(key(), n, ids[n : n + 1])) for n in range(cut))])
    text = "".join(delta.text for delta in got)
    if not got or got[-1].ending is None:
        resumed = replace(opened, key=key(attempt=1), first=cut, context=pack_ids(ids[:cut]), text=text)
        got = received(detokenizer, [resumed, tokens(TokenDelta(key(attempt=1), cut, ids[cut:], LENGTH))])
        text += "".join(delta.text for delta in got)
    assert (text, got[-1].ending) == rendered(stop, ids, min_tokens, include_stop)


# --- order -----------------------------------------------------------------------------------------------------------------


@st.composite
def deliveries(draw: st.DrawFn) -> list[AnswerMessage]:
    """Two answers, cut anywhere, repeated, in any order, in batches of any size, with their Opens anywhere among them."""
    deltas: list[TokenDelta] = []
    for name in ("a", "b"):
        ids = ids_of(TEXT)
        cuts = sorted({0, len(ids), *draw(st.lists(st.integers(0, len(ids)), max_size=5))})
        deltas += [
            TokenDelta(key(name), first, ids[first:end], LENGTH if end == len(ids) else None) for first, end in pairwise(cuts)
        ]
    deltas += draw(st.lists(st.sampled_from(deltas), max_size=4))
    deltas = list(draw(st.permutations(deltas)))
    messages: list[AnswerMessage] = [ExpectAnswer(key=key("a")), ExpectAnswer(key=key("b"), stop=("STOP",))]
    while deltas:
        count = draw(st.integers(1, len(deltas)))
        messages.append(tokens(*deltas[:count]))
        deltas = deltas[count:]
    return list(draw(st.permutations(messages)))


@given(deliveries())
def test_any_order_and_any_repetition_gives_the_same_text_once_and_one_ending(messages: list[AnswerMessage]) -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    by_key: dict[AttemptId, list[TextDelta]] = defaultdict(list)
    for delta in received(detokenizer, messages):
        by_key[delta.key].append(delta)
    for name, text, ending in (("a", TEXT, LENGTH), ("b", "one 日本 🙂🙂 ", Finished("stop", "STOP"))):
        got = by_key[key(name)]
        assert "".join(delta.text for delta in got) == text
        assert [delta.ending for delta in got] == [None] * (len(got) - 1) + [ending]
        next_token = 0
        for delta in got:
            assert delta.first == next_token
            next_token += len(delta.token_ids)
        assert tuple(id for delta in got for id in delta.token_ids) == ids_of(TEXT)[:next_token]
    assert detokenizer.open_answers == detokenizer.early_answers == 0
    assert detokenizer.next_deadline() is None


def test_an_attempt_is_an_answer_of_its_own(detokenizer: Detokenizer) -> None:
    assert received(detokenizer, [ExpectAnswer(key=key(attempt=1)), tokens(answer("old"))]) == []
    assert only(received(detokenizer, [tokens(answer("new", of=key(attempt=1)))])).text == "new"


# --- deadlines and bounds --------------------------------------------------------------------------------------------------


def test_tokens_that_are_missing_for_too_long_fail_the_answer(detokenizer: Detokenizer) -> None:
    ids = ids_of(TEXT)
    received(detokenizer, [ExpectAnswer(key=key()), tokens(TokenDelta(key(), 2, ids[2:], LENGTH))])
    deadline = detokenizer.next_deadline()
    assert deadline == DetokenizerLimits().patience_s
    assert detokenizer.tick(deadline - 0.1) == []
    texts = detokenizer.tick(deadline)
    ending = only(texts).ending
    assert isinstance(ending, Failed) and ending.retryable, "the next attempt may bring them"
    assert "from number 0 on" in ending.message
    assert detokenizer.open_answers == 0
    assert detokenizer.next_deadline() is None


def test_a_failure_that_waits_for_tokens_is_what_the_answer_ends_with(detokenizer: Detokenizer) -> None:
    received(detokenizer, [ExpectAnswer(key=key()), tokens(TokenDelta(key(), 3, (), Failed("out of memory")))])
    assert only(detokenizer.tick(DetokenizerLimits().patience_s)).ending == Failed("out of memory")


def test_progress_gives_the_rest_of_a_gap_and_a_later_gap_their_full_time(detokenizer: Detokenizer) -> None:
    ids = ids_of(TEXT)
    received(detokenizer, [ExpectAnswer(key=key()), tokens(TokenDelta(key(), 4, ids[4:]), TokenDelta(key(), 2, ids[2:3]))])
    received(detokenizer, [tokens(TokenDelta(key(), 0, ids[:2]))], now=9.0)
    assert detokenizer.next_deadline() == 19.0
    received(detokenizer, [tokens(TokenDelta(key(), 3, ids[3:4]))], now=12.0)
    assert detokenizer.next_deadline() == ExpectAnswer(key=key()).life_s, "nothing is missing; its life ends last"
    received(detokenizer, [tokens(TokenDelta(key(), len(ids) + 1, (5,)))], now=13.0)
    assert detokenizer.next_deadline() == 23.0


def test_an_answer_that_nobody_forgets_fails_at_the_end_of_its_life(detokenizer: Detokenizer) -> None:
    received(detokenizer, [ExpectAnswer(key=key(), life_s=30.0)], now=5.0)
    received(detokenizer, [tokens(TokenDelta(key(), 0, ids_of("hello")))], now=20.0)
    assert detokenizer.tick(34.9) == []
    texts = detokenizer.tick(35.0)
    ending = only(texts).ending
    assert isinstance(ending, Failed) and (ending.status, ending.retryable) == (504, False)
    assert (detokenizer.open_answers, detokenizer.next_deadline()) == (0, None)


def test_missing_tokens_are_awaited_no_longer_than_the_answer_lives(detokenizer: Detokenizer) -> None:
    received(detokenizer, [ExpectAnswer(key=key(), life_s=3.0), tokens(TokenDelta(key(), 2, (5,)))])
    assert detokenizer.next_deadline() == 3.0
    texts = detokenizer.tick(3.0)
    assert isinstance(only(texts).ending, Failed)
    assert (detokenizer.open_answers, detokenizer.next_deadline()) == (0, None)


def test_tokens_that_nobody_expects_are_dropped(detokenizer: Detokenizer) -> None:
    received(detokenizer, [tokens(answer(TEXT))])
    assert detokenizer.early_answers == 1
    assert detokenizer.tick(DetokenizerLimits().patience_s) == []
    assert detokenizer.early_answers == 0
    assert detokenizer.dropped == {"never opened": 1}


def test_early_tokens_are_bounded() -> None:
    detokenizer = Detokenizer(tiny_tokenizer(), DetokenizerLimits(early_answers=2, waiting_tokens=8))
    received(detokenizer, [tokens(TokenDelta(key(str(number)), 0, (5,))) for number in range(5)])
    assert detokenizer.early_answers == 2
    received(detokenizer, [tokens(TokenDelta(key("0"), first, (5,))) for first in range(1, 50)])
    assert detokenizer.dropped == {"no room before its ExpectAnswer": 3 + 46}
    got = only(received(detokenizer, [ExpectAnswer(key=key("0"))]))
    assert got.token_ids == (5, 5, 5, 5)


def test_tokens_after_a_gap_are_bounded() -> None:
    detokenizer = Detokenizer(tiny_tokenizer(), DetokenizerLimits(waiting_tokens=4))
    got = only(received(detokenizer, [ExpectAnswer(key=key()), tokens(TokenDelta(key(), 1, (5, 5, 5, 5, 5)))]))
    assert isinstance(got.ending, Failed) and detokenizer.open_answers == 0


def test_more_answers_than_may_be_open_are_refused() -> None:
    detokenizer = Detokenizer(tiny_tokenizer(), DetokenizerLimits(open_answers=1))
    got = only(received(detokenizer, [ExpectAnswer(key=key("a")), ExpectAnswer(key=key("b"))]))
    assert got.key == key("b")
    assert isinstance(got.ending, Failed)
    assert (got.ending.status, got.ending.retryable) == (429, True)


def test_late_tokens_of_a_forgotten_answer_are_dropped(detokenizer: Detokenizer) -> None:
    ids = ids_of(TEXT)
    received(detokenizer, [ExpectAnswer(key=key()), tokens(TokenDelta(key(), 1, ids[1:])), ForgetAnswer(key=key())])
    assert (detokenizer.open_answers, detokenizer.next_deadline()) == (0, None)
    assert received(detokenizer, [tokens(answer(TEXT)), ExpectAnswer(key=key())]) == []
    assert detokenizer.dropped == {"after the end": 1, "opened again": 1}


def test_the_number_of_remembered_keys_is_bounded() -> None:
    detokenizer = Detokenizer(tiny_tokenizer(), DetokenizerLimits(remembered=2))
    received(detokenizer, [ForgetAnswer(key=key(str(number))) for number in range(5)])
    received(detokenizer, [tokens(TokenDelta(key(str(number)), 0, (5,))) for number in range(5)])
    assert detokenizer.early_answers == 3
    assert detokenizer.dropped == {"after the end": 2}


def test_an_answer_to_a_probe_is_passed_on_and_says_whose_tokens_wait(detokenizer: Detokenizer) -> None:
    known, early = key("known"), key("early")
    detokenizer.receive(ExpectAnswer(key=known), 0.0)
    detokenizer.receive(tokens(TokenDelta(early, 0, (1,))), 0.0)
    standings = (Standing(known, 1), Standing(early, 1), Standing(key("unknown"), None))
    probed = Probed(id=InstanceId("d0"), incarnation=Incarnation("1"), standings=standings, round=4)
    assert detokenizer.receive(probed, 0.0) == []
    assert detokenizer.take_probed() == [
        replace(probed, standings=(standings[0], replace(standings[1], waits=True), standings[2]))
    ]
    assert detokenizer.take_probed() == []


def test_repeated_tokens_and_numbers_below_0_are_counted(detokenizer: Detokenizer) -> None:
    delta = TokenDelta(key(), 0, ids_of("hello"))
    received(detokenizer, [ExpectAnswer(key=key()), tokens(delta), tokens(delta), tokens(TokenDelta(key(), -1, (5,)))])
    assert detokenizer.dropped == {"tokens that came again": len(delta.token_ids), "malformed": 1}


# --- resumed answers ---------------------------------------------------------------------------------------------------------


LOST = Failed("the instance was lost", retryable=True)


@pytest.mark.parametrize(("prompt", "lost"), [("hello ", None), ("", LOST)], ids=["the attempt falls silent", "it fails"])
@given(cut=st.integers(0, len(ids_of(TEXT))), stop=st.sampled_from([(), ("STOP",), ("🙂 ST",)]))
def test_an_answer_resumed_at_any_token_goes_on_as_if_it_had_not_been_interrupted(
    prompt: str, lost: Failed | None, cut: int, stop: tuple[str, ...]
) -> None:
    ids = ids_of(TEXT)
    detokenizer = Detokenizer(tiny_tokenizer())
    whole = only(received(detokenizer, [ExpectAnswer(key=key("whole"), stop=stop), tokens(answer(TEXT, of=key("whole")))]))
    before = received(detokenizer, [ExpectAnswer(key=key(), stop=stop), tokens(TokenDelta(key(), 0, ids[:cut], lost))])
    text = "".join(delta.text for delta in before)
    if before and isinstance(before[-1].ending, Finished):
        return
    context = pack_ids(ids_of(prompt) + ids[:cut])
    resumed = ExpectAnswer(key=key(attempt=1), stop=stop, first=cut, context=context, text=text)
    after = received(detokenizer, [resumed, tokens(TokenDelta(key(attempt=1), cut, ids[cut:], LENGTH))])
    assert text + "".join(delta.text for delta in after) == whole.text
    assert after[-1].ending == whole.ending
    if lost is None:
        assert all(delta.ending is None for delta in before)
    else:
        assert only(before).ending == lost and only(after)


@pytest.mark.parametrize(
    "opened",
    [
        ExpectAnswer(key=key(), first=3, context=pack_ids(ids_of("h"))),
        ExpectAnswer(key=key(), first=-1),
        ExpectAnswer(key=key(), text="text without tokens"),
        ExpectAnswer(key=key(), stop=("",)),
    ],
    ids=["too few tokens", "a number below 0", "text that is not that of the tokens", "an empty stop string"],
)
def test_a_contradictory_expectation_fails_the_answer(detokenizer: Detokenizer, opened: ExpectAnswer) -> None:
    got = only(received(detokenizer, [opened]))
    assert isinstance(got.ending, Failed)
    assert "cannot be opened" in got.ending.message


OPENED_CONTEXT = ids_of("日本 is")
OPENED_TEXT = "one 日本 🙂🙂 STOP two 🤖"
STOPS = ((), ("STOP two",), ("STOX", "🙂 STOP!"), ("two 🤖🤖",))


IDS = list(ids_of(OPENED_TEXT))


def expect(stop: tuple[str, ...], so_far: Sequence[int] = (), text: str = "") -> ExpectAnswer:
    return ExpectAnswer(key=key(), stop=stop, first=len(so_far), context=pack_ids([*OPENED_CONTEXT, *so_far]), text=text)


def told(first: int, token_ids: Sequence[int], ending: Ending | None = None) -> TokenBatch:
    return tokens(TokenDelta(key(), first, tuple(token_ids), ending))


def one_by_one(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[TextDelta]:
    return [delta for number, id in enumerate(token_ids) for delta in detokenizer.receive(told(number, [id]), 0.0)]


def undisturbed(stop: tuple[str, ...]) -> tuple[str, Ending | None, int]:
    """The whole text, its ending, and how many tokens it has."""
    detokenizer = Detokenizer(tiny_tokenizer())
    detokenizer.receive(expect(stop), 0.0)
    deltas = [*one_by_one(detokenizer, IDS), *detokenizer.receive(told(len(IDS), (), LENGTH), 0.0)]
    return "".join(delta.text for delta in deltas), deltas[-1].ending, sum(len(delta.token_ids) for delta in deltas)


@pytest.mark.parametrize("stop", STOPS)
def test_an_answer_that_a_new_detokenizer_is_told_goes_on_as_if_nothing_had_happened(stop: tuple[str, ...]) -> None:
    text, ending, used = undisturbed(stop)
    former = Detokenizer(tiny_tokenizer())
    former.receive(expect(stop), 0.0)
    delivered = ["", *accumulate(delta.text for delta in one_by_one(former, IDS))]
    assert any(part != tiny_tokenizer().decode(IDS[:kept]) for kept, part in enumerate(delivered[:used])), (
        "some of it was held back"
    )
    for kept, part in enumerate(delivered[:used]):
        detokenizer = Detokenizer(tiny_tokenizer())
        early = min(kept + 3, len(IDS))
        detokenizer.receive(told(early, IDS[early:], LENGTH), 0.0)  # tokens go on before the answer is opened
        detokenizer.receive(expect(stop, IDS[:kept], part), 0.0)
        (delta,) = detokenizer.receive(told(kept, IDS[kept:], LENGTH), 0.0)
        assert (delta.first, part + delta.text, delta.ending) == (kept, text, ending)
        assert len(delta.token_ids) == used - kept and detokenizer.open_answers == 0


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("has_gap", [False, True])
def test_text_that_was_lost_on_its_way_is_made_again(stop: tuple[str, ...], has_gap: bool) -> None:
    """The detokenizer has gone on by up to five tokens while the router did not hear of it."""
    text, ending, used = undisturbed(stop)
    for kept in range(used - 6):
        detokenizer = Detokenizer(tiny_tokenizer())
        detokenizer.receive(expect(stop), 0.0)
        part = "".join(delta.text for delta in one_by_one(detokenizer, IDS[:kept]))
        ahead = kept + kept % 6
        detokenizer.receive(told(kept, IDS[kept:ahead]), 0.0)
        if has_gap:
            assert detokenizer.receive(told(ahead + 1, IDS[ahead + 1 :], LENGTH), 0.0) == []
        again = detokenizer.receive(expect(stop, IDS[:kept], part), 0.0)
        assert [(delta.first, len(delta.token_ids)) for delta in again] == ([(kept, ahead - kept)] if ahead > kept else [])
        rest = told(ahead, IDS[ahead : ahead + 1]) if has_gap else told(ahead, IDS[ahead:], LENGTH)
        deltas = [*again, *detokenizer.receive(rest, 0.0)]
        assert (part + "".join(delta.text for delta in deltas), deltas[-1].ending) == (text, ending)
        assert (detokenizer.open_answers, detokenizer.next_deadline()) == (0, None)


def test_opening_an_answer_again_needs_no_further_place_and_changes_nothing_where_nothing_is_lost() -> None:
    detokenizer = Detokenizer(tiny_tokenizer(), DetokenizerLimits(open_answers=1))
    detokenizer.receive(expect(()), 0.0)
    one_by_one(detokenizer, IDS[:4])
    text = tiny_tokenizer().decode(IDS[:3])
    assert len(detokenizer.receive(expect((), IDS[:3], text), 0.0)) == 1
    assert detokenizer.receive(expect((), IDS[:4], tiny_tokenizer().decode(IDS[:4])), 0.0) == []
    assert detokenizer.dropped == {"opened again": 1}


def test_an_answer_whose_ending_was_lost_is_told_once_more() -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    detokenizer.receive(expect(()), 0.0)
    detokenizer.receive(told(0, IDS, LENGTH), 0.0)
    again = msgspec.structs.replace(expect((), IDS[:4], tiny_tokenizer().decode(IDS[:4])), again=True)
    assert detokenizer.receive(again, 0.0) == []
    (delta,) = detokenizer.receive(told(4, IDS[4:], LENGTH), 0.0)
    assert (delta.first, delta.ending, detokenizer.open_answers) == (4, LENGTH, 0)
    assert again.text + delta.text == OPENED_TEXT


def test_an_answer_that_is_over_stays_over_when_its_first_word_comes_again() -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    detokenizer.receive(expect(()), 0.0)
    detokenizer.receive(told(1, IDS[1:3]), 0.0)
    (broken_off,) = detokenizer.tick(10.0)
    assert isinstance(broken_off.ending, Failed) and broken_off.ending.retryable
    assert detokenizer.receive(expect(()), 10.0) == detokenizer.receive(told(0, IDS), 10.0) == []


def delta(number: int, chars: int) -> TextDelta:
    return TextDelta(key(), number, (number,), "x" * chars)


@pytest.mark.parametrize(
    ("deltas", "chars"), [(0, 0), (1, 4), (BATCH_DELTAS, 4), (10 * BATCH_DELTAS + 1, 4), (30, 3 * 2**20), (2, BATCH_BYTES)]
)
def test_batches_hold_everything_in_order_and_each_fits_a_frame(deltas: int, chars: int) -> None:
    whole = [delta(number, chars) for number in range(deltas)]
    batches = list(cut(whole))
    assert len(batches) == 1 or deltas != BATCH_DELTAS, "what fits one batch is one"
    assert [one for batch in batches for one in batch.deltas] == whole
    for batch in batches:
        assert 1 <= len(batch.deltas) <= BATCH_DELTAS
        batch_bytes = len(msgspec.msgpack.encode(batch))
        assert batch_bytes < MAX_FRAME_BYTES / 2
        assert batch_bytes <= BATCH_BYTES + 64 or len(batch.deltas) == 1
