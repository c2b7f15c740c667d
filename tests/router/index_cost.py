"""What it costs a router to know the caches of 1,000 instances with 10 million pages of 16 tokens between them.

    python -m tests.router.index_cost

Owns the measurement. Judges nothing. Each instance holds conversations of its own, and eight system prompts that all hold. The
times are the least of several runs, on one core.
"""

import sys
import time
import tracemalloc
from collections.abc import Callable
from random import Random

import numpy as np
from msgspec.structs import replace

from common.messages import CacheChanges, InstanceInfo, Load
from common.pages.radix_cache import NAME_BYTES, BlockNames
from router.cache_index import CacheIndex
from router.members import Member
from tests.builders import LAYOUT, instance

INSTANCES, PAGES, PAGE_TOKENS, BLOCK_PAGES = 1_000, 10_000_000, 16, 8
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 8, 32
PROMPT_BLOCKS = 256
"""A prompt of 32,768 tokens."""
RUNS = 200
CHANGED = 64
"""Blocks that came, and went, in one message."""
MICRO = 1e6


def names(random: Random, count: int) -> list[int]:
    return [random.getrandbits(8 * NAME_BYTES) for _ in range(count)]


def told(info: InstanceInfo, version: int, stored: list[int], gone: list[int] | None = None) -> CacheChanges:
    return CacheChanges(
        id=info.id,
        incarnation=info.incarnation,
        version=version,
        since=None if gone is None else version - 1,
        stored=np.array(stored, dtype="<u8").tobytes(),
        gone=np.array(gone or [], dtype="<u8").tobytes(),
    )


def least(act: Callable[[], object]) -> float:
    """Microseconds."""
    best = float("inf")
    for _ in range(RUNS):
        began_s = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - began_s)
    return MICRO * best


def main() -> None:
    random = Random(1)
    system = [names(random, SYSTEM_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
    index = CacheIndex(follows=True)
    members: list[Member] = []
    for number in range(INSTANCES):
        plain = instance(f"i-{number}", "prefill" if number % 2 else "decode")
        pool = replace(plain.pools[0], layout=replace(LAYOUT, page_size=PAGE_TOKENS))
        members.append(Member(replace(plain, pools=(pool,)), Load()))
    own_blocks = PAGES // BLOCK_PAGES // INSTANCES - SYSTEM_PROMPTS * SYSTEM_BLOCKS
    tracemalloc.start()
    own: list[list[int]] = []
    for member in members:
        index.join(member)
        own.append(names(random, own_blocks))
    before = tracemalloc.get_traced_memory()[0]
    for member, mine in zip(members, own, strict=True):
        index.receive(member, told(member.info, 1, [*mine, *(name for each in system for name in each)]))
    held_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()

    say = sys.stdout.write
    blocks = INSTANCES * (own_blocks + SYSTEM_PROMPTS * SYSTEM_BLOCKS)
    say(f"{blocks:,} blocks on {INSTANCES:,} instances ({PAGES:,} pages): {held_bytes / 2**20:.0f} MiB\n")
    turns = [[*system[number % SYSTEM_PROMPTS], *mine[: PROMPT_BLOCKS - SYSTEM_BLOCKS]] for number, mine in enumerate(own)]
    prompts = {
        "a prompt of 32,768 tokens that one instance holds": turns[0],
        "one of which all hold the first 4,096 tokens": [*system[0], *names(random, PROMPT_BLOCKS - SYSTEM_BLOCKS)],
        "one of 2,048 tokens that one holds": turns[1][:16],
        "one that nobody holds": names(random, PROMPT_BLOCKS),
    }
    for what, prompt in prompts.items():
        overlap = index.match(prompt)
        match = least(lambda prompt=prompt: index.match(prompt))  # type: ignore[misc]
        deepest = least(lambda o=overlap: o.deepest("prefill", 4, lambda member: True))  # type: ignore[misc]
        tokens = least(lambda o=overlap: o.tokens(members[1]))  # type: ignore[misc]
        say(f"{what}: match {match:.1f} us, the 4 deepest {deepest:.1f} us, tokens of one {tokens:.2f} us\n")
    packed = np.arange(PROMPT_BLOCKS * BLOCK_PAGES * PAGE_TOKENS, dtype="<i4").tobytes()
    say(f"the names of a prompt of 32,768 tokens: {least(lambda: BlockNames.of(packed, PAGE_TOKENS).names):.0f} us\n")

    version, member, mine = 1, members[0], own[0]
    fresh = names(random, (RUNS + 1) * CHANGED)

    def change() -> None:
        nonlocal version
        version += 1
        stored, gone = fresh[(version - 2) * CHANGED :][:CHANGED], mine[(version - 2) * CHANGED % len(mine) :][:CHANGED]
        index.receive(member, told(member.info, version, stored, gone))

    say(f"a message with {CHANGED} blocks stored and {CHANGED} gone: {least(change):.0f} us\n")
    say(f"a heartbeat that shows nothing new: {least(lambda: index.heard(member, version, 0.0)):.2f} us\n")
    whole = told(members[2].info, 1, own[2])
    say(f"all {len(own[2]):,} blocks of one instance again: {least(lambda: index.receive(members[2], whole)):.0f} us\n")

    def come_and_go() -> None:
        index.leave(members[3])
        index.join(members[3])
        index.receive(members[3], told(members[3].info, 1, own[3]))

    say(f"an instance leaves, comes and tells all its blocks: {least(come_and_go):.0f} us\n")


if __name__ == "__main__":
    main()
