"""Simulations of planned fleets, held against what can be worked out by hand; and a small instance that joins is help."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from common.config import RouterConfig
from common.mail import pack_frame
from common.messages import AnyMessage
from common.step_cost import StepCost
from simulation.clock import TURN_S
from simulation.network import Letter
from simulation.plan import FleetPlan, LoadPlan
from simulation.report import figures
from simulation.run import Simulation
from simulation.workload import workload
from tests.life.fleet import ToyFleet
from tests.life.ranks import ToySize

ROUTER = RouterConfig()
FLEET = FleetPlan(prefill=1, decode=1, step_cost="0.010,0.0001,0", front="0,0,0,0")
STEP_S, TOKEN_S = 0.010, 100e-6
MESSAGE_S = FLEET.message_s


def simulate(fleet: FleetPlan, **load: Any) -> Simulation:
    simulation = Simulation(fleet, LoadPlan(**load), ROUTER)
    simulation.run()
    return simulation


def steps_s(prompt_tokens: int) -> float:
    """What computing a prompt takes by itself, chunk after chunk."""
    chunks = -(-prompt_tokens // FLEET.chunk_tokens)
    return chunks * STEP_S + prompt_tokens * TOKEN_S


@pytest.mark.parametrize("tokens", [512, 8192, 20_000])
def test_a_single_first_token_takes_its_chunks_and_the_messages_of_the_ring(tokens: int) -> None:
    simulation = simulate(FLEET, requests=1, mean_input=tokens, mean_output=1, lengths="constant")
    (first_s,) = simulation.measured.first_s
    ring_s = 3 * MESSAGE_S  # Generate, TokenBatch, TextBatch
    assert 0 <= first_s - steps_s(tokens) - ring_s <= 3 * TURN_S, "each of the three may be at its turn when the message arrives"


@pytest.mark.parametrize("rate", [1.0, 3.5])
def test_the_router_predicts_first_tokens_from_what_instances_have_measured(rate: float) -> None:
    """Prompts take 0.2 s in the mean. At the higher rate most of them wait, and what comes next may join their step."""
    simulation = simulate(FLEET, requests=60, rate=rate, arrivals="even", mean_input=2000, mean_output=1)
    found = figures(simulation).prediction
    assert found is not None and found.answers >= 40, "all but the first ones, of which nothing is measured"
    assert found.error_share.p50 < (0.05 if rate == 1.0 else 0.25)


@pytest.mark.parametrize("prefix_cache", ["on", "off"])
def test_a_prompt_that_begins_as_another_takes_the_time_of_the_rest(tmp_path: Path, prefix_cache: Any) -> None:
    """Both prompts have the same four blocks of 512 tokens; the second has one more, cut short."""
    asked = (
        {"timestamp": 1000 * n, "input_length": 2048 + 100 * n, "output_length": 1, "hash_ids": [1, 2, 3, 4, 5]} for n in (0, 1)
    )
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in asked))
    simulation = simulate(replace(FLEET, prefix_cache=prefix_cache), trace=str(trace))
    cached = 2048 if prefix_cache == "on" else 0
    found = figures(simulation)
    prefill, _ = found.caches
    assert (found.prompt_tokens, prefill.tokens_hit) == (2048 + 2148, cached)
    first_s, second_s = simulation.measured.first_s
    assert second_s - first_s == pytest.approx(steps_s(2148 - cached) - steps_s(2048), abs=3 * TURN_S)


@pytest.mark.parametrize("prefix_cache", ["on", "off"])
def test_each_turn_computes_and_pushes_only_what_is_new(prefix_cache: Any) -> None:
    """Two conversations, one after the other, that share the system prompt. All lengths are whole pages of 16 tokens, but for the
    last token of an answer: its KV is never needed, so the page that it ends is computed again."""
    fleet = replace(FLEET, prefix_cache=prefix_cache)
    lengths = {"lengths": "constant", "arrivals": "even", "system_tokens": 320, "mean_input": 1600, "mean_output": 160}
    simulation = simulate(fleet, requests=2, rate=0.01, turns=3, think_s=5.0, **lengths)
    measured, is_on = simulation.measured, prefix_cache == "on"
    prompts = [320 + 1600 + number * 1760 for number in range(3)]
    assert list(measured.turn) == [0, 1, 2] * 2
    assert list(measured.prompt_tokens) == prompts * 2
    # The prefill instance has computed the prompt of the turn before, not its answer. The decode instance has both.
    cached = [0, prompts[0], prompts[1], 320, prompts[0], prompts[1]]
    had = [0, prompts[0] + 144, prompts[1] + 144, 320, prompts[0] + 144, prompts[1] + 144]
    assert list(measured.cached_tokens) == (cached if is_on else [0] * 6)
    pushed = [prompt - (there if is_on else 0) for prompt, there in zip(prompts * 2, had, strict=True)]
    assert list(measured.pushed_bytes) == [tokens * fleet.kv_token_bytes for tokens in pushed]
    first_s = [steps_s(prompt - (there if is_on else 0)) for prompt, there in zip(prompts * 2, cached, strict=True)]
    assert list(measured.first_s) == pytest.approx(first_s, abs=4 * TURN_S)
    found = figures(simulation)
    assert [(each.turn, each.answers, each.pushed_bytes) for each in found.turns] == [
        (turn + 1, 2, sum(measured.pushed_bytes[turn::3])) for turn in range(3)
    ]
    prefill, decode = found.caches
    assert (prefill.tokens_asked, prefill.tokens_hit) == (2 * sum(prompts), sum(measured.cached_tokens))
    assert (decode.pages_asked - decode.pages_hit) * 16 == sum(pushed)


def test_a_conversation_ends_with_a_failure_and_with_the_time_of_the_load() -> None:
    lengths = {"lengths": "constant", "arrivals": "even", "mean_input": 1000, "mean_output": 2, "turns": 4, "think_s": 5.0}
    refused = figures(simulate(replace(FLEET, context_tokens=2500), requests=2, rate=1.0, **lengths))
    assert (refused.requests, refused.cut_short, [each.answers for each in refused.turns]) == (6, 2, [2, 2])
    late = figures(simulate(FLEET, requests=2, rate=1.0, duration_s=8.0, **lengths))
    assert (late.cut_short, [each.answers for each in late.turns]) == (0, [2, 2])


def test_the_second_token_waits_for_the_last_push_the_handoff_and_a_step() -> None:
    """With a slow link: the pages of the last of two chunks are written when it is computed, those of the first meanwhile."""
    slow = replace(FLEET, link_gbit=8.0, link_latency_s=0.005)
    simulation = simulate(slow, requests=1, mean_input=8192 + 1024, mean_output=2, lengths="constant")
    write_s = 1024 * slow.kv_token_bytes / 1e9
    first_write_s = 8192 * slow.kv_token_bytes / 1e9
    second_chunk_s = STEP_S + 1024 * TOKEN_S
    push_s = max(0.0, first_write_s - second_chunk_s) + write_s + slow.link_latency_s
    handoff_s = MESSAGE_S
    (gap_s,) = simulation.measured.between_s
    assert gap_s == pytest.approx(push_s + handoff_s + STEP_S, abs=5 * TURN_S)


def test_a_prefill_instance_is_the_queue_that_the_theory_knows() -> None:
    """Poisson arrivals, equal prompts of one chunk each, one at a time: M/D/1, whose mean wait is S rho / (2 (1 - rho)) by
    Pollaczek and Khinchine. A prompt fills the budget of a step, so none is computed beside another."""
    fleet = replace(FLEET, chunk_tokens=1024)
    service_s, load = STEP_S + 1024 * TOKEN_S, 0.5
    simulation = simulate(fleet, requests=700, rate=load / service_s, mean_input=1024, mean_output=1, lengths="constant", seed=1)
    waits_s = np.asarray(simulation.measured.first_s) - service_s - 3 * MESSAGE_S
    expected_s = service_s * load / (2 * (1 - load))
    assert waits_s.mean() == pytest.approx(expected_s, rel=0.12)
    busy_s = simulation.fleet.busy_s["prefill"]
    assert busy_s == pytest.approx(700 * service_s)


def test_the_same_seed_gives_the_same_report_and_another_seed_another() -> None:
    load = {"requests": 16, "rate": 8.0, "mean_output": 20, "kill_every_s": 1.0, "restart_s": 0.5}
    simulations = [simulate(FleetPlan(prefill=2, decode=2), **load, seed=seed) for seed in (3, 3, 4)]
    once, again, other = map(replace_cpu, simulations)
    assert once == again
    assert once != other
    assert sum(simulations[0].killed.values()) > 0


def replace_cpu(simulation: Simulation) -> bytes:
    """The report without the CPU times."""
    return msgspec.json.encode(msgspec.structs.replace(figures(simulation), cpu=()))


def test_messages_and_bytes_by_type_are_those_of_the_frames_that_were_sent() -> None:
    simulation = Simulation(FleetPlan(prefill=2, decode=2), LoadPlan(requests=20, mean_output=20), ROUTER)
    frames: Counter[str] = Counter()
    messages: Counter[str] = Counter()

    def count(letter: Letter, message: AnyMessage, delays: tuple[float, ...]) -> None:
        messages[letter.kind] += 1
        frames[letter.kind] += len(pack_frame(letter.sender, msgspec.msgpack.encode(message)))

    simulation.fleet.network.taps.append(count)
    simulation.run()
    found = figures(simulation)
    by_kind: Counter[str] = Counter()
    for way in found.ways:
        by_kind[way.kind] += way.frame_bytes
    assert by_kind == frames
    assert (found.messages, found.frame_bytes) == (messages.total(), frames.total())


def test_reading_messages_without_decoding_them_changes_nothing() -> None:
    load = LoadPlan(requests=20, mean_output=20)
    reports = []
    for decodes_all in (False, True):
        simulation = Simulation(FleetPlan(prefill=2, decode=2), load, ROUTER)
        simulation.fleet.network.decodes_all = decodes_all
        simulation.run()
        reports.append(replace_cpu(simulation))
    assert reports[0] == reports[1]


def test_goodput_counts_the_answers_that_keep_to_both_limits() -> None:
    load = {"requests": 3, "rate": 0.1, "arrivals": "even", "lengths": "constant", "mean_input": 1000, "mean_output": 5}
    for first_s, pace_s, good in ((1.0, 0.1, 3), (0.05, 0.1, 0), (1.0, 0.009, 0)):
        assert figures(simulate(FLEET, **load, slo_ttft_s=first_s, slo_itl_s=pace_s)).good_requests == good


def test_predicted_times_are_held_against_those_of_the_clients() -> None:
    load = {"requests": 12, "rate": 1.0, "arrivals": "even", "lengths": "constant", "mean_input": 4000, "mean_output": 5}
    simulation = simulate(FLEET, **load)
    found = figures(simulation).prediction
    assert found is not None and 0 < found.answers <= 12
    assert found.real_s.p50 == pytest.approx(steps_s(4000), abs=6 * TURN_S)
    assert found.predicted_s.p50 == pytest.approx(steps_s(4000), rel=0.2)
    assert found.error_share.p50 == pytest.approx(found.error_s.p50 / found.real_s.p50, rel=0.1)


def test_a_request_that_no_instance_could_hold_is_refused_and_counted() -> None:
    found = figures(simulate(replace(FLEET, kv_pages=10), requests=2, mean_input=10_000, mean_output=2, lengths="constant"))
    assert (found.requests, sum(found.endings.values())) == (2, 2)
    assert all(how.startswith("refused") for how in found.endings)


def test_the_pages_in_use_are_those_of_every_moment() -> None:
    """Most requests come and go between two reports of progress. By hand: looked at after everything that happens."""
    fleet = FleetPlan(prefill=1, decode=1, kv_pages=2000)
    simulation = Simulation(fleet, LoadPlan(requests=30, rate=10, lengths="constant", arrivals="even"), ROUTER)
    clock, used = simulation.fleet.clock, dict.fromkeys(simulation.fleet.instances, 0)
    most, page_s = Counter(used), Counter[str]()
    turn = clock.turn

    def watched_turn() -> None:
        before_s = clock.now
        turn()
        for name, instance in simulation.fleet.instances.items():
            page_s[name] += used[name] * (clock.now - before_s)  # type: ignore[assignment]
            used[name] = instance.pool.leased_pages
            most[name] = max(most[name], used[name])

    clock.turn = watched_turn  # type: ignore[method-assign]
    simulation.run()
    for name, found in zip(used, figures(simulation).engines, strict=True):
        assert found.pages_most == most[name] / fleet.kv_pages > 0
        assert found.pages_mean == pytest.approx(page_s[name] / simulation.seconds / fleet.kv_pages)


def test_answers_end_by_themselves_when_requests_ask_for_more_also_after_a_death() -> None:
    load = {"requests": 16, "rate": 8.0, "mean_input": 1000, "mean_output": 60, "kill_every_s": 0.4, "restart_s": 0.5}
    outputs = [each.turns[0].output_tokens for each in workload(LoadPlan(**load))]  # type: ignore[arg-type]
    for most in (4096, 200_000):
        found = figures(simulate(FleetPlan(prefill=3, decode=3), **load, max_tokens=most))
        assert found.endings == {"finished: stop": 16} and found.resumes
        assert found.tokens == sum(outputs)
    cut = figures(simulate(FleetPlan(), **load | {"kill_every_s": 0.0, "restart_s": 60.0}, max_tokens=30))
    assert cut.tokens == sum(min(30, tokens) for tokens in outputs)
    assert cut.endings["finished: length"] == sum(tokens > 30 for tokens in outputs)


def test_fewer_answers_run_at_once_while_nobody_knows_that_they_end_before_their_limit() -> None:
    load = {"requests": 8, "rate": 100.0, "arrivals": "even", "lengths": "constant", "mean_input": 512, "mean_output": 64}
    fleet = replace(FLEET, kv_pages=400)
    exact, more = (figures(simulate(fleet, **load, max_tokens=tokens)) for tokens in (0, 5000))
    assert exact.tokens == more.tokens == 8 * 64
    assert more.engines[1].pages_most < exact.engines[1].pages_most


REQUESTS, PER_S = 30, 12.0


def preemptions(small_pages: int | None) -> int:
    """The preemptions of a large decode instance under load, and of a small one beside it if its pages are given."""
    cost = StepCost(step_s=0.01, chunk_token_s=0.0001, decode_row_s=0.0)
    size = ToySize(pages=512, rows=64, chunk_tokens=128, max_waiting=4096, request_timeout_s=600.0, cost=cost)
    fleet = ToyFleet(prefill=1, decode=1, size=size, config=RouterConfig())
    if small_pages is not None:
        fleet.size = ToySize(pages=small_pages, rows=64, chunk_tokens=128, max_waiting=4096, request_timeout_s=600.0, cost=cost)
        fleet.start("small", "decode")
        fleet.run_for(2.0)
    chance = Random(3)
    clients = []
    for number in range(REQUESTS):
        prompt = [chance.randrange(10, 1000) for _ in range(chance.randint(20, 60))]
        clients.append(fleet.submit(f"r{number}", prompt, chance.randint(100, 180)))
        fleet.run_for(chance.expovariate(PER_S))
    fleet.turn_until(lambda: all(client.ended for client in clients), 600.0)
    served = [life for life in fleet.lives if life.scheduler.report().counters.requests_ended]
    assert len(served) == len(fleet.lives), "everyone helps"
    return sum(life.scheduler.report().counters.preemptions for life in fleet.lives)


def test_a_small_decode_instance_beside_a_large_one_makes_preemptions_no_more() -> None:
    alone = preemptions(small_pages=None)
    assert alone > 0 and preemptions(small_pages=96) <= alone
