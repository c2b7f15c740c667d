"""The leader and its followers: steps, transfers, grammars and leases reach every rank, and any doubt ends the instance."""

import dataclasses
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.errors import BadRequest
from common.executor import NOT_DRAFTED, Chunk, ExecutorFailed, RowStart, StepPlan, StepResult, Work, take_done
from common.ids import ROUTER, AttemptId, Incarnation, InstanceId, RequestId, Ticket
from common.instance.ranks.leader import PROOF_S
from common.instance.ranks.line import PING_S, SILENCE_S, RankLost, RankStepFailed, digest_tokens, pack_plan, unpack_plan
from common.messages import LinkInfo
from common.messages.ranks import Agreed, Launch, RankRefused, StepReturned, ToLeader, rank_name
from common.messages.transfers import (
    Allow,
    Connect,
    Expect,
    LinkChanged,
    Push,
    PushDone,
    PushFailed,
    Settle,
    Settled,
    TransferCommand,
    TransferEvent,
)
from common.sampling_params import Grammar, SamplingParams
from engine.grammar.grammars import ANY_TEXT
from tests.builders import instance
from tests.common.instance.ranks.rig import Rig, rank_hello, take, travelled

KEY = AttemptId(RequestId("r"), 0, ROUTER)
PEER, LIFE = InstanceId("prefill-0"), Incarnation("1")
PAGES = np.array([5, 7], dtype=np.int32)
EMPTY = np.empty(0, dtype=np.int32)


def decode_step(step: int = 1) -> StepPlan:
    return StepPlan(step, decode_rows=np.array([0, 2], dtype=np.int32))


def test_ranks_that_drafted_otherwise_are_told_apart_also_where_they_sampled_alike() -> None:
    tokens = np.arange(2, dtype=np.int32)
    drafts = [np.full(1, token, dtype=np.int32) for token in (5, 6)]
    plans = [dataclasses.replace(decode_step(), draft_rows=tokens[:1], draft_tokens=each) for each in drafts]
    first, other = (digest_tokens(StepResult(plan, tokens, drafted=tokens[:1])) for plan in plans)
    assert first != other


def test_a_plan_arrives_as_it_was_sent_with_the_grammars_that_the_rank_holds() -> None:
    held = Grammar("regex", "a")
    sampling = SamplingParams(max_new_tokens=3, seed=9, grammar=held, bad_words=((1, 2),))
    tokens = np.arange(5, dtype=np.int32)
    plan = StepPlan(
        3,
        starts=(RowStart(0, PAGES, sampling, 4, 11, tokens, 2), RowStart(1, EMPTY, SamplingParams(max_new_tokens=1))),
        chunks=(Chunk(1, 0, tokens, last=False),),
        decode_rows=np.array([0], dtype=np.int32),
        grown_rows=np.array([0], dtype=np.int32),
        grown_pages=np.array([31], dtype=np.int32),
        draft_rows=np.array([0, 0], dtype=np.int32),
        draft_tokens=np.array([8, NOT_DRAFTED], dtype=np.int32),
        draft_chunks=(Chunk(0, 1, tokens, last=True),),
        verified_rows=np.array([0], dtype=np.int32),
        verified_lengths=np.array([4], dtype=np.int32),
        verified_tokens=np.array([11], dtype=np.int32),
    )
    launch = travelled(pack_plan(plan, lambda grammar: 7), Launch)
    got = unpack_plan(launch, {6: Grammar("regex", "a"), 7: held})
    assert repr(got) == repr(plan) and got.starts[0].sampling.grammar is held
    with pytest.raises(RankLost, match="row 0 is to begin with grammar 7, which this rank does not hold"):
        unpack_plan(launch, {6: held})


def test_a_step_is_complete_when_every_rank_has_returned_it() -> None:
    rig = Rig(0.0, 0.0)
    rig.turn()
    step = rig.executor.launch(decode_step())
    rig.to_followers()
    for executor in (rig.executors[0], rig.own, rig.executors[1]):
        assert step.poll() is None
        executor.finish_one()
        rig.to_followers()
        rig.to_leader()
    result = step.poll()
    assert result is not None and result.tokens.tolist() == [42, 42]


def test_a_rank_that_samples_other_tokens_ends_the_instance() -> None:
    rig = Rig(0.0, 0.0)
    step = rig.executor.launch(decode_step(17))
    rig.to_followers()
    rig.own.finish_one()
    rig.executors[0].finish_one()
    plan, handle = rig.executors[1].steps.popleft()
    handle.result = StepResult(plan, np.array([42, 43], dtype=np.int32))
    rig.to_followers()
    rig.to_leader()
    with pytest.raises(RankLost, match=r"rank 2 \(pid 102 on gpu-7\) sampled other tokens than rank 0 in step 17"):
        step.poll()


def test_the_layers_of_a_step_are_those_that_every_rank_has_written() -> None:
    rig = Rig(0.0, 0.0)
    step = rig.executor.launch(decode_step())
    rig.to_followers()
    seen = []
    for executor, layers in ((rig.own, 4), (rig.executors[0], 2), (rig.executors[1], 3), (rig.executors[0], 4)):
        executor.steps[0][1].layers_done = layers
        rig.to_followers()
        rig.to_leader()
        seen.append(step.layers_done)
    rig.executors[1].finish_one()  # a step that has returned has written all layers
    rig.to_followers()
    rig.to_leader()
    assert [*seen, step.layers_done] == [0, 0, 2, 3, 4]


@pytest.mark.parametrize("lost", [Launch, StepReturned])
def test_a_message_that_was_lost_ends_the_instance_with_the_next_ping(lost: type) -> None:
    rig = Rig()
    rig.turn()
    rig.executor.launch(decode_step())
    with pytest.raises(RankLost, match=r"message \d+ was lost"):
        for _ in range(3):
            rig.to_followers(lambda message: isinstance(message, lost))
            if rig.executors[0].steps:
                rig.executors[0].finish_one()
            rig.to_followers()
            rig.to_leader(lambda message: isinstance(message, lost))
            rig.now += PING_S
            rig.followers.turn(rig.clock)


def test_each_side_ends_when_the_other_is_silent_but_not_while_mail_waits() -> None:
    rig = Rig(1000.0)
    rig.followers.turn(rig.clock)
    rig.to_followers()
    rig.now += SILENCE_S + 1.0  # everybody was held up, and what was sent before is read now
    rig.to_leader()
    rig.to_followers()
    rig.to_leader()
    heard_s = rig.now
    while rig.now <= heard_s + SILENCE_S:
        rig.followers.turn(rig.clock)
        rig.now = max(rig.now + 0.1, rig.followers.next_deadline())
    with pytest.raises(RankLost, match=r"rank 1 \(pid 101 on gpu-7\) has been silent for 3\.\d s"):
        rig.followers.turn(rig.clock)
    with pytest.raises(RankLost, match="rank 0 at tcp://h:1 has been silent"):
        rig.loops[0].turn(partial(rig.clock, 1))


def test_time_in_which_a_rank_stood_still_itself_is_no_silence_of_the_other_but_only_once() -> None:
    rig = Rig(0.0)
    rig.turn()
    rig.now += 50.0  # the machine
    rig.followers.turn(rig.clock)
    rig.loops[0].turn(partial(rig.clock, 1))
    rig.now += SILENCE_S + 1.5  # the leader alone: what was forgiven once must not keep it from noticing
    with pytest.raises(RankLost, match="has been silent"):
        rig.followers.turn(rig.clock)


def test_a_second_process_of_a_rank_is_refused_when_the_first_is_heard_again_and_a_rank_too_many_at_once() -> None:
    rig = Rig(0.0)
    rig.turn()

    def refused(rank: int, **setup: str) -> list[str]:
        hello = replace(rank_hello(rank, 2), setup=setup)
        rig.mail.arriving.append((rank_name("decode-0", rank, Incarnation("other")), hello))
        rig.followers.turn(rig.clock)
        return [message.reason for _, message in rig.mail.sent if isinstance(message, RankRefused)]

    assert refused(2) == ["there is no rank 2 besides rank 0 with --tp 2"]
    take(rig.mail)
    assert refused(1) == refused(1, threads="2") == []  # it may be the successor of one that is gone, which the leader will learn
    rig.now += PING_S
    rig.followers.turn(rig.clock)
    rig.to_followers()
    rig.to_leader()
    assert refused(2)[0] == "rank 1 (pid 101 on gpu-7) is there already"


def test_commands_and_events_of_transfers_travel_whole_and_in_order() -> None:
    rig = Rig(0.0, 0.0)
    commands: list[TransferCommand] = [
        Connect((instance("decode-1", "decode"),), (PEER,)),
        Push(Ticket(3), PEER, LIFE, PAGES, PAGES[::-1], KEY, range(1, 2)),
        Allow(PEER, LIFE, 4.5),
        Settle(KEY),
        Expect(3, distant=True),
    ]
    events: list[TransferEvent] = [
        PushDone(Ticket(3), 4096, 0.5, 2),
        PushFailed(Ticket(4), "gone", quiescent=False, begun=True),
        LinkChanged(LinkInfo(peer=PEER, incarnation=LIFE, state="lost")),
        Settled(KEY),
    ]
    for command in commands:
        rig.remote[1].submit(command)
    rig.turn()
    assert rig.transfers[1].submitted == [], "the clocks are compared first"
    rig.to_followers()
    assert repr(rig.transfers[1].submitted) == repr(commands) and not rig.transfers[0].submitted
    rig.transfers[1].events = list(events)
    rig.to_followers()
    rig.to_leader()
    assert rig.remote[1].poll() == events and rig.remote[0].poll() == []


@given(
    offset_s=st.floats(-1e6, 1e6),
    delays_s=st.lists(st.tuples(st.floats(0, 0.4), st.floats(0, 0.4)), min_size=1, max_size=20),
)
def test_a_lease_of_a_follower_never_ends_later_than_the_leaders(offset_s: float, delays_s: list[tuple[float, float]]) -> None:
    rig = Rig(offset_s)
    for there_s, back_s in delays_s:
        rig.followers.turn(rig.clock)
        rig.now += there_s
        rig.to_followers()
        rig.now += back_s
        rig.to_leader()
        rig.now += PING_S
    rig.remote[0].submit(Allow(PEER, LIFE, rig.now + 5.0))
    until_s = rig.now + 5.0
    rig.to_followers()
    (allow,) = rig.transfers[0].submitted
    assert isinstance(allow, Allow)
    shortest_s = min(back_s for _, back_s in delays_s[-16:])
    assert -1e-6 <= until_s + offset_s - allow.until_s <= shortest_s + 1e-6


def test_a_pause_of_the_leader_while_it_reads_its_mail_lengthens_no_lease() -> None:
    rig = Rig(1000.0)
    rig.followers.turn(rig.clock)
    began_s, rig.now = rig.now, rig.now + SILENCE_S + 1.5
    rig.to_followers()  # meanwhile
    ((_, pong),) = take(rig.mails[0])
    rig.mail.arriving.append((rig.names[0], travelled(pong, ToLeader)))
    rig.followers.turn(iter([began_s, rig.now, rig.now]).__next__)
    rig.remote[0].submit(Allow(PEER, LIFE, rig.now + 5.0))
    rig.to_followers()
    (allow,) = rig.transfers[0].submitted
    assert isinstance(allow, Allow) and allow.until_s <= rig.clock(1) + 5.0


def test_a_grammar_is_ready_when_all_ranks_have_it_and_is_dropped_with_its_request() -> None:
    rig = Rig(0.0, 0.0)
    rig.executors[1].prepared_s = 1.0
    grammar = Grammar(ANY_TEXT.kind, ANY_TEXT.text)
    preparation = rig.executor.prepare(grammar, "bob")
    rig.turn()
    assert not preparation.poll() and [each.prepared_for for each in (rig.own, *rig.executors)] == [["bob"]] * 3
    rig.executors[1].now = 1.0
    rig.turn()
    assert preparation.poll()
    assert [len(loop._grammars) for loop in rig.loops] == [1, 1]
    del grammar, preparation
    rig.executor.launch(decode_step())
    rig.to_followers()
    assert [len(loop._grammars) for loop in rig.loops] == [0, 0]


@pytest.mark.parametrize("prepared_s", [0.0, 1.0], ids=["after rank 1 has compiled it", "before rank 1 has compiled it"])
def test_a_preparation_ends_when_the_client_leaves_before_rank_1_has_answered(prepared_s: float) -> None:
    rig = Rig()
    rig.executors[0].prepared_s = prepared_s
    rig.own.prepare = lambda *_: FakePreparation()  # type: ignore[method-assign]
    grammar = Grammar(ANY_TEXT.kind, ANY_TEXT.text)
    preparing: dict[str, Work] = {"r": rig.executor.prepare(grammar)}
    assert list(take_done(preparing)) == [], "rank 0 alone has compiled it"
    del grammar
    ((_, _, refused),) = take_done(preparing)
    assert refused is not None and not preparing
    rig.executor.launch(decode_step())
    rig.executors[0].now = prepared_s
    for _ in range(2):
        rig.turn()
    (follower,) = rig.followers
    assert not follower.prepared and not rig.loops[0]._preparing and not rig.loops[0]._grammars


def test_a_grammar_that_one_rank_refuses_is_refused() -> None:
    rig = Rig(0.0, 0.0)
    grammar = Grammar("regex", "a")
    rig.own.prepare = lambda *_: FakePreparation()  # type: ignore[method-assign]
    preparation = rig.executor.prepare(grammar)
    rig.turn()
    with pytest.raises(BadRequest, match="the fake knows no grammars"):
        preparation.poll()


class FakePreparation:
    ends_s: float | None = None

    def poll(self) -> str:
        return "ready"


def test_a_rank_that_fails_or_is_told_to_stop_says_so_and_the_leader_has_the_last_word() -> None:
    rig = Rig(0.0, 0.0)
    rig.loops[0].ask_drain()
    rig.turn()
    assert rig.followers.drain_asked
    rig.followers.end("drained", orderly=True)
    rig.to_followers()
    ends = [loop.ending for loop in rig.loops]
    assert all(end is not None and end.orderly and end.reason == "drained" for end in ends)
    rig.loops[1].end("out of memory")
    rig.to_leader()
    rig.now += PROOF_S
    with pytest.raises(RankLost, match=r"rank 2 \(pid .*\) failed: out of memory"):
        rig.to_leader()


def test_when_a_rank_dies_and_the_steps_of_the_others_fail_the_one_that_died_is_named() -> None:
    rig = Rig(0.0, 0.0)
    step = rig.executor.launch(decode_step(5))
    rig.own.steps[0][1].poll = broken  # type: ignore[method-assign]
    rig.loops[1].end("connection closed by peer")
    assert step.poll() is None
    rig.to_leader()
    rig.now += PROOF_S / 2
    rig.mail.gone = [rig.names[0]]
    with pytest.raises(RankLost, match=r"rank 1 \(pid .*\) is gone"):
        rig.followers.turn(rig.clock)


def test_a_step_that_fails_on_the_leader_alone_ends_the_instance_with_its_reason() -> None:
    rig = Rig()
    step = rig.executor.launch(decode_step(5))
    rig.own.steps[0][1].poll = broken  # type: ignore[method-assign]
    assert step.poll() is None
    assert rig.followers.next_deadline() <= rig.now + PROOF_S
    rig.now += PROOF_S
    with pytest.raises(RankStepFailed, match="rank 0 failed: step 5 failed: the device fell off the bus") as raised:
        rig.followers.turn(rig.clock)
    assert raised.value.step == 5


def test_a_step_that_fails_on_a_follower_is_named_and_what_is_no_step_is_not() -> None:
    for step, kind in ((7, RankStepFailed), (None, RankLost)):
        rig = Rig(0.0, 0.0)
        rig.loops[0].end("no kernel", step)
        rig.to_leader()
        rig.mail.gone = [rig.names[0]]
        rig.now += PROOF_S
        with pytest.raises(kind, match=r"rank 1 \(pid .*\) failed: no") as raised:
            rig.to_leader()
        error = raised.value
        assert type(error) is kind and (error.step if isinstance(error, RankStepFailed) else None) == step


def broken() -> StepResult | None:
    raise ExecutorFailed("step 5 failed: the device fell off the bus", 5)


def test_what_belongs_to_the_start_alone_ends_an_instance_that_serves() -> None:
    rig = Rig()
    rig.loops[0].offer(5)
    with pytest.raises(RankLost, match=r"rank 1 .* sent Offer while the instance serves"):
        rig.turn()
    rig.followers.send(Agreed(pages=5))
    with pytest.raises(RankLost, match="rank 0 at tcp://h:1 sent Agreed while the instance serves"):
        rig.to_followers()


def test_what_former_lives_of_ranks_say_is_dropped_and_counted() -> None:
    rig = Rig()
    former = rank_name("decode-0", 1, Incarnation("former"))
    rig.mail.arriving.append((former, StepReturned(number=9, step=1, digest=0)))
    rig.followers.turn(rig.clock)
    assert rig.followers.stale == 1
