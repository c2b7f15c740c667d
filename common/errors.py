"""The error tree: each error knows its HTTP status, its OpenAI type and whether trying again helps.

Owns the errors. Errors of other libraries become one of these where they enter. Does not know HTTP servers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C has ended."""


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False


class BadRequest(TandemError):
    """The client must change its request; `field` names what to change."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class NotFound(BadRequest):
    """The request names something that is not here, or is not known."""

    status = 404


class Conflict(BadRequest):
    """It cannot be done as things are."""

    status = 409


class Overloaded(TandemError):
    """A bounded queue is full, or too long: try again after `retry_after_s`."""

    status = 429
    kind = "overloaded_error"
    retryable = True
    retry_after_s = 1

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class NoRoom(Overloaded):
    """A decode instance has had no memory for the request, and has forgotten it: it may be asked again."""

    kind = "no_room_error"


class Unavailable(TandemError):
    """No instance can serve the request now: try again after `retry_after_s`."""

    status = 503
    kind = "unavailable_error"
    retryable = True
    retry_after_s = 2


class Preempted(Unavailable):
    """The instance needs the request's memory for an older one. The request goes on elsewhere, or later."""

    kind = "preempted_error"


class WeightsChanged(Unavailable):
    """The instance computes with other weights now, or will in a moment. The request goes on, and its KV is computed anew."""

    kind = "weights_changed_error"


class DeadlinePassed(TandemError):
    """The request took longer than it may."""

    status = 504
    kind = "timeout_error"


class InstanceFailed(TandemError):
    """An instance could not finish the request."""

    status = 500
    kind = "instance_error"
    retryable = True


class ConfigError(TandemError):
    """A flag, file or combination that cannot work; the message names it and the fix."""


class MeetingFailed(TandemError):
    """The ranks of an instance have not all met: one of them may have ended meanwhile. Another start can succeed."""

    retryable = True


class AddressTaken(ConfigError):
    """Somebody else listens at the address where this process is to listen."""


class MemoryShort(ConfigError):
    """Too little memory is free now. Another start can succeed: what a dead instance held may be given back late."""

    retryable = True


class PeerRefused(TandemError):
    """A peer whose model, dtype, page size, layout or wire version does not match ours."""


class FleetMismatch(PeerRefused, ConfigError):
    """What this instance was started with fits no place in the fleet. Another start ends the same way."""


class WireError(TandemError):
    """A frame that is not a message of this inbox."""


class TransferError(TandemError):
    """The transport's library reported a failure."""


@contextmanager
def needs_file(problem: str) -> Iterator[None]:
    """Within it a file is used that a flag names. problem: what cannot be done where that fails. Raises ConfigError, which adds
    the system's reason."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{problem}: {error.strerror}") from error


def first_line(error: BaseException) -> str:
    """What another library's error says, for a message of one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
