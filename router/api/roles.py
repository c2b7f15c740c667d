"""POST /cluster/{instance}/role, and /pd_role_switch as SGLang calls it: an instance serves in another role while streams run.

Owns the bodies and the answers. Source of SGLang's: sglang/srt/disaggregation/role_switch.py at https://github.com/sgl-project/sglang.
Its server is one instance, so there nobody is named.
"""

import time
from typing import Annotated

import msgspec
from fastapi import Request
from msgspec import Meta
from starlette.responses import Response

from common.ids import Incarnation, InstanceId, ServingRole
from router.api.admission import visit_of
from router.api.bodies import object_in
from router.api.description import call_route
from router.api.fields import Unsupported, read_fields
from router.api.sending import json_response
from router.core import Gateway

_SAID = "prefill, decode, or both: a decode instance that gets whole requests too, where that costs less than a pair."


class RoleFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /cluster/{instance}/role."""

    role: Annotated[ServingRole, Meta(description=_SAID)]


class SwitchFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /pd_role_switch."""

    new_role: Annotated[ServingRole, Meta(description=_SAID)]
    instance: Annotated[InstanceId, Meta(description="The instance that is to take it, as /cluster names it.")]


class RoleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The instance serves in this role."""

    id: InstanceId
    role: ServingRole
    incarnation: Incarnation
    """Its life in this role."""
    seconds: float
    """Since it was told."""


_REFUSALS = (400, 403, 404, 409, 413, 415, 504)
CHANGE = call_route("Operations", "Change the role of an instance", RoleFields, RoleAnswer, _REFUSALS)
SWITCH = call_route("SGLang", "Change the role of an instance", SwitchFields, RoleAnswer, _REFUSALS)


def _read_role(body: bytes, context_tokens: int | None = None) -> RoleFields:
    return read_fields(object_in(body), RoleFields)


def _read_switch(body: bytes, context_tokens: int | None = None) -> SwitchFields:
    never = Unsupported({"prepare_only": (False,), "decode_cuda_graph_memory_gb": ()})
    return read_fields(object_in(body), SwitchFields, never)


class RolesApi:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def change(self, request: Request, instance: str) -> Response:
        """It takes nothing new, hands off what it can in a moment, has the rest resumed elsewhere, and serves in the new role
        with its weights, graphs and prefix cache. Answers when it does. If it cannot, it stays what it was."""
        asked = await visit_of(request).read(request, _read_role)
        return await self._answer(InstanceId(instance), asked.role)

    async def switch(self, request: Request) -> Response:
        """As POST /cluster/{instance}/role."""
        asked = await visit_of(request).read(request, _read_switch)
        return await self._answer(asked.instance, asked.new_role)

    async def _answer(self, instance: InstanceId, role: ServingRole) -> Response:
        began_s = time.monotonic()
        life = (await self._gateway.change_role(instance, role)).life
        seconds = round(time.monotonic() - began_s, 6)
        return json_response(RoleAnswer(id=life.id, role=role, incarnation=life.incarnation, seconds=seconds))
