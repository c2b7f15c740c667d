"""The recording of spans, for any order of askers, spans and turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import InstanceId
from common.messages import Spans, Trace, unpack_spans
from common.tracing import LONGEST_S, MESSAGE_SPANS, MESSAGES_A_TURN, SEND_S, SpanRecorder, Tracer

ME, A, B = InstanceId("me"), InstanceId("router-a"), InstanceId("router-b")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from([A, B]), st.floats(0.01, 3.0)),
        st.tuples(st.just("spans"), st.integers(0, 3 * MESSAGE_SPANS * MESSAGES_A_TURN), st.none()),
        st.tuples(st.just("turn"), st.floats(0.0, 1.0), st.none()),
    ),
    max_size=15,
)


@given(STEPS)
def test_each_asker_gets_every_span_of_its_time_once_and_one_last_word_and_then_nothing_is_recorded(
    steps: list[tuple[str, object, object]],
) -> None:
    tracer, now, made = Tracer(ME, unix_s=100.0), 0.0, 0
    due: dict[InstanceId, dict[int, list[str]]] = {A: {}, B: {}}
    got: dict[InstanceId, dict[int, list[str]]] = {A: {}, B: {}}
    asked: dict[InstanceId, int] = {}
    lasts: list[tuple[InstanceId, int]] = []

    def turn() -> None:
        sends = tracer.due(now) if tracer.runs else []
        for router in (A, B):
            assert sum(to == router and message.count > 0 for to, message in sends) <= MESSAGES_A_TURN
        for router, message in sends:
            spans = unpack_spans(message.packed)
            assert message.count == len(spans) <= MESSAGE_SPANS and message.dropped == 0
            got[router].setdefault(message.number, []).extend(span.name for span in spans)
            if message.last:
                lasts.append((router, message.number))
                del asked[router]

    for number, (what, first, second) in enumerate(steps):
        if what == "ask":
            assert isinstance(first, str) and isinstance(second, float)
            while len(tracer.recorder):  # an asker in the middle gets what waits from before, too
                now += SEND_S
                turn()
            router = InstanceId(first)
            tracer.ask(router, Trace(seconds=second, number=number), now)
            asked[router] = number
            due[router].setdefault(number, [])
        elif what == "spans" and tracer.recorder.on:
            assert isinstance(first, int)
            for _ in range(first):
                made += 1
                tracer.recorder.add("steps", str(made), now, now + 1.0)
                for router, its in asked.items():
                    due[router][its].append(str(made))
        elif what == "turn":
            assert isinstance(first, float)
            now += first
            turn()
    while tracer.runs:
        deadline = tracer.next_deadline()
        assert deadline is not None
        now = max(now, deadline)
        turn()
    assert not tracer.recorder.on and tracer.next_deadline() is None and not len(tracer.recorder)
    for router in (A, B):
        for number, names in due[router].items():
            assert got[router].get(number, []) == names
    assert len(lasts) == len(set(lasts))


def test_spans_that_do_not_fill_a_message_wait_for_more_and_not_for_long() -> None:
    tracer, counts = Tracer(ME), []
    tracer.ask(A, Trace(seconds=60.0, number=1), 0.0)
    for turn in range(1, 101):
        tracer.recorder.add("steps", "step", 0.0, 1.0)
        counts += [message.count for _, message in tracer.due(turn / 100 * 4 * SEND_S)]
    assert counts == [25, 25, 25, 25]


def test_what_does_not_fit_is_counted_and_times_are_told_in_unix_time() -> None:
    recorder = SpanRecorder(unix_s=1000.0, limit=2)
    recorder.begin()
    for number in range(5):
        recorder.add("steps", str(number), number, number + 0.5, "r", size=number)
    spans = recorder.take(9)
    assert [(span.name, span.begin_s, span.end_s, span.args) for span in spans] == [
        ("0", 1000.0, 1000.5, {"size": 0}),
        ("1", 1001.0, 1001.5, {"size": 1}),
    ]
    assert recorder.dropped == 3 and not len(recorder)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e9])
def test_no_trace_runs_for_ever(seconds: float) -> None:
    tracer = Tracer(ME)
    tracer.ask(A, Trace(seconds=seconds, number=1), 0.0)
    assert [message.last for _, message in tracer.due(LONGEST_S)] == [True]
    assert not tracer.runs


def test_a_trace_ends_early_when_its_asker_says_so_or_is_gone() -> None:
    tracer = Tracer(ME)
    tracer.ask(A, Trace(seconds=60.0, number=1), 0.0)
    tracer.ask(A, Trace(seconds=0.0, number=9), 0.0)  # it ends another trace, which is over
    assert tracer.due(SEND_S) == []
    tracer.ask(A, Trace(seconds=0.0, number=1), 1.0)
    ((_, message),) = tracer.due(1.0)
    assert isinstance(message, Spans) and message.last and not tracer.runs
    tracer.ask(A, Trace(seconds=60.0, number=2), 2.0)
    tracer.forget(A)
    assert not tracer.runs and not tracer.recorder.on


def test_a_trace_that_follows_one_that_was_ended_holds_nothing_of_before() -> None:
    tracer = Tracer(ME)
    tracer.ask(A, Trace(seconds=60.0, number=1), 0.0)
    tracer.recorder.add("steps", "before", 0.0, 0.1)
    tracer.ask(A, Trace(seconds=0.0, number=1), 0.2)
    tracer.ask(A, Trace(seconds=60.0, number=2), 0.2)
    tracer.recorder.add("steps", "after", 0.2, 0.3)
    ((_, message),) = tracer.due(1.0)
    assert [span.name for span in unpack_spans(message.packed)] == ["after"]
