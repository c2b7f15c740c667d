"""What people and planners order of instances: to start, to serve in another role while streams run; and what planners decide.

Owns the bodies and the answers of these endpoints. `router.scaling` owns what is remembered. Source of /pd_role_switch, as SGLang
calls POST /cluster/{instance}/role: sglang/srt/disaggregation/role_switch.py at https://github.com/sgl-project/sglang. Its server
is one instance, so there nobody is named.
"""

import time
from typing import Annotated

import msgspec
from fastapi import Request
from msgspec import Meta
from msgspec.structs import replace

from common.ids import Incarnation, InstanceId, Role, ServingRole
from router.api.admission import visit_of
from router.api.description import ApiPart, Described, reader_of
from router.api.fields import Unsupported
from router.scaling import ScalingDecision

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


class StartFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /cluster/instances."""

    role: Role
    """The role in which it is to start."""


class ScalingDecisions(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /cluster/decisions."""

    decisions: list[ScalingDecision]


_REFUSALS = (400, 403, 404, 409, 413, 415, 504)
"""What an order of a role may get."""


class InstancesApi(ApiPart):
    """The handlers."""

    is_control = True

    @Described(
        "POST /cluster/{instance}/role", "Operations", "Change the role of an instance", body=RoleFields, refusals=_REFUSALS
    )
    async def change(self, request: Request, instance: str) -> RoleAnswer:
        """It takes nothing new, hands off what it can in a moment, has the rest resumed elsewhere, and serves in the new role
        with its weights, graphs and prefix cache. Answers when it does. If it cannot, it stays what it was."""
        asked = await visit_of(request).read(request, reader_of(RoleFields))
        return await self._answer(InstanceId(instance), asked.role)

    @Described("POST /pd_role_switch", "SGLang", "Change the role of an instance", refusals=_REFUSALS, unsupported=_NEVER)
    async def switch(self, request: Request, asked: SwitchFields) -> RoleAnswer:
        """As POST /cluster/{instance}/role."""
        return await self._answer(asked.instance, asked.new_role)

    async def _answer(self, instance: InstanceId, role: ServingRole) -> RoleAnswer:
        began_s = time.monotonic()
        life = (await self._gateway.change_role(instance, role)).life
        seconds = round(time.monotonic() - began_s, 6)
        return RoleAnswer(id=life.id, role=role, incarnation=life.incarnation, seconds=seconds)

    @Described("POST /cluster/instances", "Operations", "Start an instance", refusals=(400, 403, 408, 409, 413, 415, 503))
    async def start(self, request: Request, asked: StartFields) -> StartFields:
        """Have `launch local` or `launch ray`, by which this router was started, start one of its spare instances."""
        self._gateway.core.scaling.start(asked.role)
        return asked

    @Described("POST /cluster/decisions", "Operations", "Tell of a decision")
    async def decided(self, request: Request, asked: ScalingDecision) -> ScalingDecision:
        """Remember what a planner has decided, with the reason in words. The router does nothing else with it."""
        decision = replace(asked, at=time.time())
        self._gateway.core.scaling.decided(decision)
        return decision

    @Described("GET /cluster/decisions", "Operations", "Decisions", "The latest decisions about the fleet, in order.")
    async def decisions(self) -> ScalingDecisions:
        """What planners have decided, and why; of decisions to stay that follow each other, the latest."""
        return ScalingDecisions(decisions=list(self._gateway.core.scaling.decisions))
