"""A client of a schedule: what it asked for, and what became of it.

Owns that. Judges nothing: `checks` does.
"""

from dataclasses import dataclass

from tests.life.asks import Ask
from tests.life.client import Client
from tests.life.expected import Expected

PAGE_TOKENS = 4


@dataclass(slots=True, eq=False)
class Asked:
    """What a client asked for, and what became of it. client: None until the router has taken it in. gives_up_s: when it stops
    asking. unserved: for some time no instance could have served it. seat: of the router that it asked last."""

    ask: Ask
    expected: tuple[Expected, ...]
    client: Client | None = None
    gives_up_s: float | None = None
    left: bool = False
    given_up: bool = False
    unserved: bool = False
    seat: int = 0

    @property
    def pages(self) -> int:
        """What its largest answer takes in all."""
        return max(-(-(len(choice.prompt) + choice.max_tokens) // PAGE_TOKENS) for choice in self.ask.choices)

    @property
    def over(self) -> bool:
        return self.given_up or (self.client.ended if self.client is not None else self.left)
