"""The times of an answer, exactly: how events become TTFT, gaps, TPOT and E2E."""

from bench.serve.answers import Answer


def answer(due_s: float = 10.0, sent_s: float = 10.25, *, counts_from_due: bool = True) -> Answer:
    made = Answer(0, 0, due_s, asked_tokens=6)
    made.sent(sent_s, counts_from_due)
    return made


def test_times_of_an_open_load_count_from_when_it_was_due_and_others_from_the_sending() -> None:
    late, closed = answer(), answer(counts_from_due=False)
    for each in (late, closed):
        each.arrived(10.5, 1)
        each.arrived(11.0, 1)
        each.ended(11.0)
    assert (late.ttft_s, late.e2el_s, late.queue_s) == (0.5, 1.0, 0.25)
    assert (closed.ttft_s, closed.e2el_s, closed.queue_s) == (0.25, 0.75, 0.25)


def test_a_request_that_was_sent_a_little_early_counts_from_the_sending() -> None:
    early = answer(due_s=10.0, sent_s=9.75)
    early.arrived(10.0, 1)
    assert (early.ttft_s, early.queue_s) == (0.25, 0.0)


def test_several_tokens_in_one_event_are_one_gap_and_gaps_of_zero() -> None:
    made = answer()
    made.arrived(11.0, 2)
    made.arrived(11.5, 3)
    made.arrived(11.75, 0)  # an event that only ends the answer
    made.arrived(12.0, 1)
    made.ended(12.5)
    assert list(made.gaps_s) == [0.0, 0.5, 0.0, 0.0, 0.5]
    assert made.output_tokens == made.counted == 6
    assert made.tpot_s == (2.0 - 1.0) / 5


def test_what_the_server_says_at_the_end_corrects_the_number_of_tokens() -> None:
    made = answer()
    made.arrived(11.0, 1)
    made.arrived(12.0, 1)
    made.output_tokens = 5
    made.ended(12.0)
    assert made.output_tokens == 5 and list(made.gaps_s) == [1.0] and made.tpot_s == 0.25


def test_an_answer_of_one_token_has_no_tpot_and_one_of_none_has_failed() -> None:
    one, none = answer(), answer()
    one.arrived(11.0, 1)
    one.ended(11.0)
    none.arrived(11.0, 0)
    none.ended(11.0)
    assert (one.error, one.tpot_s) == ("", None)
    assert none.error == "empty"
