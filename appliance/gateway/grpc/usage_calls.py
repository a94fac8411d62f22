"""The methods of ``athanor.usage.v1``: a tenant's limits and usage, asked for once or watched.

They cost the tenant no request of its rate: a caller that waits for its limit must be able to ask when it passes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from appliance.gateway.front.cut import Cut, shutting_down
from appliance.gateway.front.end_user import end_user
from appliance.gateway.front.padding import Padding
from appliance.gateway.generate_request import Principal
from appliance.gateway.grpc.call import Behaviours, C, principal_of
from appliance.gateway.grpc.generated import usage_pb2 as pb
from appliance.gateway.grpc.usage_mapping import fill, interval_of, to_limits, to_usage
from appliance.gateway.service import Service

USAGE_SERVICE = "athanor.usage.v1.UsageService"

RECHECK_S = 1.0
"""Seconds after which a watch is authenticated again: a revoked key ends it as soon as it ends a stream of tokens."""


class UsageCalls:
    """Answers for tenants' accounts. ``padding`` is for tenants of padded classes."""

    def __init__(self, service: Service, padding: Padding) -> None:
        self._service = service
        self._padding = padding
        self._watches: set[Cut] = set()
        self._draining = False

    def methods(
        self, read: Callable[[type[Any], C], Awaitable[Any]], authenticate: Callable[[C], Principal]
    ) -> Behaviours[C]:
        """Return the service's methods by name. ``read`` reads the one message of a call, ``authenticate`` gives whose
        call it is, by the credentials in force now, and raises where none holds."""

        async def limits(call: C) -> Message:
            await read(pb.GetLimitsRequest, call)
            return self.limits(principal_of(call))

        async def usage(call: C) -> Message:
            return await self.usage(principal_of(call), await read(pb.GetUsageRequest, call))

        async def watch(call: C) -> None:
            asked = await read(pb.WatchUsageRequest, call)
            await self.watch(asked, lambda: authenticate(call), call.wire.write)

        return {"GetLimits": limits, "GetUsage": usage, "WatchUsage": watch}

    def begin_drain(self) -> None:
        """End all watches with a retryable error: they would last as long as their callers like."""
        self._draining = True
        for cut in list(self._watches):
            cut.end(shutting_down())

    def limits(self, principal: Principal) -> pb.GetLimitsResponse:
        """Return the limits."""
        answer = pb.GetLimitsResponse(limits=to_limits(self._service.limits(principal)))
        return fill(answer, self._padding) if self._service.pads(principal) else answer

    async def usage(self, principal: Principal, asked: pb.GetUsageRequest) -> pb.GetUsageResponse:
        """Return the usage.

        Raises:
            InvalidRequestError: the name of the end user is too long.
            RateLimitedError: the tenant has asked about too many end users.
            UnavailableError: the supervisor does not tell.
        """
        found = await self._service.usage(principal, end_user(asked.end_user, "end_user"))
        answer = pb.GetUsageResponse(usage=to_usage(found))
        return fill(answer, self._padding) if self._service.pads(principal) else answer

    async def watch(
        self,
        asked: pb.WatchUsageRequest,
        authenticate: Callable[[], Principal],
        write: Callable[[pb.WatchUsageResponse], Awaitable[None]],
    ) -> None:
        """Write both now and after each interval, until the caller leaves, or ``authenticate`` raises.

        Raises:
            InvalidRequestError: the interval is none.
            UnauthenticatedError: the credential holds no more.
            UnavailableError: the supervisor does not tell, or the appliance shuts down.
        """
        interval_s = interval_of(asked)
        if self._draining:
            raise shutting_down()
        cut = Cut()
        self._watches.add(cut)
        try:
            await cut.run(self._watch(interval_s, authenticate, write))
        finally:
            self._watches.discard(cut)

    async def _watch(
        self,
        interval_s: float,
        authenticate: Callable[[], Principal],
        write: Callable[[pb.WatchUsageResponse], Awaitable[None]],
    ) -> None:
        number, due = 0, time.monotonic()
        while True:
            principal = authenticate()
            message = pb.WatchUsageResponse(
                sequence=number,
                limits=to_limits(self._service.limits(principal)),
                usage=to_usage(await self._service.usage(principal)),
            )
            await write(fill(message, self._padding) if self._service.pads(principal) else message)
            number, due = number + 1, due + interval_s
            while (left := due - time.monotonic()) > 0:
                await asyncio.sleep(min(left, RECHECK_S))
                authenticate()
