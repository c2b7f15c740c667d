"""How `launch local` divides the cores of a host without GPUs among its instances.

Owns the flags and the arithmetic. What instances lend each other while they serve is `engine/cpu/lent_cores.py`.
"""

from dataclasses import dataclass

from common.options import Switch, option, parse_numbers, require

DECODE_TOKEN = 2.0
"""What an answer's token costs, in tokens of prompts: about this much in batches of 8 to 16 rows, where reading the weights
counts as much as computing with them (docs/measurements/cpu.md)."""


@dataclass(frozen=True, kw_only=True)
class CoresConfig:
    """How the cores of a host without GPUs are divided."""

    workload: str = option(
        "512,128",
        "tokens of a typical prompt and of its answer: prefill and decode instances get cores by the work that each makes",
    )
    lend_cores: Switch = option(
        "on", "on: while an instance has nothing to compute, others on this host use its cores too; off: each uses its own only"
    )

    def __post_init__(self) -> None:
        lengths = parse_numbers(self.workload, "workload", int)
        require(len(lengths) == 2 and min(lengths) >= 1, "workload", "two numbers of tokens, such as 512,128", self.workload)

    @property
    def prefill_share(self) -> float:
        """Of the work."""
        prompt, answer = parse_numbers(self.workload, "workload", int)
        return prompt / (prompt + DECODE_TOKEN * answer)


def divide_by_work(cores: int, prefill: int, decode: int, prefill_share: float) -> tuple[int, int]:
    """Cores of each prefill and of each decode instance: at least one each, and together no more than there are where possible.
    Of all divisions it is the one whose slower role takes the least time.

    prefill, decode: how many instances. prefill_share: of the work, where there are both.
    """
    if not prefill:
        return 0, max(1, cores // decode)

    def slower_role(of_decode: int) -> float:
        """How long the role takes that takes longer."""
        return max(prefill_share / (prefill * left_for_prefill(of_decode)), (1 - prefill_share) / (decode * of_decode))

    def left_for_prefill(of_decode: int) -> int:
        return max(1, (cores - of_decode * decode) // prefill)

    of_decode = min(range(1, max(1, (cores - prefill) // decode) + 1), key=slower_role)
    return left_for_prefill(of_decode), of_decode
