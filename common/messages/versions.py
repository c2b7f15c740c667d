"""The wire versions: what each has added, and so what a peer of an older release understands.

Owns the table. Releases whose versions are neighbours work together, so it leaves out what every neighbour has. Both ends of a
link know each other's version, because each frame names its sender's, and they speak the lower one:

    a field is added      it has a default, and a reader that does not know it ignores it
    a type is added       nobody is sent a message of it, or with it, who does not know it (`Mailbox.send`); where it is needed,
                          an older instance is refused by name before (`Member.check_knows`)
    anything else         breaks the neighbour: `tests/common/test_versions.py` holds all types against the released ones

A detokenizer writes to no instance, so instances never know more of it than that it is a neighbour. Ranks of one instance are of
one release, so what they send each other (`ranks.py`) is not in the table.
"""

from dataclasses import dataclass

import msgspec

from common.messages.base import WIRE_VERSION
from common.messages.tasks import DoTask


@dataclass(frozen=True, slots=True)
class WireVersion:
    """What a version has added to the one before it."""

    words: str
    """For people: what it is for."""
    types: tuple[str, ...] = ()
    """Messages and parts of them, by the names of their classes."""
    fields: tuple[str, ...] = ()
    """Fields of types that were there before, as Type.field."""


VERSIONS = {
    15: WireVersion(
        "An instance that leaves says whether its transfers are proven to have ended, may serve in another role, measures what "
        "the KV adds to a step that its rows hold, and tells log probabilities of chosen tokens and the chunks of a prompt.",
        types=("TakeRole", "RoleKept"),
        fields=(
            *("Goodbye.is_quiet", "Heartbeat.serves_whole", "Generate.incarnation"),
            *("Load.held_token_s", "SamplingParams.logprob_ids", "Counters.tokens_drafted", "Counters.tokens_accepted"),
            *("Times.chunks", "TokenDelta.drafts", "TextDelta.drafts"),
        ),
    ),
}
SINCE = {name: number for number, version in VERSIONS.items() for name in version.types}
OLDEST = WIRE_VERSION - 1
"""What a peer speaks of which nothing has been heard yet."""


def since(message: msgspec.Struct) -> int:
    """The first version that understands this message, or this part of one."""
    carried = since(message.task) if isinstance(message, DoTask) else OLDEST
    return max(SINCE.get(type(message).__name__, OLDEST), carried)
