"""Health of gRPC's services for load balancers (grpc.health.v1): asked once, or watched.

A watcher that reads nothing delays no other: neither a new status nor another watcher waits for its answer.
grpcio's own servicer writes while it holds the lock that each new status needs.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from appliance.gateway.grpc.call import GrpcCall

_Kinds = health_pb2.HealthCheckResponse


class WatchedHealth:
    """The status of each service by its name; one named "" stands for all."""

    def __init__(self) -> None:
        self._status: dict[str, Any] = {"": _Kinds.SERVING}
        self._changed = asyncio.Event()
        """Set, and replaced by another, when a status changes."""
        self._ending = False

    def set(self, service: str, status: Any) -> None:
        """Tell a service's status; nothing after ``end``."""
        if not self._ending and self._status.get(service) != status:
            self._status[service] = status
            self._wake()

    def end(self) -> None:
        """Say for good that nothing is served."""
        self._ending = True
        self._status = dict.fromkeys(self._status, _Kinds.NOT_SERVING)
        self._wake()

    async def check(self, asked: health_pb2.HealthCheckRequest, call: GrpcCall) -> health_pb2.HealthCheckResponse:
        """Answer with the status now; a service that is not known ends the call with NOT_FOUND."""
        status = self._status.get(asked.service)
        if status is None:
            await call.abort(grpc.StatusCode.NOT_FOUND)
        return _Kinds(status=status)

    async def watch(self, asked: health_pb2.HealthCheckRequest, call: GrpcCall) -> None:
        """Write the status now and each later one, until the caller leaves; of several that changed while the caller
        did not read, the last."""
        told = None
        while True:
            changed = self._changed
            status = self._status.get(asked.service, _Kinds.SERVICE_UNKNOWN)
            if status != told:
                await call.write(_Kinds(status=status))
                told = status
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
