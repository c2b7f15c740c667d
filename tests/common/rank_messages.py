"""One sample of each message between the ranks of an instance."""

from common.ids import ROUTER, AttemptId, Digest, Incarnation, InstanceId, RequestId, Ticket, pack_ids
from common.messages import AnyMessage, Failed, LinkInfo, RankInfo, ranks
from common.messages.transfers import LinkChanged, PackedPush, PushDone, PushFailed, Settled
from common.messages.variants import WeightsInMemory
from common.sampling_params import Grammar, SamplingParams
from tests.builders import instance

KEY = AttemptId(RequestId("request"), 1, ROUTER)
PEER, LIFE = InstanceId("decode-1"), Incarnation("life")
INFO = instance(PEER, "decode", LIFE)
GRAMMAR = Grammar("regex", "[ab]+")
SAMPLING = SamplingParams(max_new_tokens=5)
IDS = pack_ids([1, 2, 3])
SAMPLES: tuple[AnyMessage, ...] = (
    ranks.RankHello(
        rank=1,
        ranks=4,
        address="tcp://h:3",
        info=RankInfo(rank=1, pid=7, host="h", device="cuda:1"),
        setup={"--dtype": "auto"},
    ),
    ranks.RankWelcome(meeting="h:4"),
    ranks.RankRefused(reason="no"),
    ranks.Offer(number=1, pages=100),
    ranks.Agreed(number=2, pages=90),
    ranks.RankReady(number=3, model=INFO.model, pool=INFO.pools[0]),
    ranks.Launch(
        number=4,
        step=7,
        starts=(ranks.RowBegins(0, IDS, SAMPLING, 3, 5, IDS, 1, 9), ranks.RowBegins(1, IDS, SAMPLING, 0, None, None, 0)),
        chunks=(ranks.PromptChunk(1, 0, IDS, last=True),),
        decode_rows=IDS,
        grown_rows=IDS,
        grown_pages=IDS,
    ),
    ranks.LayersReached(number=5, step=7, layers=3),
    ranks.StepReturned(number=6, step=7, digest=2**32 - 1),
    ranks.PrepareGrammar(number=7, grammar_id=1, grammar=GRAMMAR),
    ranks.GrammarPrepared(number=8, grammar_id=1, refused=Failed("no")),
    ranks.DropGrammars(number=9, grammar_ids=(1, 2)),
    ranks.DoOnRank(number=12, work=1, task=WeightsInMemory(segments=("new-1", "new-2"))),
    ranks.RankDone(number=13, work=1, result="ab", refused=Failed("no")),
    ranks.FreeAdapter(number=16, adapter=Digest("ab")),
    ranks.SwitchOnRank(number=14),
    ranks.DropOnRank(number=15),
    ranks.TransferOrder(number=10, order=PackedPush(Ticket(1), PEER, LIFE, IDS, IDS, KEY, (0, 2))),
    ranks.Events(
        number=11,
        news=(
            PushDone(Ticket(1), 4096, 0.5, 2),
            PushFailed(Ticket(2), "gone", quiescent=True, begun=False),
            LinkChanged(LinkInfo(peer=PEER, incarnation=LIFE, state="ready")),
            Settled(KEY),
        ),
    ),
    ranks.Ping(number=12, sent_s=1.5),
    ranks.Pong(number=13, sent_s=1.5, heard_s=100.25, transfer_age_s=0.5),
    ranks.AskDrain(number=14),
    ranks.RankFailed(number=15, reason="out of memory"),
    ranks.End(number=16, reason="drained", orderly=True),
)
