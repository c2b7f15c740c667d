"""How tokens are drafted for speculative decoding, as flags say it: vLLM's --speculative-config, and SGLang's names.

Owns the flags' words and their limits. Who drafts is `decode.speculation`.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import ConfigError
from common.options import require

MOST_DRAFTS, MOST_NGRAM = 32, 16
DRAFTS, LONGEST, SHORTEST = 8, 4, 2
METHODS = ("ngram",)
_FIELDS = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


@dataclass(frozen=True, slots=True)
class Drafting:
    """Those tokens are proposed that followed the last tokens of a row before."""

    most: int = DRAFTS
    """Drafted tokens of a row in one step."""
    longest: int = LONGEST
    """How many tokens the sequence has that is looked for first."""
    shortest: int = SHORTEST
    """And how many it has if that was not there before."""


def parse_drafting(config: str, algorithm: str, num_draft_tokens: int) -> Drafting | None:
    """What --speculative-config, or --speculative-algorithm and --speculative-num-draft-tokens, ask for; None: nothing. Raises
    ConfigError."""
    if algorithm != "none":
        require(not config, "speculative-config", "left out with --speculative-algorithm", config)
        require(0 <= num_draft_tokens <= MOST_DRAFTS, "speculative-num-draft-tokens", f"at most {MOST_DRAFTS}", num_draft_tokens)
        return Drafting(most=num_draft_tokens or DRAFTS)
    require(not num_draft_tokens, "speculative-num-draft-tokens", "left out without --speculative-algorithm", num_draft_tokens)
    if not config:
        return None
    try:
        given: dict[str, Any] = msgspec.json.decode(config, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ConfigError(f'--speculative-config must be a JSON object such as {{"method": "ngram"}}: {error}') from error
    unknown = ", ".join(sorted(given.keys() - set(_FIELDS)))
    require(not unknown, "speculative-config", f"an object of {', '.join(_FIELDS)}", unknown)
    method = given.get("method")
    require(method in METHODS, "speculative-config", "of method ngram, the only one that there is", method)
    numbers = [given.get(name, default) for name, default in zip(_FIELDS[1:], (DRAFTS, LONGEST, SHORTEST), strict=True)]
    for name, number, most in zip(_FIELDS[1:], numbers, (MOST_DRAFTS, MOST_NGRAM, MOST_NGRAM), strict=True):
        is_valid = type(number) is int and 1 <= number <= most
        require(is_valid, "speculative-config", f"an object whose {name} is between 1 and {most}", number)
    drafting = Drafting(*numbers)
    rule = "an object whose prompt_lookup_min is at most its prompt_lookup_max"
    require(drafting.shortest <= drafting.longest, "speculative-config", rule, drafting.shortest)
    return drafting
