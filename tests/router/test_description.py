"""The description of the API: every route is in it, with its bodies and its errors."""

import re
from typing import Any

import msgspec
import pytest
from fastapi.routing import APIRoute

from router.api.app import InvocationFields
from router.api.batches import BatchFields
from router.api.chat import ChatFields
from router.api.completions import CompletionFields
from router.api.embeddings import EmbeddingFields, EncodeFields
from router.api.errors import ErrorBody
from router.api.files import UploadFields
from router.api.instances import LoadFields, RoleFields, StartFields, SwitchFields, UnloadFields
from router.api.messages import CountFields, MessageFields
from router.api.responses import ResponseFields
from router.api.routes import DetokenizeFields, TokenizeFields
from router.api.scoring import RerankFields, ScoreFields
from router.api.sglang import AbortFields, GenerateFields
from router.api.trainers import AbortManyFields
from router.api.weights import (
    ContinueFields,
    DestroyGroupFields,
    DiskFields,
    GroupBucketFields,
    InitGroupFields,
    PauseFields,
    ReadWeightFields,
    TensorFields,
    VersionFields,
)
from router.scaling import ScalingDecision
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
    "/v1/chat/completions": ChatFields,
    "/v1/completions": CompletionFields,
    "/v1/responses": ResponseFields,
    "/v1/messages": MessageFields,
    "/v1/messages/count_tokens": CountFields,
    "/v1/embeddings": EmbeddingFields,
    "/v1/files": UploadFields,
    "/v1/batches": BatchFields,
    "/generate": GenerateFields,
    "/abort_request": AbortFields,
    "/update_weights_from_disk": DiskFields,
    "/update_weights_from_tensor": TensorFields,
    "/init_weights_update_group": InitGroupFields,
    "/update_weights_from_distributed": GroupBucketFields,
    "/destroy_weights_update_group": DestroyGroupFields,
    "/get_weights_by_name": ReadWeightFields,
    "/update_weight_version": VersionFields,
    "/pause_generation": PauseFields,
    "/continue_generation": ContinueFields,
    "/abort_requests": AbortManyFields,
    "/load_lora_adapter": LoadFields,
    "/unload_lora_adapter": UnloadFields,
    "/v1/load_lora_adapter": LoadFields,
    "/v1/unload_lora_adapter": UnloadFields,
    "/cluster/instances": StartFields,
    "/cluster/decisions": ScalingDecision,
    "/cluster/{instance}/role": RoleFields,
    "/pd_role_switch": SwitchFields,
    "/tokenize": TokenizeFields,
    "/v1/tokenize": TokenizeFields,
    "/detokenize": DetokenizeFields,
    "/v1/detokenize": DetokenizeFields,
    "/invocations": InvocationFields,
    "/pooling": EmbeddingFields,
    "/encode": EncodeFields,
    "/v1/rerank": RerankFields,
    "/rerank": RerankFields,
    "/v2/rerank": RerankFields,
    "/v1/score": ScoreFields,
    "/score": ScoreFields,
    "/v1/responses/input_tokens": ResponseFields,
}


@pytest.mark.parametrize(("path", "body"), BODIES.items())
async def test_the_body_of_a_request_is_described_field_by_field(
    described: tuple[Site, dict[str, Any]], path: str, body: type[msgspec.Struct]
) -> None:
    _, page = described
    operation = page["paths"][path]["post"]
    (content,) = operation["requestBody"]["content"].values()
    assert content["schema"] == {"$ref": f"#/components/schemas/{body.__name__}"}
    assert list(page["components"]["schemas"][body.__name__]["properties"]) == list(body.__struct_encode_fields__)
    assert {"400", "413"} <= operation["responses"].keys()


async def test_every_field_of_every_body_has_a_description(described: tuple[Site, dict[str, Any]]) -> None:
    """Also the fields of the objects within: what a body refers to."""
    _, page = described
    schemas = page["components"]["schemas"]
    for path, item in page["paths"].items():
        for operation in item.values():
            if "requestBody" in operation:
                assert path in BODIES
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
