"""The progress bar: how many sessions have ended, and live figures beside it.

Owns what is shown. On a terminal only.
"""

import statistics
import sys

from tqdm import tqdm

from bench.serve.driver import Driver

RENEWED_S = 0.25
RECENT = 100
"""Requests whose times to the first token are shown."""


class Progress:
    """A bar of all sessions. is_shown: whether there is one, where stderr is a terminal."""

    def __init__(self, driver: Driver, sessions: int, is_shown: bool) -> None:
        self._driver = driver
        is_off = not (is_shown and sys.stderr.isatty())
        self._bar = tqdm(total=sessions, unit="req", disable=is_off, file=sys.stderr, mininterval=RENEWED_S)
        self.is_off = is_off

    def renew(self) -> None:
        """Show how things stand."""
        driver = self._driver
        tokens = driver.tokens + sum(answer.counted for answer in driver.going.values())
        ttfts_s = [answer.ttft_s for answer in driver.answers[-RECENT:] if answer.counted]
        parts = [f"{driver.open} open", f"{tokens / max(driver.elapsed_s, RENEWED_S):,.0f} tok/s"]
        if ttfts_s:
            parts.append(f"TTFT {1000 * statistics.median(ttfts_s):.0f} ms")
        if driver.failed:
            parts.append(f"{driver.failed} failed")
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
        self._bar.update(driver.ended - self._bar.n)

    def close(self) -> None:
        self._bar.close()
