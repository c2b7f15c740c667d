"""The vocabulary of the wire: what every message survives, and what each inbox takes."""

from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common import messages
from common.ids import (
    ROUTER,
    AttemptId,
    Digest,
    Generation,
    Incarnation,
    InstanceId,
    Life,
    RequestId,
    Variant,
    pack_ids,
    unpack_ids,
)
from common.instance.token_memory import PIECE_TOKENS
from common.mail import MAX_FRAME_BYTES
from common.messages import AnyMessage, DecodeInbox, DetokenizerInbox, Message, PrefillInbox, RouterInbox, transfers
from common.messages.base import fits
from common.messages.ranks import ToFollower, ToLeader
from common.messages.variants import AdapterEntry, ReadAdapter, WeightsOnDisk
from common.sampling_params import MAX_LOGPROBS, MAX_PROMPT_LOGPROBS, SamplingParams
from tests.builders import instance
from tests.common import rank_messages

INBOXES: dict[str, Any] = {
    "router": RouterInbox,
    "prefill": PrefillInbox,
    "decode": DecodeInbox,
    "detokenizer": DetokenizerInbox,
    "leader": ToLeader,
    "follower": ToFollower,
}
KEY = AttemptId(RequestId("request"), 1, ROUTER)
PREFILL, LIFE = InstanceId("prefill-1"), Incarnation("life")
SAMPLING = SamplingParams(max_new_tokens=5, temperature=0.5, stop_token_ids=(1, 2), seed=2**63 - 1)
TERMS = messages.Terms(priority=-2, age_s=1.5, timeout_s=30.0, owner="alice")
PLAIN = instance(PREFILL, "prefill", LIFE)
INFO = replace(PLAIN, pools=(replace(PLAIN.pools[0], address=2**63 - 1, wire=b"\x00\xff"),))
SPAN = messages.Span("pushes", "push", 1.7e9 + 1e-6, 1.7e9 + 0.25, "request", {"bytes": 2**40, "peer": "decode-1", "share": 0.5})
ADAPTER = AdapterEntry(name="a", version=3, digest=Digest("ab"), folder="/adapters/a", is_pinned=True, is_loaded=False)
SAMPLES: tuple[AnyMessage, ...] = (
    messages.Register(instance=INFO),
    messages.Welcome(router=ROUTER, detokenizers=("tcp://h:2",), address="tcp://h:1", heartbeat_s=0.5, dead_after_s=2.0),
    messages.Refused(reason="no"),
    messages.Peers(version=3, since=2, joined=(INFO, INFO), left=(INFO.id,)),
    messages.Heartbeat(
        id=PREFILL,
        incarnation=LIFE,
        load=messages.Load(pages_free=2),
        counters=messages.Counters(bytes_pushed=2**40, push_seconds=0.25),
        peers_version=7,
        links_version=8,
        cache_version=9,
        draining=True,
    ),
    messages.LinkReport(
        id=PREFILL,
        incarnation=LIFE,
        version=3,
        since=2,
        links=(messages.LinkInfo(peer=PREFILL, incarnation=LIFE, state="ready"),),
    ),
    messages.TellLinks(),
    messages.TellCache(),
    messages.CacheChanges(
        id=PREFILL, incarnation=LIFE, version=4, since=3, stored=b"\xff" * 8, gone=bytes(16), part=1, more=True
    ),
    messages.Goodbye(id=PREFILL, incarnation=LIFE),
    messages.Drain(),
    messages.TakeRole(number=3, role="both", incarnation=LIFE),
    messages.RoleKept(id=PREFILL, incarnation=LIFE, number=3, reason="busy"),
    messages.FlushCache(),
    messages.Generate(
        key=KEY,
        prompt=pack_ids([1, 2, 3]),
        sampling=SAMPLING,
        decodes=(InstanceId("decode-1"), InstanceId("decode-2")),
        first=2,
        terms=TERMS,
        salt="tenant",
    ),
    messages.Probe(round=1, keys=(KEY, AttemptId(RequestId("other"), 0, ROUTER))),
    messages.Repeat(tokens=((KEY, 3), (AttemptId(RequestId("other"), 0, ROUTER), 0))),
    messages.Placed(id=PREFILL, incarnation=LIFE, key=KEY, decode=Life(InstanceId("decode-1"), LIFE)),
    messages.Probed(round=1, id=PREFILL, incarnation=LIFE, standings=(messages.Standing(KEY, 7), messages.Standing(KEY, None))),
    messages.Cancel(key=KEY),
    messages.Reserve(
        key=KEY,
        incarnation=LIFE,
        prompt=pack_ids([1]),
        sampling=SAMPLING,
        sent_s=12.5,
        first=1,
        terms=TERMS,
        salt="tenant",
        cached_tokens=16,
    ),
    messages.Grant(
        key=KEY,
        generation=Generation(3),
        pages=pack_ids([5]),
        sent_s=12.5,
        write_lease_s=5.0,
        have_tokens=16,
        incarnation=LIFE,
        writer=LIFE,
    ),
    messages.Decline(key=KEY, failed=messages.Failed(message="full", status=429, retryable=True)),
    messages.Renew(
        incarnation=LIFE, sent_s=13.5, claims=(messages.Claim(KEY, Generation(0)), messages.Claim(KEY, Generation(3)))
    ),
    messages.Renewed(sent_s=13.5, write_lease_s=5.0, over=(KEY,), generations=(Generation(3),), incarnation=LIFE, writer=LIFE),
    messages.Handoff(
        key=KEY,
        generation=Generation(3),
        first_token=7,
        pushed_pages=1,
        pushed_bytes=64,
        digests=b"\x00\xff\x01\x02",
        first_logprob=messages.TokenLogprob(7, -0.5, 1, ((7, -0.5),)),
        variant=Variant(Digest("ab"), Digest("cd")),
    ),
    messages.Withdraw(key=KEY, incarnation=LIFE, generation=Generation(3)),
    messages.TokenBatch(
        deltas=(
            messages.TokenDelta(KEY, 0, (1, 2), cached_tokens=16),
            messages.TokenDelta(KEY, 0, (1,), None, (messages.TokenLogprob(1, -1.5, 2),), (messages.TokenLogprob(4, -0.5, 1),)),
            messages.TokenDelta(KEY, 2, (3,), messages.Finished("stop", matched=3)),
            messages.TokenDelta(KEY, 3, (), messages.Failed("broken")),
        )
    ),
    messages.ExpectAnswer(
        key=KEY,
        stop=("a", "日本"),
        first=2,
        context=pack_ids([1, 2]),
        text="t",
        skip_special_tokens=False,
        shown=(7, 8),
        include_stop=True,
        min_tokens=3,
        logprobs=True,
        again=True,
        life_s=60.0,
    ),
    messages.ForgetAnswer(key=KEY),
    messages.TextBatch(deltas=(messages.TextDelta(KEY, 0, (1,), "text", messages.Finished("stop", matched="t")),)),
    messages.StageWeights(update=3, source=WeightsOnDisk(folder="/models/new"), incarnation=LIFE),
    messages.WeightsStaged(id=PREFILL, incarnation=LIFE, update=3, weights=Digest("ab"), failed=None),
    messages.SwitchWeights(update=3, weights=Digest("ab"), version="step-3", incarnation=LIFE),
    messages.DropWeights(update=3),
    messages.HoldSteps(hold=True),
    messages.DoTask(number=4, task=ReadAdapter(folder="/adapters/one"), incarnation=LIFE),
    messages.TaskDone(id=PREFILL, incarnation=LIFE, number=4, result="ab", failed=None),
    messages.SetAdapters(number=5, entries=(ADAPTER,), wanted={Digest("cd"): "/adapters/b"}, tasks_over=4, incarnation=LIFE),
    messages.AdaptersHeld(
        id=PREFILL,
        incarnation=LIFE,
        version=6,
        number=5,
        entries=(ADAPTER,),
        held=(Digest("ab"),),
        failed={Digest("ef"): "no"},
    ),
    messages.Trace(seconds=60.0, number=2),
    messages.Spans(id=PREFILL, number=2, count=1, packed=messages.pack_spans([SPAN]), incarnation=LIFE, dropped=3, last=True),
    messages.DetokenizerHeartbeat(open_answers=1, early_answers=2, dropped=3),
    *rank_messages.SAMPLES,
)


def decoded(message: Message, inbox: object) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=inbox)


def likely(alternatives: int) -> messages.TokenLogprob:
    """As large on the wire as it can be."""
    return messages.TokenLogprob(2**31 - 1, -1 / 3, 2**31 - 1, ((2**31 - 1, -1 / 3),) * alternatives)


@pytest.mark.parametrize("alternatives", [0, MAX_LOGPROBS])
def test_all_logprobs_that_one_message_may_carry_fit_into_a_tenth_of_a_frame(alternatives: int) -> None:
    prompt = messages.TokenDelta(KEY, 0, (1,), None, (), (likely(alternatives),) * (MAX_PROMPT_LOGPROBS // (1 + alternatives)))
    piece = messages.TokenDelta(KEY, 0, (1,) * PIECE_TOKENS, None, (likely(alternatives),) * PIECE_TOKENS)
    for delta, most_mib in ((prompt, 6), (piece, 3)):
        assert len(msgspec.msgpack.encode(messages.TokenBatch(deltas=(delta,)))) < most_mib * 2**20 < MAX_FRAME_BYTES / 10


def test_spans_come_out_as_they_were_packed() -> None:
    assert messages.unpack_spans(messages.pack_spans([SPAN, SPAN])) == (SPAN, SPAN)


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(sample) for sample in SAMPLES} == set(get_args(AnyMessage))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_message_is_decoded_by_the_inboxes_that_list_it_and_refused_by_the_others(sample: AnyMessage) -> None:
    takers = 0
    for inbox in INBOXES.values():
        if type(sample) in get_args(inbox):
            assert decoded(sample, inbox) == sample
            takers += 1
        else:
            with pytest.raises(msgspec.ValidationError, match="Invalid value"):
                decoded(sample, inbox)
    assert takers >= 1


def test_fields_that_a_newer_version_added_are_ignored() -> None:
    for sample in SAMPLES:
        newer = {**msgspec.to_builtins(sample, builtin_types=(bytes,)), "field_of_the_future": [1, {"a": 2}]}
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=AnyMessage) == sample


@pytest.mark.parametrize(
    "added",
    [
        (messages.Grant, ("incarnation", "writer")),
        (messages.Renewed, ("generations", "incarnation", "writer")),
        (messages.Withdraw, ("incarnation", "generation")),
    ],
    ids=lambda added: added[0].__name__,
)
def test_messages_of_an_older_version_that_name_no_life_fit_every_life(added: tuple[type[AnyMessage], tuple[str, ...]]) -> None:
    kind, fields = added
    sample = next(sample for sample in SAMPLES if type(sample) is kind)
    older = msgspec.to_builtins(sample, builtin_types=(bytes,))
    for field in fields:
        del older[field]
    taken = msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=AnyMessage)
    lives = [getattr(taken, field) for field in fields if field in ("incarnation", "writer")]
    assert type(taken) is kind and all(fits(life, Incarnation("any")) for life in lives)


def test_a_message_cannot_be_changed() -> None:
    for sample, field in ((each, field) for each in SAMPLES for field in each.__struct_fields__):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(sample, field, None)


def test_the_tag_on_the_wire_is_the_name_of_the_class_or_its_former_name() -> None:
    former = {"ExpectAnswer": "Open", "ForgetAnswer": "Close", "TransferOrder": "Command"}
    for sample in SAMPLES:
        name = type(sample).__name__
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample))["type"] == former.get(name, name)


@pytest.mark.parametrize(
    ("kind", "tag"),
    [
        (transfers.Connect, "ConnectOrder"),
        (transfers.PackedPush, "PushOrder"),
        (transfers.Allow, "AllowOrder"),
        (transfers.Settle, "SettleOrder"),
        (transfers.Expect, "ExpectOrder"),
        (transfers.PushDone, "PushDoneNews"),
        (transfers.PushFailed, "PushFailedNews"),
        (transfers.LinkChanged, "LinkNews"),
        (transfers.Settled, "SettledNews"),
    ],
)
def test_the_commands_and_events_of_transfers_keep_the_tags_of_their_first_names(kind: type[msgspec.Struct], tag: str) -> None:
    assert kind.__struct_config__.tag == tag


def test_endings_are_two_and_only_two() -> None:
    wrong = msgspec.msgpack.encode({"type": "Finished", "reason": "because"})
    with pytest.raises(msgspec.ValidationError, match="reason"):
        msgspec.msgpack.decode(wrong, type=messages.Ending)
    with pytest.raises(msgspec.ValidationError, match="Cancel"):
        decoded(messages.Cancel(key=KEY), messages.Ending)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_ids_are_four_little_endian_bytes_each(ids: list[int]) -> None:
    data = pack_ids(ids)
    assert data == b"".join(id.to_bytes(4, "little", signed=True) for id in ids)
    unpacked = unpack_ids(data)
    assert unpacked.tolist() == ids
    assert unpacked.dtype == np.int32


@pytest.mark.parametrize("data", [b"a", b"abc", b"abcde"])
def test_half_an_id_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="multiple of element size"):
        unpack_ids(data)


def test_a_key_names_request_and_attempt_and_is_ordered_by_both() -> None:
    assert str(KEY) == "request/1"
    assert sorted(
        [AttemptId(RequestId("b"), 0, ROUTER), AttemptId(RequestId("a"), 2, ROUTER), AttemptId(RequestId("a"), 1, ROUTER)]
    )[0] == AttemptId(RequestId("a"), 1, ROUTER)
