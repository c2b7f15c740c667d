"""The progress bar: how many sessions have ended, and live figures beside it.

Owns what is shown. On a terminal only.
"""

import sys

from tqdm import tqdm

from bench.serve.answers import Answer
from bench.serve.driver import Driver

RENEWED_S = 0.25


class Progress:
    """A bar of all sessions. is_shown: whether there is one, where stderr is a terminal."""

    def __init__(self, driver: Driver, sessions: int, is_shown: bool) -> None:
        self._driver = driver
        is_off = not (is_shown and sys.stderr.isatty())
        self._bar = tqdm(total=sessions, unit="req", disable=is_off, file=sys.stderr, mininterval=RENEWED_S)
        self.is_off = is_off

    def renew(self) -> None:
        """Show how things stand."""
        answers = self._driver.answers
        begun = [answer for answer in answers[-100:] if answer.counted]
        failed = sum(bool(answer.error) for answer in answers)
        parts = [f"{self._driver.open} open", f"{_tokens_per_s(answers, self._driver.elapsed_s):,.0f} tok/s"]
        if begun:
            parts.append(f"TTFT {1000 * sum(answer.ttft_s for answer in begun) / len(begun):.0f} ms")
        if failed:
            parts.append(f"{failed} failed")
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
        self._bar.update(self._driver.ended - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def _tokens_per_s(answers: list[Answer], elapsed_s: float) -> float:
    return sum(answer.counted for answer in answers) / elapsed_s if elapsed_s > 0 else 0.0
