"""python -m tests.soak.requests: thousands of requests made from the served description, to a router with a fake fleet.

Each must get a proper answer in time, without a 5xx but for a `timeout` of its own, and nothing is left open afterwards. Knows
the description and HTTP. Does not know what requests do.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.core.result import Ok

from common.config import RouterConfig
from common.text.embedding import EmbeddingMode
from tests.router.fakes import MODEL, EchoFleet, Site

ANSWER_S = 30.0
"""No request takes this long: the fake fleet answers at once."""
PATIENT = RouterConfig(heartbeat_s=1000.0, dead_after_s=100_000.0)
"""Between requests nobody turns the loop, and nobody is to be taken for dead meanwhile."""
SETTLE_S = 3.0
"""How long what is computed without a client may go on at the end."""
FILES = "/v1/files"
OTHERS = 20
"""Requests to each operation without a body."""
SHORT_S = 1.0
"""A request with such a short `timeout` may end with it. One with a longer time must have its answer before."""


class Broken(AssertionError):
    """An answer that no request may get."""


def with_model(page: dict[str, Any]) -> dict[str, Any]:
    """The description, with the model's name as the only one: all other names are 404. Events of the fleet have no end."""
    del page["paths"]["/cluster/events"]
    for schema in page["components"]["schemas"].values():
        if "model" in schema.get("properties", {}) and "created" not in schema["properties"]:
            schema["properties"]["model"] = {"const": MODEL}
    return page


def narrowed(page: dict[str, Any], file: str) -> dict[str, Any]:
    """The same, for what the fake fleet's model can serve: most requests get an answer. file: the id of a stored one."""
    ids = {"type": "array", "items": {"type": "integer", "maximum": 999, "minimum": 0}, "minItems": 1, "maxItems": 50}
    text = {"type": "string", "minLength": 1, "maxLength": 50, "pattern": "^[ -~]+$"}
    prompts = {"anyOf": [text, ids, {"type": "array", "items": text, "minItems": 1, "maxItems": 3}]}
    message = {"type": "object", "properties": {"role": {"const": "user"}, "content": text}, "required": ["role", "content"]}
    limit = {"type": "integer", "minimum": 1, "maximum": 20}
    nothing: dict[str, Any] = {"const": None}
    schemas = page["components"]["schemas"]
    for name in ("ChatFields", "CompletionFields"):
        fields = schemas[name]["properties"]
        fields |= {"max_tokens": limit, "min_tokens": {"const": 0}, "stop_token_ids": ids, "timeout": nothing, "stop": text}
        fields |= dict.fromkeys([field for field in fields if field.startswith(("guided_", "structured"))], nothing)
        fields |= dict.fromkeys(("response_format", "json_schema", "regex", "ebnf", "stream_options", "prompt_logprobs"), nothing)
        fields["logit_bias"] = {"type": "object", "properties": {"7": {"type": "number", "minimum": -100, "maximum": 100}}}
        fields["logit_bias"]["additionalProperties"] = False
    schemas["CompletionFields"]["properties"]["prompt"] = prompts
    chat = schemas["ChatFields"]["properties"]
    chat |= {"messages": {"type": "array", "items": message, "minItems": 1, "maxItems": 2}, "logprobs": {"const": True}}
    chat |= {
        "max_completion_tokens": nothing,
        "tools": {"const": []},
        "tool_choice": nothing,
        "chat_template_kwargs": {"const": {}},
    }
    chat |= {"continue_final_message": {"const": False}, "reasoning_effort": nothing}
    generate = schemas["GenerateFields"]["properties"]
    generate |= {"text": text, "input_ids": nothing, "rid": {"type": "string", "pattern": "^[a-z]{1,8}$"}}
    parameters = schemas["GenerateParameters"]["properties"]
    parameters |= {"max_new_tokens": limit, "min_new_tokens": {"const": 0}, "stop_token_ids": ids, "logit_bias": {"const": {}}}
    parameters |= dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), nothing)
    embeddings, responses = schemas["EmbeddingFields"]["properties"], schemas["ResponseFields"]["properties"]
    embeddings |= {"model": {"const": MODEL}, "input": prompts, "dimensions": nothing, "timeout": nothing}
    responses |= {"input": text, "max_output_tokens": limit, "tools": {"const": []}, "chat_template_kwargs": {"const": {}}}
    responses |= dict.fromkeys(("tool_choice", "text", "reasoning", "timeout"), nothing)
    schemas["DetokenizeFields"]["properties"]["tokens"] = ids
    dull = {"tools": {"const": []}, "tool_choice": nothing, "chat_template_kwargs": {"const": {}}, "timeout": nothing}
    for name in ("MessageFields", "CountFields"):
        fields = schemas[name]["properties"]
        fields |= {"messages": {"type": "array", "items": message, "minItems": 1, "maxItems": 2}, "max_tokens": limit} | dull
        fields |= dict.fromkeys(("thinking", "output_config", "context_management", "container", "service_tier"), nothing)
        fields["system"] = text
    responses |= {
        "store": {"type": "boolean"},
        "background": {"const": False},
        "previous_response_id": nothing,
        "include": nothing,
    }
    texts = {"type": "array", "items": text, "minItems": 1, "maxItems": 3}
    schemas["RerankFields"]["properties"] |= {"query": text, "documents": texts, "instruction": nothing}
    schemas["ScoreFields"]["properties"] |= {
        **dict.fromkeys(("text_1", "text_2"), nothing),
        "query": text,
        "items": texts,
        "label_token_ids": ids,
        "timeout": nothing,
    }
    schemas["EncodeFields"]["properties"] |= {"text": text, "input_ids": nothing, "rid": nothing, "sampling_params": nothing}
    schemas["BatchFields"]["properties"] |= {"input_file_id": {"const": file}, "endpoint": {"const": "/v1/completions"}}
    return page


def with_ids(page: dict[str, Any], stored: Mapping[str, str]) -> dict[str, Any]:
    """The same, where what is stored is asked for by its id. stored: an id by path."""
    for path, operations in page["paths"].items():
        for one, id in ((one, id) for one in operations.values() for below, id in stored.items() if f"{below}/{{id}}" in path):
            one["parameters"] = [each | {"schema": {"const": id}} if each["name"] == "id" else each for each in one["parameters"]]
    return page


def own_timeout(content: bytes) -> float | None:
    """The seconds that the body of a request allows for it."""
    fields = json.loads(content or b"null")
    timeout = fields.get("timeout") if isinstance(fields, dict) else None
    return timeout if isinstance(timeout, int | float) else None


class Sender:
    """A site in a loop of its own, which turns only while a request is answered."""

    def __init__(self) -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()
        self._loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory()
        self._site = self._run(self._enter())

    def page(self) -> dict[str, Any]:
        response = self._run(self._request("GET", "/openapi.json", {}))
        return with_model(json.loads(response[1]))

    def fill(self) -> dict[str, str]:
        """Store a file for batches, a batch and a response. Returns their ids by path."""
        row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "ab"}}
        form = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", json.dumps(row))}}
        ids: dict[str, str] = {}

        def store(path: str, arguments: dict[str, Any]) -> None:
            ids[path] = json.loads(self._run(self._request("POST", path, arguments))[1])["id"]

        store(FILES, {**form, "headers": {"Authorization": "Bearer none"}})
        store("/v1/batches", {"json": {"input_file_id": ids[FILES], "endpoint": "/v1/completions", "completion_window": "24h"}})
        store("/v1/responses", {"json": {"model": MODEL, "input": "ab", "background": True, "stream": False}})
        return ids

    def send(self, method: str, path: str, arguments: dict[str, Any], label: str) -> None:
        """Raises Broken, TimeoutError."""
        began_s = time.monotonic()
        status, body = self._run(self._request(method, path, arguments))
        self.statuses[label, status] += 1
        allowed_s = own_timeout(arguments.get("content", b""))
        in_time = status == 504 and allowed_s is not None and allowed_s <= min(SHORT_S, time.monotonic() - began_s)
        if status >= 500 and not in_time:
            raise Broken(f"{method} {path} with timeout {allowed_s} got {status}: {body[:500]!r}")
        if status >= 400 and "error" not in json.loads(body) and label not in ("GET /health", "GET /ready"):
            raise Broken(f"{method} {path} got {status} without an error object: {body[:500]!r}")

    def close(self) -> list[str]:
        """Returns what is left open."""
        core = self._site.core
        self._run(asyncio.sleep(SETTLE_S))  # batches and responses in the background end
        store = self._site.api.stored_responses.store
        held = "SELECT count(*) FROM objects WHERE holder > ''"
        (in_work,) = self._run(store.do(lambda: store._db.execute(held).fetchone()))
        open_now = {"requests": len(core.requests), "answers": len(core.requests.clients), "places": len(core.requests.places)}
        open_now |= {"places at HTTP": len(self._site.api.admission.places), "stored objects in work": in_work}
        self._run(self._site.__aexit__(None, None, None))
        self._loop.close()
        self._folder.cleanup()
        return [f"{count} {what}" for what, count in open_now.items() if count]

    async def _enter(self) -> Site:
        config = replace(PATIENT, store=f"{self._folder.name}/store")
        return await Site(EchoFleet(), config, embedding=EmbeddingMode("last", normalize=True, size=2)).__aenter__()

    async def _request(self, method: str, path: str, arguments: dict[str, Any]) -> tuple[int, bytes]:
        async with asyncio.timeout(ANSWER_S), self._site.client() as client:
            kind = {} if "files" in arguments else {"Content-Type": "application/json"}
            headers = kind | arguments.pop("headers", {})
            response = await client.request(method, path, headers=headers, **arguments)
            return response.status_code, response.content

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)


def send_all(requests: int, first_seed: int = 0, others: int = OTHERS) -> tuple[Counter[tuple[str, int]], list[str]]:
    """So many requests, as many to each operation that takes a body, and `others` to each other one. Half of them are made from
    the description as it is, half from one that is narrowed to what can be served. Returns how often each operation got each
    status, and what is left open. Raises Broken, TimeoutError."""
    sender = Sender()
    stored = sender.fill()
    for page in (sender.page(), with_ids(narrowed(sender.page(), stored[FILES]), stored)):
        schema = schemathesis.openapi.from_dict(page)
        operations: list[Any] = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
        operations.sort(key=lambda each: each.method == "delete")  # what others ask for goes last
        bodies = sum(bool(len(operation.body)) for operation in operations)
        for operation in operations:
            share = max(1, requests // bodies // 2) if len(operation.body) else others
            _sending(sender, operation, share, first_seed)()
    return sender.statuses, sender.close()


def _sending(sender: Sender, operation: Any, requests: int, first_seed: int) -> Callable[[], None]:
    label = f"{operation.method.upper()} {operation.path}"

    @seed(first_seed)
    @settings(
        max_examples=requests,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        arguments: dict[str, Any] = {"params": case.query or None}
        if isinstance(case.body, dict | list | str | int | float | bool) or case.body is None:
            arguments["content"] = json.dumps(case.body).encode()
        headers = {name: value for name, value in (case.headers or {}).items() if value.isascii() and value.isprintable()}
        path = case.formatted_path
        sender.send(case.method, path, arguments | {"headers": headers}, label)

    run: Callable[[], None] = send
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description="send requests that are made from /openapi.json")
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    statuses, left = send_all(arguments.requests, arguments.seed)
    lines = [f"{count:6} × {status}  {label}\n" for (label, status), count in sorted(statuses.items())]
    sys.stdout.writelines([*lines, f"left open: {', '.join(left) or 'nothing'}\n"])
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
