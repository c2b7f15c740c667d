"""Calls to a router's API and checks of what it answers: for tests over HTTP."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

from common.access import Access, KeyRing, read_access
from common.config import AccessConfig
from common.messages import Generate
from tests.router.fakes import MODEL, EchoFleet, Site, listening

JSON = {"content-type": "application/json"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
THOUGHT = "<think>\nwhich city?\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
"""What models write that think, and call a tool."""
ALICE, BOB, CONTROL = (f"{name}-0123456789abcdef" for name in ("alice", "bob", "control"))
"""Keys: two of the API, and the one of control."""


def keyed(*origins: str) -> Access:
    return Access(KeyRing({ALICE: "alice", BOB: "bob"}), KeyRing({CONTROL: "control"}), origins=origins)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def certified(folder: Path) -> Access:
    """TLS with a certificate for this host, which is in the folder as `cert`."""
    cert, key = str(folder / "cert"), str(folder / "key")
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=x"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*new, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return read_access(AccessConfig(tls_cert=cert, tls_key=key))


def openai_to(port: int, key: str = "none") -> openai.AsyncOpenAI:
    """A client of the router at this port. To read the certificates of the world would take 50 ms each time."""
    url, carrier = f"http://127.0.0.1:{port}/v1", openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=20, http_client=carrier)


@asynccontextmanager
async def openai_client(fleet: EchoFleet | None = None, **site_options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        Site(fleet, **site_options) as site,
        listening(site) as port,
        openai_to(port) as client,
    ):
        yield client


@asynccontextmanager
async def anthropic_client(fleet: EchoFleet | None = None, **site_options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        Site(fleet, **site_options) as site,
        listening(site) as port,
        anthropic.DefaultAsyncHttpxClient(verify=False) as carrier,
        anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0, timeout=20, http_client=carrier
        ) as client,
    ):
        yield client


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 5} | fields


message = chat
"""The body of POST /v1/messages is the same."""


def completion(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 5} | fields


def prompt(text: Any = "hello", tokens: int = 3, **fields: Any) -> dict[str, Any]:
    """The body of POST /generate."""
    return {"text": text, "sampling_params": {"max_new_tokens": tokens}} | fields


def usage(prompt: int, answer: int, cached: int = 0) -> dict[str, Any]:
    """The usage of an answer of the OpenAI API."""
    counts = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


async def until(holds: Callable[[], object]) -> None:
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


async def post(site: Site, path: str, body: Any) -> httpx.Response:
    async with site.client() as client:
        return await client.post(path, json=body)


async def get(site: Site, path: str) -> httpx.Response:
    async with site.client() as client:
        return await client.get(path)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream that ends with [DONE]."""
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def sent_to_fleet(site: Site) -> list[Generate]:
    return [message for _, message in site.fleet.sent if isinstance(message, Generate)]


def assert_error(response: httpx.Response, status: int, kind: str, param: str | None) -> str:
    """The response is one OpenAI error; returns its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == (kind, param)
    message: str = error["message"]
    return message


def metric(text: str, name: str) -> float:
    lines: Sequence[str] = [line for line in text.splitlines() if line.startswith(name + " ")]
    assert len(lines) == 1, f"{name} is there {len(lines)} times"
    return float(lines[0].split()[-1])
