"""A fleet is traced: what the spans say is what the counters and the clock say, and answers are as they always are."""

from collections import Counter
from itertools import pairwise

import pytest

from common.config import RouterConfig
from common.errors import Conflict, NotFound
from common.messages import Span, unpack_spans
from tests.life.expected import undisturbed
from tests.life.fleet import ToyFleet

PROMPTS = {f"r{number}": [100 * number + n for n in range(9 + 5 * number)] for number in range(1, 6)}
TRACE_S = 5.0


def gathered(fleet: ToyFleet, seat: int = 0) -> dict[str, list[Span]]:
    """By process, once the trace is over."""
    traces = fleet.routers[seat].core.traces
    fleet.turn_until(lambda: traces.status(fleet.clock.now).state == "over")
    processes = traces.status(fleet.clock.now).processes
    spans: dict[str, list[Span]] = {process.id: [] for process in processes}
    for frame in traces.frames():
        spans[processes[frame.process].id] += unpack_spans(frame.packed)
    assert {process.id: process.spans for process in processes} == {name: len(its) for name, its in spans.items()}
    return spans


def on(track: str, spans: list[Span], request: str | None = None) -> list[Span]:
    return [span for span in spans if span.track == track and request in (None, span.request)]


def total(spans: list[Span], what: str) -> int:
    return sum(int(span.args[what]) for span in spans)


def test_spans_add_up_to_the_counters_and_do_not_change_an_answer() -> None:
    fleet = ToyFleet(prefill=2, decode=2)
    fleet.router_process.trace(TRACE_S)
    begun_s = fleet.clock.now
    clients = {name: fleet.submit(name, prompt, max_tokens=6) for name, prompt in PROMPTS.items()}
    fleet.run(*clients.values())
    home_s = fleet.clock.now
    assert {name: client.token_ids for name, client in clients.items()} == {
        name: undisturbed(prompt, 6) for name, prompt in PROMPTS.items()
    }
    spans = gathered(fleet)
    for name, instance in fleet.instances.items():
        counters, its = instance.scheduler.report().counters, spans[name]
        assert total(on("chunks", its), "tokens") == counters.prompt_tokens_computed
        assert total(on("pushes", its), "bytes") == counters.bytes_pushed
        assert len(on("steps", its)) == counters.steps
        assert total(on("steps", its), "chunk_tokens") == counters.prompt_tokens_computed
        assert len(on("handoffs", its)) == counters.handoffs
    pushed = Counter(span.request for its in spans.values() for span in on("pushes", its))
    assert pushed.keys() == PROMPTS.keys()
    requests = {span.request: span for span in on("requests", spans["router"])}
    assert {name: (span.args["prompt_tokens"], span.args["tokens"]) for name, span in requests.items()} == {
        name: (len(prompt), 6) for name, prompt in PROMPTS.items()
    }
    assert len(on("attempts", spans["router"])) == len(PROMPTS)
    assert spans[fleet.router_process.detokenizers[0].name]
    assert all(begun_s <= span.begin_s <= span.end_s <= home_s for its in spans.values() for span in its)


def test_the_spans_of_a_request_follow_each_other_as_its_life_does() -> None:
    fleet = ToyFleet()
    fleet.router_process.trace(TRACE_S)
    fleet.run(fleet.submit("r", PROMPTS["r4"], max_tokens=5))
    spans = gathered(fleet)
    (request,), (attempt,) = on("requests", spans["router"]), on("attempts", spans["router"])
    chunks, pushes = on("chunks", spans["prefill-0"], "r"), on("pushes", spans["prefill-0"], "r")
    (handoff,), (landing,) = on("handoffs", spans["prefill-0"], "r"), on("handoffs", spans["decode-0"], "r")
    (start,) = on("starts", spans["decode-0"], "r")
    assert request.begin_s <= attempt.begin_s <= chunks[0].begin_s
    for before, after in pairwise(sorted(chunks, key=lambda span: span.begin_s)):
        assert before.end_s <= after.begin_s, "the chunks of a prompt follow each other"
    assert pushes[0].begin_s >= chunks[0].end_s, "a page is pushed when its chunk is computed"
    assert handoff.begin_s == chunks[-1].end_s, "from the first token on, the handoff holds up the second"
    assert handoff.end_s == max(push.end_s for push in pushes) <= landing.begin_s <= landing.end_s == start.begin_s
    (answer,) = on("answers", spans["decode-0"], "r")
    assert start.end_s == answer.begin_s < answer.end_s <= request.end_s == attempt.end_s
    assert (attempt.args["first"], attempt.args["decode"], request.args["ended"]) == ("prefill-0", "decode-0", "length")
    steps = sorted(on("steps", spans["decode-0"]), key=lambda span: span.begin_s)
    assert all(before.end_s <= after.begin_s for before, after in pairwise(steps)), "an instance computes one step after another"


def test_whoever_joins_or_starts_again_is_told_and_each_router_has_its_own_trace() -> None:
    fleet = ToyFleet(config=RouterConfig(max_attempts=2), routers=2)
    first, second = fleet.routers
    with pytest.raises(NotFound):
        first.core.traces.status(fleet.clock.now)
    first.trace(TRACE_S)
    second.trace(TRACE_S / 2)
    with pytest.raises(Conflict):
        first.trace(1.0)
    fleet.start("decode-9", "decode")
    first.restart_detokenizer(0)
    fleet.turn_until(
        lambda: all("decode-9" in [member.info.id for member in each.core.fleet.members()] for each in fleet.routers)
    )
    fleet.kill("decode-0")
    fleet.run_for(2.0)
    client = fleet.submit("r", PROMPTS["r3"], max_tokens=5)
    fleet.run(client)
    mine, other = gathered(fleet, 0), gathered(fleet, 1)
    assert on("starts", mine["decode-9"], "r") == on("starts", other["decode-9"], "r") != []
    assert on("requests", mine[first.name], "r") and not on("requests", other[second.name])
    assert mine[first.detokenizers[0].name]
    log = fleet.network.log
    del log[:]
    fleet.run(fleet.submit("later", PROMPTS["r1"], max_tokens=3))
    assert not [kind for _, kind, _ in log if kind == "Spans"], "nobody records any more"
    second.trace(600.0)
    fleet.run_for(1.0)
    assert all(each.worker._tracer.runs for each in fleet.instances.values())
    fleet.kill_router(1)
    fleet.run_for(1.0)
    assert not any(each.worker._tracer.runs for each in fleet.instances.values()), "nobody records for a router that is gone"


def test_nothing_is_remembered_of_requests_that_are_over() -> None:
    fleet = ToyFleet()
    fleet.router_process.trace(TRACE_S)
    fleet.run(*(fleet.submit(name, prompt, max_tokens=1 + number % 2) for number, (name, prompt) in enumerate(PROMPTS.items())))
    for instance in fleet.instances.values():
        tracer = instance.worker._tracer
        assert tracer.recorder.on and not (tracer._pushes or tracer._sampled or tracer._landed or tracer._answering)
