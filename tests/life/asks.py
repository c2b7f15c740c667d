"""What the clients of a schedule ask for, drawn from a seed.

Owns the draw and its ranges. Pure data. Knows no fleet and no faults.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from common.ids import RequestId

LONGEST_PROMPT, LONGEST_ANSWER = 44, 30


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer that a client wants. stop_after: ends it at its token of that number, if it is so long. stop_by: that token's
    text, or the token. The text of tokens before min_tokens ends nothing. include_stop: what ends it stays in the text.
    logprobs, prompt_logprobs: see `SamplingParams`. is_embedding: the client wants the prompt's embedding, no tokens.
    has_grammar: its grammar allows any text, but must be made ready. salt: see `Generate`."""

    request_id: RequestId
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_after: int | None = None
    stop_by: Literal["text", "token"] = "text"
    min_tokens: int = 0
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    is_embedding: bool = False
    has_grammar: bool = False
    salt: str = ""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a client does. leaves_s: when it hangs up, if it does. timeout_s: what it gives the request, or None. router: the
    number of the router that it asks, as long as that one lives. owner: whose it is, see `Terms`."""

    at_s: float
    choices: tuple[Choice, ...]
    priority: int = 0
    timeout_s: float | None = None
    leaves_s: float | None = None
    router: int = 0
    owner: str = ""


def draw_asks(random: Random, window_s: float) -> tuple[Ask, ...]:
    """All at once, or over a window of so many seconds."""
    span_s = random.choice((0.5, 0.3 * window_s, 0.8 * window_s))
    shortest = random.choice((1, 1, LONGEST_ANSWER // 2))
    return tuple(_ask(random, number, random.uniform(0.0, span_s), shortest) for number in range(random.randint(3, 8)))


def _ask(random: Random, number: int, at_s: float, shortest: int) -> Ask:
    prompt = tuple(random.randrange(10, 1000) for _ in range(random.choice((random.randint(1, 10), random.randint(1, 44)))))
    both = 2 if random.random() < 0.15 else 1
    max_tokens = 1 if random.random() < 0.1 else random.randint(shortest, LONGEST_ANSWER)
    is_sampled = random.random() < 0.3
    choices = tuple(
        Choice(
            request_id=RequestId(f"r{number}.{index}"),
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=1.0 if is_sampled else 0.0,
            seed=random.randrange(1000) if is_sampled else 0,
            stop_after=random.randrange(LONGEST_ANSWER) if random.random() < 0.3 else None,
            stop_by=random.choice(("text", "token")),
        )
        for index in range(both)
    )
    return Ask(
        at_s=at_s,
        choices=choices,
        priority=random.choice((0, 0, 0, -1, 5)),
        timeout_s=random.uniform(0.5, 4.0) if random.random() < 0.05 else None,
        leaves_s=at_s + random.uniform(0.0, 5.0) if random.random() < 0.15 else None,
    )


def with_extras(asks: tuple[Ask, ...], random: Random) -> tuple[Ask, ...]:
    """Some of the clients ask for log probabilities, or for other rules of stop strings."""

    def extended(choice: Choice) -> Choice:
        return replace(
            choice,
            min_tokens=random.choice((0, 0, 0, random.randint(0, choice.max_tokens))) if choice.stop_by == "text" else 0,
            include_stop=random.random() < 0.3,
            logprobs=random.choice((None, None, 0, 3)),
            prompt_logprobs=random.choice((None, None, None, 0, 2)),
        )

    return tuple(replace(ask, choices=tuple(map(extended, ask.choices))) for ask in asks)


def with_embeddings(asks: tuple[Ask, ...], random: Random) -> tuple[Ask, ...]:
    """A few of the clients want no tokens, but embeddings."""

    def extended(ask: Ask) -> Ask:
        is_embedding = random.random() < 0.08
        return replace(ask, choices=tuple(replace(choice, is_embedding=is_embedding) for choice in ask.choices))

    return tuple(map(extended, asks))


def with_shared_prompts(asks: tuple[Ask, ...], random: Random) -> tuple[Ask, ...]:
    """In most schedules, many prompts begin as one before them does, or are the same. A few clients share with no other."""
    shares = random.choice((0.0, 0.5, 0.9))
    done: list[Ask] = []
    for ask in asks:
        prompt, salt = ask.choices[0].prompt, random.choice(("", "", "", "tenant"))
        if done and random.random() < shares:
            before = random.choice(done).choices[0].prompt
            kept = before[: random.choice((len(before), random.randint(1, len(before))))]
            prompt = (*kept, *prompt[: random.choice((0, 1, LONGEST_PROMPT))])[:LONGEST_PROMPT]
        done.append(replace(ask, choices=tuple(replace(choice, prompt=prompt, salt=salt) for choice in ask.choices)))
    return tuple(done)


def with_owners(asks: tuple[Ask, ...], random: Random, floods: bool) -> tuple[Ask, ...]:
    """In most schedules clients have keys, and some of these ask for more than others. floods: the first key asks early,
    and three times for everything."""
    owners = random.choice((("",), ("alice", "bob"), ("alice", "alice", "alice", "bob"), ("alice", "bob", "carol", "")))
    done: list[Ask] = []
    for ask in asks:
        done.append(replace(ask, owner=random.choice(owners)))
        if not floods or done[-1].owner != "alice":
            continue
        done[-1] = replace(done[-1], at_s=0.1 * ask.at_s)
        for turn in range(2):
            again = (replace(choice, request_id=RequestId(f"{choice.request_id}.{turn}")) for choice in ask.choices)
            done.append(replace(done[-1], choices=tuple(again)))
    return tuple(done)
