"""What a planner of the fleet tells the router, and what it asks of whoever started it.

Owns the bodies and answers of these endpoints. `router.scaling` owns what is remembered.
"""

import time

import msgspec
from fastapi import Request
from msgspec.structs import replace

from common.ids import Role
from router.api.description import ApiPart, Described
from router.scaling import ScalingDecision


class StartFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /cluster/instances."""

    role: Role
    """The role in which it is to start."""


class ScalingDecisions(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /cluster/decisions."""

    decisions: list[ScalingDecision]


class ScalingApi(ApiPart):
    """The handlers."""

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
