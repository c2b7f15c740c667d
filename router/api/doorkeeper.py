"""The doorkeeper: what happens around every HTTP request, whatever handles it.

Owns the middleware, and where a request's scope holds what must be closed when it is over. Does not know the routes.
"""

from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import BadRequest
from router.api.errors import response_to
from router.api.guard import Guard
from router.api.request_ids import HEADER, OWNER, REQUEST_ID, id_in, new_id
from router.api.sending import DIRECT_SEND
from router.drain import Door
from router.metrics import RouterMetrics

CLIENT_CLOSED = 499
"""The status counted when no client is left to send one to, as in nginx."""
AT_END = "tandem.at_end"
"""Where a request's scope holds the ExitStack of what must be closed when it is over."""


class Doorkeeper:
    """ASGI middleware: refuses requests without the key that they need, counts responses by route and status, gives each request
    and its response an id, and closes what a handler left in the scope's AT_END, however the request ends and whether or not its
    response was ever sent. While the router drains, each response ends its connection, so that clients connect to another
    router."""

    def __init__(self, app: ASGIApp, door: Door, metrics: RouterMetrics, guard: Guard) -> None:
        self._app = app
        self._door = door
        self._metrics = metrics
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ends = ((b"connection", b"close"),) if self._door.closed else ()
                headers = [*message.get("headers", ()), (HEADER, scope[REQUEST_ID].encode()), *ends]
                message = {**message, "headers": headers}
            await send(message)

        try:
            scope[DIRECT_SEND] = send
            with ExitStack() as scope[AT_END]:
                await self._admit(scope)(scope, receive, watched_send)
        except Exception:
            status = 500  # a bug: the server answers for it
            raise
        finally:
            route = scope.get("route")
            self._metrics.responded("other" if route is None else route.path, status)

    def _admit(self, scope: Scope) -> ASGIApp:
        """Note whose request it is. Returns who answers it."""
        scope[REQUEST_ID] = new_id()
        try:
            scope[REQUEST_ID] = id_in(scope)
            scope[OWNER] = self._guard.admit(scope)
        except BadRequest as error:
            return response_to(error)
        return self._app
