"""The endpoints: which URLs lead to a handler, what it reads, and the description of all at /openapi.json and on the page /docs.

Owns how a handler becomes an endpoint, the words and the schemas; that a URL refuses what it does not read; and what is said of
endpoints of other servers that this fleet does not have. The schemas of bodies and errors are those of the structs that the
router reads and writes; bodies are read by `router.api.fields`, whose errors name the field and the fix. The page is Swagger UI
from files of the package fastapi-offline: all of it comes from this host, and it reaches no other.

    @Described("POST /pause_generation", "SGLang", "Pause generation")
    async def pause(self, request: Request, asked: PauseFields) -> PauseAnswer:
        '''What the description adds. The body is read before, and the answer is written as JSON.'''
"""

import ast
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, wraps
from hashlib import sha256
from importlib import import_module
from importlib.resources import files
from inspect import getsource
from itertools import pairwise
from types import MethodType
from typing import Any, ClassVar, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from common.errors import BadRequest
from router.api.admission import visit_of
from router.api.bodies import body_of, object_in
from router.api.errors import ErrorBody, MessagesErrorBody, shown
from router.api.fields import NOTHING, Unsupported, read_fields
from router.api.guard import DOCS_PREFIX, EFFECTLESS_METHODS, OPEN_PATHS, NeededKey, key_needed
from router.api.sending import json_response
from router.core import Gateway

KEEPS_MEMORY = (
    "peers write into an instance's KV by its address, and its graphs read the weights by theirs, so no memory is given back "
    "while the fleet runs: give the trainer devices of its own, and use POST /pause_generation or POST /sleep?level=0 to pause"
)
_TRANSFER = (
    "vLLM's own groups (StatelessProcessGroup with PyNccl, or CUDA's handles) are not joined: use POST "
    "/init_weights_update_group, which joins groups of torch.distributed, or POST /update_weights_from_disk"
)
_HANDLES = "pickles and handles of devices are not read, because they can make the reader do anything: "
REFUSED = {
    "/release_memory_occupation": ("tags", KEEPS_MEMORY),
    "/resume_memory_occupation": ("tags", KEEPS_MEMORY),
    "/release_kv_cache_memory": (None, KEEPS_MEMORY),
    "/init_weight_transfer_engine": ("init_info", _TRANSFER),
    "/start_weight_update": (None, _TRANSFER),
    "/update_weights": ("update_info", _TRANSFER),
    "/finish_weight_update": (None, _TRANSFER),
    "/shutdown_weight_transfer_engine": (None, _TRANSFER),
    "/update_weights_from_ipc": ("zmq_handles", f"{_HANDLES}use POST /update_weights_from_tensor with shared_memory"),
    "/load_lora_adapter_from_tensors": (
        "serialized_named_tensors",
        f"{_HANDLES}write the adapter with PEFT's save_pretrained, and use POST /load_lora_adapter with load_inplace",
    ),
}
"""By path: the field that asks for what there is not, None where there is no such field; and why it is refused."""


_NO_HEAD = (
    "checkpoints with a classification head are not served: use POST /v1/score with query, items and label_token_ids, which "
    "gives the probabilities of tokens that name the classes"
)
UNSERVED = {"/classify": ("input", _NO_HEAD), "/v1/classify": ("input", _NO_HEAD)}
"""The same, for those who use a model: they need an API key."""
_TEXT_ONLY = "only text is supported"
_STARTED_SO = "it is a flag of `launch`, and does not change while the fleet runs"
HINTS = {
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"), _TEXT_ONLY),
    **dict.fromkeys(("/v1/assistants", "/v1/threads"), "use POST /v1/responses"),
    "/v1/v1": "the URL has /v1 twice: take it out of the base URL, since the client adds it",
    **dict.fromkeys(
        ("/chat", "/completions", "/responses", "/messages", "/embeddings", "/models", "/batches", "/files"),
        "add /v1 to the base URL",
    ),
    "/v1/moderations": "use POST /v1/score with the tokens that name your classes as label_token_ids",
    "/generative_scoring": "use POST /v1/score",
    "/inference/v1/generate": "use POST /generate with input_ids",
    "/vertex_generate": "use POST /generate",
    **dict.fromkeys(("/v1/chat/completions/render", "/v1/completions/render"), "use POST /tokenize, with messages or prompt"),
    "/api/chat": "use POST /v1/chat/completions",
    "/api/generate": "use POST /v1/completions",
    **dict.fromkeys(("/api/embed", "/api/embeddings"), "use POST /v1/embeddings"),
    **dict.fromkeys(("/api/tags", "/api/show", "/api/ps"), "use GET /v1/models"),
    "/api/version": "use GET /version",
    **dict.fromkeys(("/start_profile", "/stop_profile"), "use POST /cluster/trace?seconds=10, then GET /cluster/trace"),
    **dict.fromkeys(("/parse_function_call", "/separate_reasoning"), "use POST /v1/chat/completions, which does it"),
    **dict.fromkeys(("/open_session", "/close_session"), "requests that begin with the same tokens share their KV without it"),
    **dict.fromkeys(
        tuple(f"/{what}_expert_distribution_record" for what in ("start", "stop", "dump")),
        "which experts are used is not recorded: use POST /cluster/trace for where the time goes",
    ),
    **dict.fromkeys(("/set_internal_state", "/configure_logging", "/slow_down", "/collective_rpc"), _STARTED_SO),
    "/get_internal_state": "use GET /cluster",
    "/scale_elastic_ep": "use POST /cluster/instances",
    "/health_scheduler": "use GET /ready",
    "/reset_mm_cache": "use POST /reset_prefix_cache",
    "/redoc": "use GET /docs",
}
"""By path, what a 404 says of it and of all that is below it."""


def hint_at(path: str) -> str:
    """What a client may use in place of an unknown URL."""
    return next((hint for known, hint in HINTS.items() if f"{path}/".startswith(f"{known}/")), "/docs lists what there is")


def refused_routes() -> list[Route]:
    refused = {**REFUSED, **UNSERVED}.items()
    return [Route(path, _refusing(path, field, why), methods=["POST"]) for path, (field, why) in refused]


def _refusing(path: str, field: str | None, why: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise BadRequest(f"POST {path}{f', {field}' if field else ''}: {why}", field, "unsupported_endpoint")

    return refuse


MOST_BYTES = 1024
"""Longest body that is looked at where none is read."""


class StrictRoute(APIRoute):
    """A route that refuses what it would ignore. Open pages stay as they are: load balancers and monitors add parameters."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = {parameter.alias for parameter in self.dependant.query_params}
        is_open = self.path in OPEN_PATHS
        reads_body = "requestBody" in (self.openapi_extra or {})

        async def handle_strictly(request: Request) -> Response:
            if request.scope["query_string"] and not is_open:
                _require_known(request, known)
            if not reads_body and request.method not in EFFECTLESS_METHODS:
                await _require_no_fields(request)
            return await handle(request)

        return handle_strictly


def _require_known(request: Request, known: Collection[str]) -> None:
    """Raises BadRequest for a query parameter that is unknown, or there twice."""
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        where = f"{shown(name)} in the URL's query"
        if name not in known:
            fix = f"use {' or '.join(sorted(known))}" if known else "leave it out"
            raise BadRequest(f"{where} is not a parameter of {request.url.path}: {fix}", field=name, code="unknown_parameter")
        if name in seen:
            raise BadRequest(f"{where} is there twice: send it once", field=name, code="invalid_value")
        seen.add(name)


async def _require_no_fields(request: Request) -> None:
    """Raises BadRequest for a body that holds more than {}."""
    body = await body_of(request, MOST_BYTES)
    for name in object_in(body) if body.strip() else ():
        message = f"{shown(name)} is not a field of {request.url.path}, which reads no body: leave it out"
        raise BadRequest(message, field=name, code="unknown_parameter")


Handler: TypeAlias = Callable[..., Awaitable[Any]]
S = TypeVar("S", bound=msgspec.Struct)
SCRIPT, STYLE = "swagger-ui-bundle.js", "swagger-ui.css"


def docs_routes() -> list[Route]:
    """The page, and the files that it loads."""
    page = get_swagger_ui_html(
        openapi_url="./openapi.json",
        title="Tandem",
        swagger_js_url=f".{DOCS_PREFIX}/{SCRIPT}",
        swagger_css_url=f".{DOCS_PREFIX}/{STYLE}",
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"validatorUrl": None},
    )
    html = bytes(page.body)
    headers = {"content-security-policy": _policy(html)}

    async def docs(request: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    async def docs_file(request: Request) -> Response:
        return FileResponse(str(files("fastapi_offline") / "static" / request.url.path.rpartition("/")[2]))

    return [Route(DOCS_PREFIX, docs), *(Route(f"{DOCS_PREFIX}/{name}", docs_file) for name in (SCRIPT, STYLE))]


def _policy(html: bytes) -> str:
    """Only what is from here, and no page around it: a page could lead a click to one of its buttons."""
    starter = html.split(b"<script>")[1].split(b"</script>")[0]
    digest = b64encode(sha256(starter).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


ABOUT = """Serves a large language model with prefill and decode on separate machines.

The completions follow the OpenAI API, and messages follow Anthropic's. A field that is not supported is refused by name, never
ignored, unless its value asks for nothing (`null`, `"functions": []`, `"best_of": 1`). So are parameters that a URL does not
read, and a name that an object has twice. Bodies are JSON, not compressed.
"""
ANTHROPIC = "Anthropic"
TAGS = (
    {"name": "OpenAI", "description": "What OpenAI clients use."},
    {"name": ANTHROPIC, "description": "What Anthropic's clients and Claude Code use."},
    {"name": "SGLang", "description": "What SGLang's own clients use beside it."},
    {"name": "vLLM", "description": "What vLLM's clients use beside it."},
    {"name": "Operations", "description": "For monitors, load balancers and people who run the fleet."},
)
_REFUSALS = {
    400: "A field is wrong: `param` names it, `message` says how to fix it.",
    403: "A web page asks, the router has no `--api-keys`, and its `--allow-origin` does not name where the page is from.",
    404: "It is unknown: a model, an instance, or what was asked for.",
    408: "The body did not arrive in time.",
    409: "It cannot be done as things are: `message` says why.",
    413: "The body is longer than `--max-body`.",
    415: "The body is compressed, or the router has no `--api-keys` and the header is not `Content-Type: application/json`.",
    429: "Too many requests are open, or this one would be too late: try again after `Retry-After` seconds.",
    503: "No instance can serve the request now, or the router drains: try again after `Retry-After` seconds.",
    504: "The request took longer than its `timeout`, or than `--request-timeout-s`.",
}
COMPLETION_REFUSALS = (400, 403, 404, 408, 413, 415, 429, 503, 504)
_EVENTS = "text/event-stream"

SECURITY_SCHEMES = {
    NeededKey.API.value: {"type": "http", "scheme": "bearer", "description": "Needed where the router has `--api-keys`."},
    NeededKey.CONTROL.value: {"type": "http", "scheme": "bearer", "description": "Needed where it has `--control-key`."},
}


@dataclass(frozen=True, slots=True)
class Described:
    """What the description says about an endpoint. It marks a handler, whose docstring is added to this. A parameter `asked` of
    the handler gets the body as it was read, and what it returns is sent as JSON, unless it is a response."""

    ways: str
    """Method and path of each URL that leads there, such as `GET /is_paused`, with commas between them."""
    tag: str
    summary: str
    answer: str = "What was asked for."
    """What a success is."""
    answer_type: Any = None
    """Type of the answer's JSON; None: what the handler returns."""
    body: type[msgspec.Struct] | None = None
    """The fields of a body that the handler reads itself."""
    body_type: str = "application/json"
    status: int = 200
    """The status of a success."""
    media_types: tuple[str, ...] = ("application/json",)
    troubles: tuple[tuple[int, str], ...] = ()
    """Further statuses of the route's own, whose bodies have the same shape as its success."""
    refusals: tuple[int, ...] = ()
    """Statuses of errors; none: those of the part of the API, where there is a body."""
    unsupported: Unsupported = NOTHING
    """Fields of the body: see `read_fields`."""
    reader: Callable[[bytes, int], Any] | None = None
    """What reads the body, where it has more to check."""

    def __call__(self, handler: Handler) -> "Endpoint":
        types = get_type_hints(handler)
        asked, given = types.get("asked"), types["return"]
        answer_type = self.answer_type or (None if given is Response else given)
        reader = None if asked is None else self.reader or reader_of(asked, self.unsupported)
        return Endpoint(handler, replace(self, answer_type=answer_type, body=self.body or asked, reader=reader))

    @property
    def _error_type(self) -> type[msgspec.Struct]:
        return MessagesErrorBody if self.tag == ANTHROPIC else ErrorBody

    def route_arguments(self, refusals: tuple[int, ...]) -> dict[str, Any]:
        """The arguments of `FastAPI.add_api_route`. refusals: those of the part of the API."""
        error = {"application/json": {"schema": _schema_of(self._error_type)}}
        shown = {} if self.answer_type is None else {"schema": _schema_of(self.answer_type)}
        content: dict[str, Any] = {name: {} if name == _EVENTS else shown for name in self.media_types}
        responses: dict[int | str, dict[str, Any]] = {self.status: {"description": self.answer, "content": content}}
        responses |= {status: {"description": why, "content": content} for status, why in self.troubles}
        responses |= {
            status: {"description": _REFUSALS[status], "content": error}
            for status in self.refusals or (refusals if self.body else ())
        }
        responses["default"] = {"description": "Any other error has the same shape.", "content": error}
        extra: dict[str, Any] = {}
        if self.body is not None:
            extra["requestBody"] = {"required": True, "content": {self.body_type: {"schema": _schema_of(self.body)}}}
        return {
            "tags": [self.tag],
            "summary": self.summary,
            "status_code": self.status,
            "responses": responses,
            "openapi_extra": extra,
        }

    def components(self) -> dict[str, Any]:
        """The schemas to which the route's own refer."""
        types = [self._error_type, *(one for one in (self.body, self.answer_type) if one is not None)]
        return {name: schema for one in types for name, schema in _described(one)[1].items()}


def reader_of(kind: type[S], unsupported: Unsupported = NOTHING) -> Callable[[bytes, int], S]:
    """Reads the fields of a body, of which an empty one has none. unsupported: see `read_fields`."""
    return lambda body, _: read_fields(object_in(body or b"{}"), kind, unsupported)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a part of the API that URLs lead to."""

    handler: Handler
    described: Described

    def of(self, part: "ApiPart") -> Handler:
        """As this part answers."""
        handle, reader, status = MethodType(self.handler, part), self.described.reader, self.described.status
        if reader is None and get_type_hints(self.handler)["return"] is Response:
            return handle

        @wraps(handle)
        async def respond(*parameters: Any, **named: Any) -> Response:
            answer = await handle(*parameters, **named)
            return answer if isinstance(answer, Response) else json_response(answer, status)

        async def read_first(request: Request) -> Response:
            assert reader is not None
            return await respond(request, await visit_of(request).read(request, reader))

        read_first.__doc__ = handle.__doc__
        return respond if reader is None else read_first


class ApiPart:
    """A part of the HTTP API: its endpoints are the methods that are `Described`. model: the name that clients use."""

    refusals: ClassVar[tuple[int, ...]] = (400, 403, 404, 408, 413, 415, 429, 503)
    """Statuses of errors of endpoints with a body."""
    is_control: ClassVar[bool] = False
    """Whether its endpoints need the control key."""

    def __init__(self, gateway: Gateway, model: str) -> None:
        self._gateway, self._model = gateway, model

    def endpoints(self) -> list[Endpoint]:
        return [made for made in vars(type(self)).values() if isinstance(made, Endpoint)]


def completion(way: str, tag: str, summary: str, body: type[msgspec.Struct], answer_type: Any) -> Described:
    """The answer may be a stream."""
    answer = (
        "The answer. With `stream`, server-sent events, the last of which is `[DONE]` or a typed one; a failure after the "
        "stream has begun is an event too. Comment lines (in messages, `ping`) break long silences, also before the first event."
    )
    media_types = ("application/json", _EVENTS)
    return Described(way, tag, summary, answer, answer_type, body, media_types=media_types, refusals=COMPLETION_REFUSALS)


def numbers(ways: str, tag: str, summary: str, body: type[msgspec.Struct], answer_type: Any) -> Described:
    """The answer is never a stream."""
    return Described(ways, tag, summary, answer_type=answer_type, body=body, refusals=COMPLETION_REFUSALS)


class DescribedApp(FastAPI):
    """A FastAPI application whose description has the router's own schemas. parts: in their order."""

    def __init__(self, parts: Iterable[ApiPart]) -> None:
        super().__init__(
            title="Tandem",
            description=ABOUT,
            openapi_tags=[dict(tag) for tag in TAGS],
            docs_url=None,
            redoc_url=None,
        )
        self.router.routes += [*docs_routes(), *refused_routes()]
        self.router.route_class = StrictRoute
        self._components: dict[str, Any] = {}
        self.control_paths = set(REFUSED)
        """See `key_needed`."""
        self.completion_paths: list[str] = []
        """Where a model answers: what lines of batches may ask."""
        for part in parts:
            for made in part.endpoints():
                self._components |= made.described.components()
                for method, path in map(str.split, made.described.ways.split(", ")):
                    self.control_paths |= {path} if part.is_control else set()
                    if made.described.refusals == COMPLETION_REFUSALS:
                        self.completion_paths.append(path)
                    arguments = made.described.route_arguments(part.refusals)
                    self.add_api_route(path, made.of(part), methods=[method], response_model=None, **arguments)

    def openapi(self) -> dict[str, Any]:
        description = super().openapi()
        description.setdefault("components", {}).setdefault("schemas", {}).update(self._components)
        description["components"]["securitySchemes"] = SECURITY_SCHEMES
        for path, operations in description["paths"].items():
            for operation in operations.values():
                _tell_parameters(operation)
            if (needed := key_needed(path, self.control_paths)) is not NeededKey.NONE:
                schemes = SECURITY_SCHEMES if needed is NeededKey.EITHER else (needed.value,)
                for operation in operations.values():
                    operation["security"] = [*({scheme: []} for scheme in schemes), {}]  # nothing, where the router has no keys
        return description


def _tell_parameters(operation: dict[str, Any]) -> None:
    """What a handler's docstring says of a parameter, at its end and as `name: text`, stands with the parameter. Idempotent."""
    parameters = {parameter["name"]: parameter for parameter in operation.get("parameters", ())}
    if parameters:
        said = re.split(rf"(?<=\s)({'|'.join(parameters)}):\s", operation["description"])
        operation["description"] = said[0].strip()
        for name, text in zip(said[1::2], said[2::2], strict=True):
            parameters[name]["description"] = text.strip()


@cache  # each takes milliseconds, and most routes refer to the same ones
def _described(one: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a type, and those to which it refers by name. What stands under a field describes it."""
    (schema,), components = msgspec.json.schema_components([one], ref_template="#/components/schemas/{name}")
    for struct in _structs_in(one, set()):
        properties = components.get(struct.__name__, {}).get("properties", {})
        for name, encoded in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True):
            said = next((texts[name] for each in struct.__mro__ if name in (texts := _texts_in(each))), "")
            if said and encoded in properties:
                of_type = properties[encoded].get("description", "")
                properties[encoded]["description"] = f"{said} {of_type}".strip()
    return schema, components


def _structs_in(one: Any, seen: set[Any]) -> Iterator[type[msgspec.Struct]]:
    """The structs that a type refers to. seen: types that were looked at."""
    if one in seen:
        return
    seen.add(one)
    made, parts = get_origin(one) or one, [*get_args(one)]
    if isinstance(made, type) and issubclass(made, msgspec.Struct):
        yield made
        parts += get_type_hints(made).values()
    for part in parts:
        yield from _structs_in(part, seen)


def _texts_in(struct: type) -> Mapping[str, str]:
    """What stands under the fields of a class, but those of its bases."""
    own = struct.__module__.partition(".")[0] in ("common", "router")
    return _texts_of(struct.__module__).get(struct.__name__, {}) if own else {}


@cache
def _texts_of(module: str) -> Mapping[str, Mapping[str, str]]:
    """The same for all classes of a module."""
    texts: dict[str, dict[str, str]] = {}
    for made in ast.parse(getsource(import_module(module))).body:
        if isinstance(made, ast.ClassDef):
            of_fields = texts[made.name] = {}
            for pair in pairwise(made.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        of_fields[name] = " ".join(text.split())
    return texts


def _schema_of(described: Any) -> dict[str, Any]:
    return _described(described)[0]
