"""Membership: instances join the router's fleet, learn their peers, and leave.

Owns what an instance says about itself. Does not know requests or how an instance is chosen.
"""

import re
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from common.addresses import ROUTER_NAME
from common.ids import AttemptId, Digest, Incarnation, InstanceId, Role, ServingRole
from common.messages.base import UNNAMED, WIRE_VERSION, Message
from common.messages.traces import Timeline
from common.messages.variants import AdaptersHeld, WeightVersion
from common.pages.layout import KVLayout
from common.ranges import Count, Interval, Size

_POOL_DEVICE = re.compile(r"cpu|cuda:[0-9]{1,3}")


class EngineChoices(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine took where flags leave it open or a host lacks something. For people; "": not said."""

    attention: str = ""
    """The implementation, and why where it is not the fastest one."""
    graphs: str = ""
    """Whether decode steps are replayed, "on" or "off", and why not."""
    sums: str = ""
    """What adds the parts of ranks on GPUs, and why that; "": nothing does."""
    sharing: str = ""
    """How it computes beside other instances on its GPU; "": there are none."""


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process of an instance, which drives one device. For people."""

    rank: Count
    """Counted from 0."""
    pid: Count
    """Process id on its host."""
    host: str
    """The host's name."""
    device: str
    """"cpu" or "cuda:N"."""
    engine: EngineChoices = EngineChoices()
    """What computes there."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal in all instances of one fleet."""

    name: str
    """As clients write it."""
    fingerprint: str
    """Digest of the config and of parts of the weight files. It says nothing where `config` is known, for weights change."""
    architecture: str
    """The model class that config.json names."""
    dtype: str
    """The data type of the weights, for example "bfloat16"; that of the KV is in the layout."""
    vocab_size: Size
    """Rows of the embedding: every token id is below it."""
    context_tokens: Size
    """Most tokens of prompt and answer together."""
    kv_heads: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """The KV heads of the whole model, whatever part of them a rank holds; 0: not reported."""
    config: Digest = Digest("")
    """Digest of the config and of how weights are loaded; "": an older version, which does not say."""


class PoolDescriptor(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What a rank publishes once so that peers can write into its pool."""

    backend: str
    """Name of the transport."""
    agent: str
    """The rank's name in the transport; unique per incarnation."""
    address: Count
    """Address of the pool's first byte in the rank's memory."""
    total_pages: Size
    """Pages of the pool."""
    device: str
    """"cpu" or "cuda:N"."""
    layout: KVLayout
    """Shape and dtype of a page."""
    wire: bytes
    """What the backend needs to connect; opaque to everybody else."""
    spare_pages: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Pages after those of the pool that hold no KV: links are measured by writing there."""
    first_head: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Its pages hold the model's KV heads from this one on, as many as the layout says."""

    @cached_property
    def pool_bytes(self) -> int:
        return (self.total_pages + self.spare_pages) * self.layout.page_bytes

    @property
    def is_addressable(self) -> bool:
        """Every byte of the pool has an address that fits an int64."""
        return self.address < 2**63 - self.pool_bytes

    @property
    def has_known_device(self) -> bool:
        """The device is "cpu" or "cuda:N"."""
        return _POOL_DEVICE.fullmatch(self.device) is not None


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance says about itself when it registers."""

    id: InstanceId
    """Its name, the same after a restart."""
    incarnation: Incarnation
    """This life of its process."""
    role: Role
    """"prefill" or "decode"."""
    inbox: str
    """ZeroMQ address, tcp://host:port, on which it receives everything."""
    ranks: tuple[RankInfo, ...]
    """Its processes."""
    model: ModelIdentity
    """The model that it serves."""
    pools: Annotated[tuple[PoolDescriptor, ...], Meta(min_length=1)]
    """Its KV pages: the pool of each rank, in their order. A page has one id on all ranks, and each holds some heads of it."""
    max_running: Size
    """Most requests that it computes at once."""
    wire_version: Count = WIRE_VERSION
    """The version it speaks."""
    started_ns: Count = 0
    """When this life began: nanoseconds of Unix time, by its host's clock. 0: an older version, which does not say."""
    caches_prefixes: bool = True
    """Whether it has a prefix cache."""
    verifies_pages: bool = False
    """Whether it sends the digests of pages that it pushes, and compares those of pages that it receives."""
    holds_grammars: bool = True
    """Whether it can hold answers to grammars."""
    max_adapters: Count = 0
    """Most LoRA adapters that it holds at once."""

    @property
    def total_pages(self) -> int:
        """Pages of the instance, which are those of each rank."""
        return self.pools[0].total_pages

    @property
    def page_size(self) -> int:
        """Tokens of a page, on every rank."""
        return self.pools[0].layout.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on all ranks together."""
        return sum(pool.layout.page_bytes for pool in self.pools)

    def began_before(self, other: "InstanceInfo") -> bool:
        """Whether this is the earlier of two lives of one name. Lives that began at one moment have an order too, the same
        everywhere. Where one does not say when it began, neither is the earlier."""
        ours, theirs = (self.started_ns, self.incarnation), (other.started_ns, other.incarnation)
        return ours < theirs and self.started_ns > 0


class Register(Message, frozen=True):
    """instance → router, repeated until Welcome or Refused arrives."""

    instance: InstanceInfo
    """Who wants to join."""
    address: str = ""
    """The address of this router, as the instance knows it; comes back in Welcome."""
    was_welcome: bool = False
    """A life of this router has welcomed it before."""
    weights: Digest = Digest("")
    """What it computes with. "": an older version; its weights are those of `ModelIdentity.fingerprint`, and never change."""
    weight_version: WeightVersion = ""
    """What people call them."""
    weight_changes: Count = 0
    """See `Heartbeat`."""
    adapters: AdaptersHeld | None = None
    """Its adapters; None: it has none."""


class Welcome(Message, frozen=True):
    """router → instance: you are a member. It answers every Register, and every Heartbeat unless
    the last answer is younger than `dead_after_s` / 4, so it is the router's own heartbeat."""

    router: Annotated[InstanceId, Meta(pattern=f"^{ROUTER_NAME}")]
    """The name of this life of the router, which no instance can have. When another life answers, the instance ends what the
    former one had sent."""
    detokenizers: Annotated[tuple[str, ...], Meta(min_length=1)]
    """ZeroMQ addresses to send TokenBatch to: the tokens of a key go to number `shard_of` (`common.ids`)."""
    heartbeat_s: Interval
    """Send a Heartbeat this often."""
    address: str = ""
    """That of the Register. An instance may be a member at several routers, and one router may have several addresses."""
    dead_after_s: Interval = 3.0
    """An instance whose heartbeats are left unanswered for this long registers again."""


class Refused(Message, frozen=True):
    """router → instance: you cannot join. The instance logs the reason and asks again. It exits when all routers refuse it and
    none has ever welcomed it, or when one says that this is final."""

    reason: str
    """For people."""
    address: str = ""
    """That of the Register."""
    incarnation: Incarnation = UNNAMED
    """The life that is refused. Its successor may listen at the same address."""
    id: InstanceId = InstanceId("")
    """Who is refused: a Register may be wrong about who listens at its address. "" comes from versions that did not say."""
    final: bool = False
    """A newer incarnation has taken its place: it must exit, whatever other routers say."""
    is_mismatch: bool = False
    """It differs from the fleet in something that it was started with, so another start ends the same way."""


class Peers(Message, frozen=True):
    """router → instance: which instances of the other role to work with, as changes or as the whole set. An instance applies
    changes only to the version that they follow. Its heartbeats say which version it has; when that is not the latest, the router
    sends the whole set again."""

    version: Count
    """The version of the set with this message applied. It rises with every message, and no other life of a router uses the same
    numbers."""
    since: Count | None = None
    """The version that these changes follow; None: `joined` begins the whole set."""
    joined: tuple[InstanceInfo, ...] = ()
    """Those that are new, or new incarnations."""
    left: tuple[InstanceId, ...] = ()
    """Those to work with no longer."""
    more: bool = False
    """The whole set is too large for one message and goes on in the next: act when it is complete."""


class FlushCache(Message, frozen=True):
    """router → instance: no request that comes from now on hits what is in the prefix cache now."""


class TellLinks(Message, frozen=True):
    """router → prefill instance: send a LinkReport of all links, with their traffic."""


class Goodbye(Message, frozen=True):
    """instance → router: this incarnation leaves in order and takes no more requests."""

    id: InstanceId
    incarnation: Incarnation
    timelines: tuple[Timeline, ...] = ()
    """The last: see Heartbeat."""
    reason: str = ""
    """Why, for people; "" when it was told to leave."""
    is_quiet: bool = False
    """It has no request, and every write from or to it is proven to have ended. False also from an older version, which does not
    say."""
    suspects: tuple[AttemptId, ...] = ()
    """The requests of the step whose failure has ended it: one of them may be the reason."""


class Drain(Message, frozen=True):
    """router → instance: take no more requests, end those that wait so that they are resumed elsewhere, finish the rest, exit."""

    incarnation: Incarnation = UNNAMED
    """The life that is to leave. Its successor may listen at the same address."""


class TakeRole(Message, frozen=True):
    """router → instance, with each heartbeat until it serves in that role or RoleKept comes. Prefill and decode change by another
    life: the instance ends or hands off what it has, and registers anew. Between decode and both nothing ends."""

    number: Count
    """The router's number for the order. A later one is higher."""
    role: ServingRole
    incarnation: Incarnation = UNNAMED
    """The life that is meant."""


class RoleKept(Message, frozen=True):
    """instance → router: it stays in its role."""

    id: InstanceId
    incarnation: Incarnation
    number: Count
    """The order that it does not follow."""
    reason: str
    """For people."""
