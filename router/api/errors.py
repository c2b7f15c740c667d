"""Errors as the OpenAI API writes them: {"error": {"message", "type", "param", "code"}}, with a status and Retry-After.

Owns the shape, and that of Anthropic's errors (https://platform.claude.com/docs/en/api/errors), and the errors that only HTTP
has. The other errors are in `common.errors`.
"""

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import BadRequest, Overloaded, TandemError, Unavailable
from common.messages import Failed

MAX_SHOWN_CHARS = 64
RETRY_AFTER_S = {Overloaded.status: Overloaded.retry_after_s, Unavailable.status: Unavailable.retry_after_s}


class BodyTooLarge(BadRequest):
    """The HTTP body is longer than --max-body."""

    status = 413


class BodyTooSlow(BadRequest):
    """The HTTP body did not arrive in time."""

    status = 408


class UnsupportedBody(BadRequest):
    """The body's type or encoding is not one that is read here."""

    status = 415


class Unauthorized(BadRequest):
    """The request has no key, or not the right one. As at OpenAI."""

    status = 401

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


class ContextExceeded(BadRequest):
    """The prompt, or prompt and answer together, are longer than the context. The first words are those of OpenAI and vLLM: some
    clients know the error by them."""

    CODE = "context_length_exceeded"

    def __init__(self, context_tokens: int, problem: str, field: str) -> None:
        message = f"This model's maximum context length is {context_tokens} tokens: {problem}"
        super().__init__(message, field=field, code=self.CODE)


class ErrorDetail(msgspec.Struct, frozen=True):
    """type: the kind of error. param: the field that is wrong. code: of the problem, for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """What every refused request gets."""

    error: ErrorDetail


MESSAGES_PATH = "/v1/messages"
"""What the paths of the Messages API begin with."""
VISIT = "tandem.visit"
"""Where a request's scope holds its `Visit`."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""What Anthropic calls the errors with these statuses."""


class MessagesErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """What a refused request for a message gets."""

    error: ErrorDetail
    request_id: str


def messages_error(status: int, detail: ErrorDetail, request_id: str) -> MessagesErrorBody:
    """The error as Anthropic writes it. Some clients know by its first words that a conversation must become shorter."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    begin = "prompt is too long: " if detail.code == ContextExceeded.CODE else ""
    return MessagesErrorBody(replace(detail, type=kind, message=begin + detail.message), request_id)


class ErrorResponse(Response):
    """An error, written as the API writes it to which the path belongs."""

    def __init__(self, status: int, detail: ErrorDetail, headers: dict[str, str]) -> None:
        super().__init__(error_json(detail), status, headers, media_type="application/json")
        self._detail = detail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(MESSAGES_PATH):
            self.body = msgspec.json.encode(messages_error(self.status_code, self._detail, scope[VISIT].id))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def shown(text: str) -> str:
    """What an error repeats of a client's text."""
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def require_one_of(name: str, value: str, options: Iterable[str], code: str | None = "invalid_value") -> None:
    """Raises BadRequest for another value of a URL's parameter."""
    if value not in options:
        raise BadRequest(f"{name} must be {' or '.join(filter(None, options))}, is {shown(value)!r}", name, code)


def no_room(prompt_field: str, prompt_tokens: int, most: int | None = None) -> str:
    """What is wrong with a prompt of so many tokens. most: what an answer leaves of the context; None: none is asked for."""
    if most is None:
        return f"{prompt_field} has {prompt_tokens}, so shorten it"
    return f"{prompt_field} has {prompt_tokens}, and an answer must fit too, so shorten it to at most {most}"


def error_json(detail: ErrorDetail) -> bytes:
    return msgspec.json.encode(ErrorBody(detail))


def detail_of_failure(failed: Failed) -> ErrorDetail:
    return ErrorDetail(failed.message, failed.kind, failed.field)


def error_response(status: int, detail: ErrorDetail, retry_after_s: int | None = None) -> Response:
    """retry_after_s: None for what the status stands for."""
    wait_s = RETRY_AFTER_S.get(status) if retry_after_s is None else retry_after_s
    headers = {} if wait_s is None else {"retry-after": str(wait_s)}
    if status == Unauthorized.status:
        headers["www-authenticate"] = "Bearer"
    return ErrorResponse(status, detail, headers)


def response_to(error: TandemError) -> Response:
    """The response to an error that was raised before the answer started."""
    if isinstance(error, BadRequest):
        return error_response(error.status, ErrorDetail(str(error), error.kind, error.field, error.code))
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
    return error_response(error.status, ErrorDetail(str(error), error.kind), retry_after_s)


def response_to_failure(failed: Failed) -> Response:
    """The response to a request that failed before its first token. A status that is not an error's becomes 500."""
    return error_response(failed.status if 400 <= failed.status < 600 else TandemError.status, detail_of_failure(failed))
