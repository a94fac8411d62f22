"""A real admin listener (uvicorn on a socket) around an appliance that exists on paper only."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import uvicorn

from appliance.common.live_requests import DrainStatus, LiveRequest, LiveRequests
from appliance.common.operator_calls import OperatorCall
from appliance.common.shadow_status import ShadowStatus
from appliance.common.status import (
    ApplianceLoad,
    ApplianceStatus,
    Counts,
    EngineStatus,
    KeysStatus,
    ModelStatus,
    PolicyStatus,
    Rates,
    Readiness,
    ReloadOutcome,
    SandboxStatus,
    TenantStatus,
    TenantTable,
    TenantUse,
)
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.admin import AdminParts, admin_app
from appliance.gateway.telemetry.operator_routes import OperatorParts, operator_routes
from appliance.gateway.telemetry.store import TraceStore
from appliance.gateway.telemetry.tracer import TelemetrySettings, open_telemetry
from tests.appliance.gateway.telemetry import samples

STATUS = ApplianceStatus(
    version="0.1.0",
    started_at=1_795_263_000.0,
    sandbox="gvisor-systrap",
    cgroup="memory and pids limited",
    models=(
        ModelStatus(
            name="athanor-mini",
            state="ready",
            engine=EngineStatus(
                state="ready",
                kind="gvisor-systrap",
                generation=2,
                restarts=1,
                pid=4242,
                uptime_s=3_725.0,
                num_blocks=1_024,
                free_blocks=1_000,
                cached_blocks=300,
                running=3,
                waiting=1,
                weights="compressed",
                computes="compiled kernels x86-64-v4-dot, 3 threads; ms a layer at 1/4 rows: x86-64-v4-dot 0.09/0.13, "
                "plain operations 0.11/0.24",
            ),
            text=SandboxStatus(state="ready", kind="gvisor-systrap", generation=1, pid=4243, uptime_s=7_425.0),
        ),
    ),
    tenants=(
        TenantStatus(
            id="alpha", isolation_class="shared", in_flight=3, max_in_flight=8, requests=120, tokens=51_234, refused=2
        ),
        TenantStatus(id="beta", isolation_class="strict", in_flight=0),
    ),
    load=ApplianceLoad(
        up_s=7_445.0,
        running=3,
        waiting=1,
        in_flight=3,
        requests=120,
        counts=Counts(ok=115, refused=2, invalid=3, input_tokens=40_000, cached_tokens=12_000, output_tokens=11_234),
        rates=Rates(over_s=10.0, requests=2.1, refused=0.1, input_tokens=804.0, output_tokens=212.0),
        kv_blocks=1_024,
        kv_held=24,
        kv_free=1_000,
        kv_cached=300,
        sandboxes=2,
        sandboxes_ready=2,
        restarts=1,
    ),
    policy=PolicyStatus(digest="9f86d081884c7d659a2feaa0c55ad015", loaded_at=1_795_263_000.0, file="policy.yaml"),
)


LIVE = LiveRequest(
    id="req_1",
    tenant="alpha",
    model="athanor-mini",
    credential="key:alpha-1",
    state="running",
    age_s=1.5,
    input_tokens=7,
    output_tokens=3,
)

TENANTS = TenantTable(
    started_at=STATUS.started_at,
    tenants=(
        TenantUse(
            tenant="",
            series="",
            ok=0,
            refused=3,
            invalid=0,
            cancelled=0,
            failed=0,
            input_tokens=0,
            cached_tokens=0,
            output_tokens=0,
        ),
        TenantUse(
            tenant="alpha",
            series="alpha",
            ok=1_204,
            refused=17,
            invalid=0,
            cancelled=2,
            failed=1,
            input_tokens=1_250_000,
            cached_tokens=800_000,
            output_tokens=390_211,
        ),
        TenantUse(
            tenant="beta",
            series="other",
            ok=9,
            refused=0,
            invalid=0,
            cancelled=0,
            failed=0,
            input_tokens=412,
            cached_tokens=0,
            output_tokens=96,
        ),
    ),
)


class FakeAppliance:
    """What the admin listener asks, with knobs."""

    def __init__(self) -> None:
        self.url = ""
        self.telemetry = open_telemetry(TelemetrySettings(version="0"))
        self.telemetry.count(names.POLICY_RELOADS, outcome="ok")
        self.traces = TraceStore()
        for trace in (samples.answered(), samples.refused(), samples.failed()):
            self.traces.record(trace)
        self.reset()

    def reset(self) -> None:
        """Healthy again, nothing counted."""
        self.status = STATUS
        self.tenants = TENANTS
        self.keys = KeysStatus(file="credentials.json", digest="0" * 64, keys=2, loaded_at=0.0)
        self.not_ready = ""
        self.reloads = 0
        self.asked: list[str] = []
        self.shadow = ShadowStatus(file="/etc/athanor/policy.shadow.yaml")
        self.outcome = ReloadOutcome(ok=True, digest="9f86d081884c7d65", message="2 tenants")
        self.live = [LIVE]
        self.draining = False
        self.called: list[OperatorCall] = []

    def parts(self) -> AdminParts:
        """For ``admin_app``."""
        return AdminParts(
            traces=self.traces,
            metrics=self.telemetry.metrics.render,
            refresh=lambda: None,
            status=lambda: self.status,
            tenants=lambda: self.tenants,
            keys=lambda: self.keys,
            ready=lambda: Readiness(ready=not self.not_ready, reason=self.not_ready),
            reload=self._reload,
            shadow=lambda: self.shadow,
        )

    def break_policy(self, message: str) -> None:
        """The last reload failed."""
        policy = replace(self.status.policy, last_error=message)
        self.status = replace(self.status, policy=policy)

    def operator_parts(self) -> OperatorParts:
        """For ``operator_routes``."""
        return OperatorParts(
            requests=self._requests, cancel=self._cancel, drain=self._drain, called=lambda one: self.called.append(one)
        )

    def _requests(self, tenant: str) -> LiveRequests:
        return LiveRequests(requests=tuple(one for one in self.live if tenant in ("", one.tenant)))

    def _cancel(self, wanted: str) -> LiveRequests | None:
        found = tuple(one for one in self.live if one.id == wanted)
        self.live = [one for one in self.live if one.id != wanted]
        return LiveRequests(requests=found) if found else None

    def _drain(self, draining: bool | None) -> DrainStatus:
        self.draining = self.draining if draining is None else draining
        return DrainStatus(draining=self.draining, running=len(self.live))

    async def _reload(self, by: str) -> ReloadOutcome:
        self.reloads += 1
        self.asked.append(by)
        return self.outcome


@contextmanager
def serve_admin(fake: FakeAppliance, path: Path | None = None) -> Iterator[str]:
    """Serve on a free port of loopback, or on a Unix socket; gives the address for ``--admin``."""
    if path is None:
        listener = socket.create_server(("127.0.0.1", 0))
        fake.url = address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        address = f"unix:{path}"
    app = admin_app(fake.parts(), operator_routes(fake.operator_parts()))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", loop="asyncio")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
