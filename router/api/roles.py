"""POST /cluster/{instance}/role, and /pd_role_switch as SGLang calls it: an instance serves in another role while streams run.

Owns the bodies and the answers. Source of SGLang's: sglang/srt/disaggregation/role_switch.py at https://github.com/sgl-project/sglang.
Its server is one instance, so there nobody is named.
"""

import time
from typing import Annotated

import msgspec
from fastapi import Request
from msgspec import Meta

from common.ids import Incarnation, InstanceId, ServingRole
from router.api.admission import visit_of
from router.api.description import ApiPart, Described, reader_of
from router.api.fields import Unsupported

_SAID = "prefill, decode, or both: a decode instance that gets whole requests too, where that costs less than a pair."


class RoleFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /cluster/{instance}/role."""

    role: Annotated[ServingRole, Meta(description=_SAID)]


class SwitchFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /pd_role_switch."""

    new_role: Annotated[ServingRole, Meta(description=_SAID)]
    instance: InstanceId
    """The instance that is to take it, as /cluster names it."""


class RoleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The instance serves in this role."""

    id: InstanceId
    role: ServingRole
    incarnation: Incarnation
    """Its life in this role."""
    seconds: float
    """Since it was told."""


_NEVER = Unsupported({"prepare_only": (False,), "decode_cuda_graph_memory_gb": ()})


class RolesApi(ApiPart):
    """The handlers."""

    refusals = (400, 403, 404, 409, 413, 415, 504)
    is_control = True

    @Described("POST /cluster/{instance}/role", "Operations", "Change the role of an instance", body=RoleFields)
    async def change(self, request: Request, instance: str) -> RoleAnswer:
        """It takes nothing new, hands off what it can in a moment, has the rest resumed elsewhere, and serves in the new role
        with its weights, graphs and prefix cache. Answers when it does. If it cannot, it stays what it was."""
        asked = await visit_of(request).read(request, reader_of(RoleFields))
        return await self._answer(InstanceId(instance), asked.role)

    @Described("POST /pd_role_switch", "SGLang", "Change the role of an instance", unsupported=_NEVER)
    async def switch(self, request: Request, asked: SwitchFields) -> RoleAnswer:
        """As POST /cluster/{instance}/role."""
        return await self._answer(asked.instance, asked.new_role)

    async def _answer(self, instance: InstanceId, role: ServingRole) -> RoleAnswer:
        began_s = time.monotonic()
        life = (await self._gateway.change_role(instance, role)).life
        seconds = round(time.monotonic() - began_s, 6)
        return RoleAnswer(id=life.id, role=role, incarnation=life.incarnation, seconds=seconds)
