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
HEAD_TAIL, HEAD_WINDOW = 64, 512
"""How many of a row's last tokens a draft head begins with, and how many it attends to at most before it begins anew. What the
served model computed of the tail is computed once more for it, unless the row's own steps did."""
_FIELDS = {
    "ngram": ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("method", "num_speculative_tokens", "model"),
    "eagle3": ("method", "num_speculative_tokens", "model"),
}
"""What an object may have, by its method."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """Those tokens are proposed that followed the last tokens of a row before, or those of a draft model or head."""

    most: int = DRAFTS
    """Drafted tokens of a row in one step."""
    longest: int = LONGEST
    """How many tokens the sequence has that is looked for first."""
    shortest: int = SHORTEST
    """And how many it has if that was not there before."""
    model: str = ""
    """As `--model`: the model that proposes tokens in place of such sequences; "": none does."""
    is_head: bool = False
    """That is an EAGLE-3 head (Li et al. 2025), which reads hidden states of the served model."""


def parse_drafting(config: str, algorithm: str, num_draft_tokens: int, draft_model: str) -> Drafting | None:
    """What --speculative-config asks for, or the flags with SGLang's names: --speculative-algorithm,
    --speculative-num-draft-tokens and --speculative-draft-model-path; None: nothing. Raises ConfigError."""
    if algorithm != "none":
        require(not config, "speculative-config", "left out with --speculative-algorithm", config)
        require(
            0 <= num_draft_tokens <= MOST_DRAFTS, "speculative-num-draft-tokens", f"from 0 to {MOST_DRAFTS}", num_draft_tokens
        )
        is_needed = algorithm != "NGRAM"
        rule = f"given with --speculative-algorithm {algorithm}" if is_needed else "left out without a draft model"
        require(bool(draft_model) == is_needed, "speculative-draft-model-path", rule, draft_model)
        return Drafting(most=num_draft_tokens or DRAFTS, model=draft_model, is_head=algorithm == "EAGLE3")
    for flag, value in (("speculative-num-draft-tokens", num_draft_tokens), ("speculative-draft-model-path", draft_model)):
        require(not value, flag, "left out without --speculative-algorithm", value)
    if not config:
        return None
    try:
        given: dict[str, Any] = msgspec.json.decode(config, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ConfigError(f'--speculative-config must be a JSON object such as {{"method": "ngram"}}: {error}') from error
    method = given.get("method", "draft_model" if "model" in given else None)
    is_known = isinstance(method, str) and method in _FIELDS
    require(is_known, "speculative-config", f"an object whose method is one of {', '.join(_FIELDS)}", method)
    fields = _FIELDS[str(method)]
    unknown = ", ".join(sorted(given.keys() - set(fields)))
    require(not unknown, "speculative-config", f"an object of {', '.join(fields)}", unknown)
    counts = (("num_speculative_tokens", DRAFTS), ("prompt_lookup_max", LONGEST), ("prompt_lookup_min", SHORTEST))
    numbers = [given.get(name, default) for name, default in counts]
    for (name, _), number, most in zip(counts, numbers, (MOST_DRAFTS, MOST_NGRAM, MOST_NGRAM), strict=True):
        is_valid = type(number) is int and 1 <= number <= most
        require(is_valid, "speculative-config", f"an object whose {name} is between 1 and {most}", number)
    model = given.get("model", "")
    is_model = isinstance(model, str) and bool(model) == ("model" in fields)
    require(is_model, "speculative-config", "an object whose model is a folder or a name, as --model", model)
    drafting = Drafting(numbers[0], numbers[1], numbers[2], model, method == "eagle3")
    rule = "an object whose prompt_lookup_min is at most its prompt_lookup_max"
    require(drafting.shortest <= drafting.longest, "speculative-config", rule, drafting.shortest)
    return drafting
