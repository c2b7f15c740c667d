"""The description of the API: every route is in it, with its bodies and its errors."""

import re
from typing import Any

import msgspec
import pytest
from fastapi.routing import APIRoute

from router.api.errors import ErrorBody
from tests.router.calls import get
from tests.router.fakes import Site

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def described() -> tuple[Site, dict[str, Any]]:
    async with Site() as site:
        response = await get(site, "/openapi.json")
    assert response.status_code == 200
    return site, response.json()


async def test_every_route_is_described_with_its_answers_and_errors(described: tuple[Site, dict[str, Any]]) -> None:
    site, page = described
    routes = [route for route in site.app.routes if isinstance(route, APIRoute)]
    assert len(routes) == sum(len(methods) for methods in page["paths"].values()) > 26
    tags = {tag["name"] for tag in page["tags"]}
    for route in routes:
        (operation,) = [page["paths"][route.path_format][method.lower()] for method in route.methods or ()]
        assert operation["summary"] and operation["description"] and set(operation["tags"]) <= tags
        successes = [status for status in operation["responses"] if status.startswith("2")]
        assert len(successes) == 1 and operation["responses"][successes[0]]["description"]
        shape = "MessagesErrorBody" if route.path.startswith("/v1/messages") else "ErrorBody"
        error = {"schema": {"$ref": f"#/components/schemas/{shape}"}}
        assert operation["responses"]["default"]["content"]["application/json"] == error


def _says_what_it_is(schema: dict[str, Any]) -> bool:
    return "description" in schema or any("description" in part for part in schema.get("anyOf", ()))


BODIES = {
    "/v1/chat/completions": "ChatFields",
    "/v1/completions": "CompletionFields",
    "/v1/responses, /v1/responses/input_tokens": "ResponseFields",
    "/v1/messages": "MessageFields",
    "/v1/messages/count_tokens": "CountFields",
    "/v1/embeddings, /pooling": "EmbeddingFields",
    "/v1/files": "UploadFields",
    "/v1/batches": "BatchFields",
    "/generate": "GenerateFields",
    "/abort_request": "AbortFields",
    "/abort_requests": "AbortManyFields",
    "/update_weights_from_disk": "DiskFields",
    "/update_weights_from_tensor": "TensorFields",
    "/init_weights_update_group": "InitGroupFields",
    "/update_weights_from_distributed": "GroupBucketFields",
    "/destroy_weights_update_group": "DestroyGroupFields",
    "/get_weights_by_name": "ReadWeightFields",
    "/update_weight_version": "VersionFields",
    "/pause_generation": "PauseFields",
    "/continue_generation": "ContinueFields",
    "/load_lora_adapter, /v1/load_lora_adapter": "LoadFields",
    "/unload_lora_adapter, /v1/unload_lora_adapter": "UnloadFields",
    "/cluster/instances": "StartFields",
    "/cluster/decisions": "ScalingDecision",
    "/cluster/{instance}/role": "RoleFields",
    "/pd_role_switch": "SwitchFields",
    "/tokenize, /v1/tokenize": "TokenizeFields",
    "/detokenize, /v1/detokenize": "DetokenizeFields",
    "/invocations": "InvocationFields",
    "/encode": "EncodeFields",
    "/v1/rerank, /rerank, /v2/rerank": "RerankFields",
    "/v1/score, /score": "ScoreFields",
}


async def test_the_body_of_every_request_is_described_field_by_field(described: tuple[Site, dict[str, Any]]) -> None:
    site, page = described
    bodies = [made.described.body for part in site.api.parts for made in part.endpoints()]
    fields = {body.__name__: list(body.__struct_encode_fields__) for body in bodies if body is not None}
    named = {path: body for paths, body in BODIES.items() for path in paths.split(", ")}
    assert named.keys() == {path for path, ways in page["paths"].items() if any("requestBody" in way for way in ways.values())}
    for path, body in named.items():
        operation = page["paths"][path]["post"]
        (content,) = operation["requestBody"]["content"].values()
        assert content["schema"] == {"$ref": f"#/components/schemas/{body}"}
        assert list(page["components"]["schemas"][body]["properties"]) == fields[body]
        assert {"400", "413"} <= operation["responses"].keys()


async def test_every_field_of_every_body_has_a_description(described: tuple[Site, dict[str, Any]]) -> None:
    """Also the fields of the objects within: what a body refers to."""
    _, page = described
    schemas = page["components"]["schemas"]
    for path, item in page["paths"].items():
        for operation in item.values():
            if "requestBody" in operation:
                (content,) = operation["requestBody"]["content"].values()
                unseen = [content["schema"]["$ref"].rpartition("/")[2]]
                while unseen:
                    name = unseen.pop()
                    described_here = schemas[name].get("properties", {})
                    marks = ("type", "role")  # each has one value, which tells the objects of a choice apart
                    bare = [field for field, one in described_here.items() if field not in marks and not _says_what_it_is(one)]
                    assert not bare, f"{name} of {path}: {bare}"
                    words = msgspec.json.encode(described_here).decode().split('"')
                    unseen += [word.rpartition("/")[2] for word in words if word.startswith("#/")]


async def test_limits_of_fields_are_in_the_description(described: tuple[Site, dict[str, Any]]) -> None:
    _, page = described
    fields = page["components"]["schemas"]["CompletionFields"]["properties"]
    assert (fields["temperature"]["minimum"], fields["temperature"]["maximum"]) == (0, 2)
    assert fields["n"]["maximum"] == 16 and fields["bad_words"]["maxItems"] == 64
    assert fields["logprobs"]["anyOf"][0] == {"type": "integer", "minimum": 0, "maximum": 20}


async def test_whatever_the_description_refers_to_is_in_it(described: tuple[Site, dict[str, Any]]) -> None:
    _, page = described
    schemas = page["components"]["schemas"]
    assert list(schemas[ErrorBody.__name__]["properties"]) == ["error"]
    references = [word for word in msgspec.json.encode(page).decode().split('"') if word.startswith("#/")]
    assert references and {reference.rpartition("/")[2] for reference in references} <= schemas.keys()


async def test_people_can_read_it_at_docs_without_the_internet(site: Site) -> None:
    page = await get(site, "/docs")
    assert page.status_code == 200 and "/openapi.json" in page.text and "http" not in page.text
    files = re.findall(r'(?:src|href)="\./(docs/[^"]+)"', page.text)
    assert len(files) == 2
    for name in files:
        response = await get(site, f"/{name}")
        assert response.status_code == 200 and len(response.content) > 100_000
    assert (await get(site, "/docs/favicon.png")).status_code == 404
    rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'" and rules["connect-src"] == "'self'"
