"""A host's role in a split of prompts from answers, wired: what it asks of other hosts, or does for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import structlog

from appliance.common.kv_store_state import FleetKeyState
from appliance.common.split_config import SplitConfig
from appliance.gateway.fleet.prefill_asking import Asking
from appliance.gateway.fleet.prefill_run import AskedPrompt, PrefillRuns
from appliance.gateway.fleet.prefill_service import MAX_CALLERS, STRANGER_MESSAGE_BYTES, PrefillService
from appliance.gateway.fleet.served_entries import ServedEntries
from appliance.gateway.front.allowance import StrangersAllowances
from appliance.gateway.front.connections import Slot
from appliance.gateway.front.listener import Opened
from appliance.gateway.front.operator_door import OperatorDoor, bind_port
from appliance.gateway.grpc.connection import STRANGER, GrpcConnection, GrpcShared
from appliance.gateway.request.service import GatewayService
from appliance.gateway.telemetry.tracer import OtelTelemetry

log = structlog.get_logger()

STALL_S = 5.0
"""Seconds for which a caller may leave progress unread; it counts this host as silent much sooner."""


@dataclass(slots=True)
class Split:
    """One host's role."""

    config: SplitConfig | None
    service: GatewayService
    telemetry: OtelTelemetry
    keys: Callable[[], FleetKeyState]
    """Whether this host has the keys under which its fleet shares KV."""

    def open(self) -> Self:
        """Have long prompts of this host's requests computed by others, where the role is decode; returns itself."""
        if self.config is not None and self.config.role == "decode":
            service = self.service
            service.dependencies.prefiller = Asking(self.config, service.audit, service.count, self.keys)
        return self

    async def run(self) -> None:
        """Compute prompts for other hosts until cancelled, where the role is prefill; otherwise wait.

        Raises:
            StartError: the address cannot be bound, or a certificate not be used.
        """
        config = self.config
        if config is None or config.role != "prefill" or config.listen is None or config.tls is None:
            await asyncio.Event().wait()
            return
        service = self.service
        runs = PrefillRuns(service.dependencies, service.operator_drain, self.keys)
        answers = PrefillService(config, runs, ServedEntries(service.audit), service.count, self._told)
        strangers = StrangersAllowances(STRANGER, time.monotonic)

        def make(opened: Opened, slot: Slot) -> GrpcConnection:
            shared = GrpcShared(opened, answers.serve, strangers, STRANGER_MESSAGE_BYTES, STALL_S)
            return GrpcConnection(shared, slot)

        bound = bind_port(config.listen, "split.listen")
        try:
            door = OperatorDoor(bound, config.tls.files, lambda contexts: contexts.grpc, make, MAX_CALLERS)
        except BaseException:
            bound.close()
            raise
        log.info("computes prompts for other hosts", address=config.listen, hosts=len(config.decode_hosts))
        try:
            await door.run()
        finally:
            door.close()

    def _told(self, traceparent: str | None, asked: AskedPrompt, outcome: str, began: float) -> None:
        took_s = time.monotonic() - began
        self.telemetry.prompt_computed(traceparent, asked.request_id, asked.tenant, asked.model, outcome, took_s)
