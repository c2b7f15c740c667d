"""What a router knows of prefix caches. Whatever is lost, late or repeated, and whoever starts again: once all is quiet it is
what the caches hold. And who holds most of a prompt is found as a plain count finds it."""

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from common.ids import Digest, InstanceId, Role, Variant, pack_ids
from common.instance import prompt_cache
from common.instance.prompt_cache import GATHER_S, CacheReporter
from common.messages import CacheChanges, Load, TellCache
from common.pages import radix_cache
from common.pages.pool import PagePool
from common.pages.radix_cache import BlockNames, PageKeys, block_name, pages_of_block
from router import cache_index
from router.cache_index import EXPECT_S, NO_OVERLAP, CacheIndex
from router.members import Member
from tests.builders import LAYOUT, instance

PAGE_TOKENS, PAGES = 64, 9
BLOCK_TOKENS = 128
HEARTBEAT_S = 1.0
PROMPTS = st.lists(st.sampled_from([1, 2]), max_size=7)
ROLES: tuple[Role, ...] = ("prefill", "decode")


def packed(pages: list[int]) -> bytes:
    """Page `n` holds token n, again and again."""
    return pack_ids([page for page in pages for _ in range(PAGE_TOKENS)])


def new_member(name: str, role: Role, life: int = 0) -> Member:
    info = instance(name, role, str(life))
    (pool,) = info.pools
    return Member(replace(info, pools=(replace(pool, layout=replace(LAYOUT, page_size=PAGE_TOKENS)),)), Load())


@dataclass
class Holder:
    """A life of an instance."""

    member: Member
    pool: PagePool = field(default_factory=lambda: PagePool(PAGES))

    def __post_init__(self) -> None:
        self.teller = CacheReporter(self.member.info, self.pool.cache, Digest(""))

    def serve(self, pages: list[int]) -> None:
        """Compute a prompt, or find it, and let it stay in the cache."""
        keys = PageKeys(PAGE_TOKENS, packed=packed(pages))
        lease = self.pool.lease(len(pages), self.pool.cache.match(keys, len(pages)))
        assert lease is not None
        lease.publish(keys, len(pages))
        lease.close()

    def tokens(self, pages: list[int]) -> int:
        """The tokens in whole blocks of this prompt that are cached."""
        cached = len(self.pool.cache.match(PageKeys(PAGE_TOKENS, packed=packed(pages)), len(pages)))
        return cached // (BLOCK_TOKENS // PAGE_TOKENS) * BLOCK_TOKENS


class Router:
    def __init__(self, name: str) -> None:
        self.name = InstanceId(name)
        self.index = CacheIndex(follows=True, heartbeat_s=HEARTBEAT_S)
        self.members: dict[InstanceId, Member] = {}

    def meet(self, member: Member) -> None:
        """As the fleet does: a later life takes the place of the former one."""
        known = self.members.get(member.info.id)
        if known is None or known.life != member.life:
            self.part(member.info.id)
            self.members[member.info.id] = joined = Member(member.info, Load())
            self.index.join(joined)

    def part(self, name: InstanceId) -> None:
        gone = self.members.pop(name, None)
        if gone is not None:
            self.index.leave(gone)


Letter = tuple[InstanceId, Holder, TellCache | CacheChanges | int]
"""To or from a life of a router, and of an instance. A number is a heartbeat's."""


class Followed(RuleBasedStateMachine):
    """Two instances and two routers that follow them."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.letters: deque[Letter] = deque()
        self.lives = 0
        self.routers = [Router("router-a"), Router("router-b")]
        self.holders = [Holder(new_member(f"{role}-0", role)) for role in ROLES]
        self.served: list[list[int]] = []
        self.all_is_quiet()

    # --- what happens --------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1), pages=PROMPTS)
    def serve(self, which: int, pages: list[int]) -> None:
        self.holders[which].serve(pages)
        self.served.append(pages)

    @rule(which=st.integers(0, 1), pages=st.integers(1, PAGES))
    def need_memory(self, which: int, pages: int) -> None:
        lease = self.holders[which].pool.lease(pages)
        assert lease is not None
        lease.close()

    @rule(which=st.integers(0, 1), seconds=st.sampled_from([0.0, GATHER_S, EXPECT_S]))
    def turn(self, which: int, seconds: float) -> None:
        self.now += seconds
        holder = self.holders[which]
        for send in holder.teller.tick(self.now):
            assert isinstance(send.message, CacheChanges)
            self.letters.append((send.to, holder, send.message))

    @rule(which=st.integers(0, 1), router=st.integers(0, 1))
    def beat(self, which: int, router: int) -> None:
        holder = self.holders[which]
        self.letters.append((self.routers[router].name, holder, holder.teller.version))

    @rule(at=st.integers(0, 5), fate=st.sampled_from(["arrives", "arrives", "comes twice", "is lost"]))
    def carry(self, at: int, fate: str) -> None:
        if at < len(self.letters):
            letter = self.letters[at]
            if fate != "comes twice":
                del self.letters[at]
            if fate != "is lost":
                self.deliver(*letter)

    @rule(
        what=st.sampled_from(["flush", "instance", "router", "silent router", "missed", "despairs", "despairs of all"]),
        which=st.integers(0, 1),
        router=st.integers(0, 1),
    )
    def something_befalls(self, what: str, which: int, router: int) -> None:
        """One starts again, or takes the other for lost that lives. A router may be gone without a sign."""
        holder, known = self.holders[which], self.routers[router]
        self.lives += 1
        match what:
            case "flush":
                holder.pool.flush()
            case "instance":
                self.holders[which] = Holder(new_member(f"{ROLES[which]}-0", ROLES[which], self.lives))
            case "router":
                self.routers[router] = Router(f"router-{router}-{self.lives}")
                for each in self.holders:
                    each.teller.forget(known.name)
            case "silent router":
                self.routers[router] = Router(f"router-{router}-{self.lives}")
            case "missed":
                known.part(holder.member.info.id)
            case _:
                for lost in self.routers if what == "despairs of all" else [known]:
                    holder.teller.forget(lost.name)

    @rule(which=st.integers(0, 1), router=st.integers(0, 1), pages=PROMPTS)
    def expect(self, which: int, router: int, pages: list[int]) -> None:
        self.expect_at(self.routers[router], self.holders[which], pages)

    # --- what must hold ------------------------------------------------------------------------------------------------

    @invariant()
    def holders_are_those_who_hold_or_are_expected_to(self) -> None:
        for router in self.routers:
            counted: dict[int, int] = {}
            for told in router.index.of_members.values():
                assert not told.held & told.expected.keys()
                for name in (*told.held, *told.expected):
                    counted[name] = counted.get(name, 0) | told.bit
            assert counted == router.index._holders

    @rule()
    def all_is_quiet(self) -> None:
        """Nothing is lost any more: after a few heartbeats, every router knows what is cached, and nothing else."""
        for _ in range(4):
            self.now += EXPECT_S
            for router in self.routers:
                for holder in self.holders:
                    self.deliver(router.name, holder, holder.teller.version)
            self.settle()
        for pages in self.served:
            for router in self.routers:
                overlap = router.index.match(BlockNames.of(packed(pages), PAGE_TOKENS).names)
                for holder in self.holders:
                    member = router.members[holder.member.info.id]
                    assert overlap.tokens(member) == holder.tokens(pages)
        assert self.settle() == 0, "who knows everything is told nothing"

    def teardown(self) -> None:
        self.all_is_quiet()

    # --- inside --------------------------------------------------------------------------------------------------------

    def settle(self) -> int:
        """Let everything arrive, in order, and what follows from it. Returns how many letters there were."""
        letters = 0
        while True:
            for which in range(2):
                self.turn(which, GATHER_S)
            if not self.letters:
                return letters
            while self.letters:
                self.deliver(*self.letters.popleft())
                letters += 1

    def deliver(self, name: InstanceId, holder: Holder, message: TellCache | CacheChanges | int) -> None:
        router = next((each for each in self.routers if each.name == name), None)
        if isinstance(message, TellCache):
            if holder in self.holders and router is not None:
                holder.teller.ask(name)
            return
        if router is None or holder not in self.holders:
            return
        router.meet(holder.member)
        member = router.members[holder.member.info.id]
        if isinstance(message, CacheChanges):
            router.index.receive(member, message)
            return
        for send in router.index.heard(member, message, self.now):
            assert isinstance(send.message, TellCache)
            self.letters.append((name, holder, send.message))

    def expect_at(self, router: Router, holder: Holder, pages: list[int]) -> None:
        router.meet(holder.member)
        member = router.members[holder.member.info.id]
        names = BlockNames.of(packed(pages), PAGE_TOKENS).names
        router.index.expect([member], names, self.now)
        assert router.index.match(names).tokens(member) == len(names) * BLOCK_TOKENS


def test_whatever_is_lost_or_late_in_the_end_routers_know_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "PART_NAMES", 1)
    monkeypatch.setattr(radix_cache, "MOST_CHANGES", 3)
    monkeypatch.setattr(cache_index, "EXPECTED_NAMES", 8)
    run_state_machine_as_test(Followed, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


# --- who holds most ----------------------------------------------------------------------------------------------------------


def told_all(index: CacheIndex, member: Member, names: set[int], version: int = 1) -> None:
    stored = b"".join(name.to_bytes(8, "little") for name in names)
    life = member.life
    index.receive(member, CacheChanges(id=life.id, incarnation=life.incarnation, version=version, stored=stored))


def anyone(member: Member) -> bool:
    return True


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), members=st.integers(1, 80), most=st.integers(0, 12))
def test_the_deepest_are_those_that_hold_most_of_the_prompt(seed: int, members: int, most: int) -> None:
    """Whatever they hold: not only the beginnings of prompts, and after some have left."""
    random = Random(seed)
    index, prompt = CacheIndex(follows=True), [random.getrandbits(64) for _ in range(random.randint(0, 9))]
    depths: dict[Member, int] = {}
    for number in range(members):
        member = new_member(f"m-{number}", random.choice(ROLES))
        index.join(member)
        held = prompt[: random.choice((0, len(prompt), random.randint(0, 9)))]
        held = random.sample(held, k=len(held) - (random.random() < 0.2)) if held else held
        told_all(index, member, {*held, random.getrandbits(64)})
        depths[member] = next((depth for depth, name in enumerate(prompt) if name not in held), len(prompt))
        if random.random() < 0.3:
            gone = random.choice(list(depths))
            index.leave(gone)
            del depths[gone]
    overlap, barred = index.match(prompt), set(random.sample(list(depths), min(len(depths), random.randint(0, 20))))
    for member, depth in depths.items():
        assert overlap.tokens(member) == depth * BLOCK_TOKENS
    for role in ROLES:
        found = overlap.deepest(role, most, lambda member: member not in barred)
        suiting = (member for member, depth in depths.items() if member.info.role == role and depth and member not in barred)
        ranked = sorted((depths[member] for member in suiting), reverse=True)
        assert [depths[member] for member in found] == ranked[:most]
        assert len(set(found)) == len(found) and {member.info.role for member in found} <= {role}


def test_of_many_that_hold_the_same_each_is_named_first_at_times() -> None:
    index, members = CacheIndex(follows=True), [new_member(f"m-{number}", "prefill") for number in range(20)]
    for member in members:
        index.join(member)
        told_all(index, member, {1})
    assert {index.match([1]).deepest("prefill", 1, anyone)[0] for _ in range(400)} == set(members)


def test_who_left_holds_nothing_though_the_prompt_was_looked_up_before() -> None:
    index, member = CacheIndex(follows=True), new_member("m", "decode")
    index.join(member)
    told_all(index, member, {1})
    overlap = index.match([1])
    index.leave(member)
    assert overlap.tokens(member) == 0 and overlap.deepest("decode", 1, anyone) == [] and len(index) == 0
    assert NO_OVERLAP.tokens(member) == 0 and NO_OVERLAP.deepest("decode", 1, anyone) == []


# --- what is expected --------------------------------------------------------------------------------------------------------


def test_a_prompt_that_was_sent_to_a_member_counts_for_a_moment_or_as_long_as_the_member_says_so() -> None:
    index, member = CacheIndex(follows=True), new_member("m", "prefill")
    index.join(member)
    index.expect([member], [1, 2, 3], now=0.0)
    index.expect([member], [1], now=1.0)
    told_all(index, member, {3})
    assert index.match([1, 2, 3]).tokens(member) == 3 * BLOCK_TOKENS
    index.heard(member, 1, EXPECT_S)
    assert index.match([1, 2, 3]).tokens(member) == BLOCK_TOKENS, "the first was expected again, later"
    index.heard(member, 1, 1.0 + EXPECT_S)
    assert index.match([1, 2, 3]).tokens(member) == 0 and index.match([3]).tokens(member) == BLOCK_TOKENS


def test_of_too_many_expected_blocks_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_index, "EXPECTED_NAMES", 4)
    index, member = CacheIndex(follows=True), new_member("m", "prefill")
    index.join(member)
    for prompt in ([1, 2], [3, 4], [5]):
        index.expect([member], prompt, now=0.0)
    assert len(index) == 3 and index.match([1]) is NO_OVERLAP


# --- who is asked ------------------------------------------------------------------------------------------------------------


def test_nobody_is_asked_while_no_policy_needs_it_and_nothing_is_kept() -> None:
    index, member = CacheIndex(follows=False), new_member("m", "prefill")
    index.join(member)
    assert index.heard(member, 5, 0.0) == [] == index.heard(member, 5, 9.0)
    told_all(index, member, {1})
    index.expect([member], [1], 0.0)
    assert index.match([1]) is NO_OVERLAP
    index.leave(member)


def test_a_member_is_asked_at_once_and_again_with_each_heartbeat_that_shows_that_something_is_missing() -> None:
    index, member = CacheIndex(follows=True), new_member("m", "prefill")
    index.join(member)
    asked = [bool(index.heard(member, 0, now)) for now in (0.0, 0.1, 1.0, 2.0)]
    told_all(index, member, {1}, version=3)
    asked += [bool(index.heard(member, version, now)) for now, version in ((3.0, 3), (4.0, 4), (4.1, 4), (5.0, 4))]
    assert asked == [True, False, True, True, False, False, False, True]


def test_who_has_no_prefix_cache_is_not_asked_and_nothing_is_expected_there() -> None:
    index, member = CacheIndex(follows=True), new_member("m", "prefill")
    member.info = replace(member.info, caches_prefixes=False)
    index.join(member)
    index.expect([member], [1, 2], now=0.0)
    assert index.heard(member, 1, now=5.0) == [] and index.page_size == 0
    assert index.match([1, 2]) is NO_OVERLAP
    index.leave(member)


def test_names_that_are_cut_off_are_no_names() -> None:
    index, member = CacheIndex(follows=True), new_member("m", "prefill")
    index.join(member)
    whole = CacheChanges(id=member.life.id, incarnation=member.life.incarnation, version=1)
    for changes in (replace(whole, stored=bytes(9)), replace(whole, gone=bytes(7))):
        index.receive(member, changes)
    assert len(index) == 0 and index.heard(member, 1, 0.0)


# --- blocks ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "pages"), [(16, 8), (64, 2), (48, 2), (128, 1), (1024, 1), (4, 8)])
def test_a_block_has_128_tokens_or_a_page_or_eight_pages(page_size: int, pages: int) -> None:
    assert pages_of_block(page_size) == pages
    tokens = pages * page_size
    names = BlockNames.of(pack_ids(range(3 * tokens - 1)), page_size).names
    assert (
        len(names) == 2
        and len({*names, *BlockNames.of(pack_ids(range(3 * tokens - 1)), page_size, Variant(), "salt").names}) == 4
    )
    assert BlockNames.of(pack_ids(range(tokens)), page_size).names == names[:1]


@given(st.integers(1, 40), st.lists(st.integers(0, 90), max_size=6))
def test_blocks_are_named_as_an_instance_names_them_also_when_the_prompt_grows(page_size: int, parts: list[int]) -> None:
    packed, each = pack_ids(range(sum(parts))), pages_of_block(page_size)
    keys = PageKeys(page_size, Variant(), "salt", packed).pages
    growing, end = BlockNames.of(b"", page_size, Variant(), "salt"), 0
    for part in parts:
        growing, end = growing.extended(packed[4 * end : 4 * (end + part)]), end + part
    assert (list(growing.names), growing.tokens) == ([block_name(key.digest) for key in keys[each - 1 :: each]], sum(parts))


def test_nothing_is_noted_while_nobody_follows() -> None:
    holder = Holder(new_member("m", "prefill"))
    is_noted = list[bool]()
    for act in (holder.teller.forget, holder.teller.ask, holder.teller.forget):
        act(InstanceId("router"))
        is_noted.append(holder.pool.cache.log is not None)
    assert is_noted == [False, True, False]
    holder.serve([1, 2])
    assert holder.teller.next_deadline() is None and holder.teller.tick(9.0) == []
