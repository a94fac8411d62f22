"""Looks of the console with fixed contents, for tests of what is said and drawn."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from appliance.common.batch_status import BatchQueue, BatchView
from appliance.common.cards import CardStatus, ModelMemory
from appliance.common.status import (
    AccountView,
    ApplianceLoad,
    Counts,
    KvView,
    Latency,
    ModelView,
    Point,
    PolicyStatus,
    Rates,
    SandboxStatus,
    Spread,
)
from appliance.gateway.console.alerts import Facts
from appliance.gateway.console.look import Look, Question, Requests, Tenants, TenantView
from appliance.gateway.telemetry.store import StoredTrace, TraceStore
from tests.appliance.gateway.console.fleet_pictures import FakeFleet
from tests.appliance.gateway.console.usage_pictures import FakeUsage
from tests.appliance.gateway.telemetry import samples

HOSTILE = "<img src=x onerror=document.title='pwned'>"
"""A name as somebody who means harm would choose it; what the policy allows of names is narrower."""

POLICY = PolicyStatus(
    digest="9f86d081884c7d659a2feaa0c55ad015",
    loaded_at=1_795_263_000.0,
    file="policy.yaml",
    last_attempt_at=1_795_263_000.0,
)


UP_S = 7_500.0
"""Seconds for which the gateway of all pictures has been up."""

LOAD = ApplianceLoad(
    up_s=UP_S,
    running=3,
    waiting=1,
    in_flight=11,
    requests=240,
    counts=Counts(ok=230, refused=8, invalid=2, input_tokens=80_000, cached_tokens=20_000, output_tokens=46_000),
    rates=Rates(over_s=10.0, requests=2.8, refused=3.2, input_tokens=900.0, output_tokens=420.0),
    kv_blocks=1_024,
    kv_held=532,
    kv_free=492,
    kv_cached=140,
    sandboxes=2,
    sandboxes_ready=2,
)


def sandbox(role: str, **changes: Any) -> SandboxStatus:
    """One that is well."""
    base = SandboxStatus(
        role=role, state="ready", kind="gvisor/systrap", pid=4242, generation=1, restarts=0, since=1_795_263_005.0
    )
    return replace(base, **changes)


def account(name: str, held: int, cached: int = 0, kind: str = "tenant", reserved: int = 0) -> AccountView:
    """An account of KV."""
    return AccountView(name=name, kind=kind, held=held, cached=cached, reserved=reserved, cap=1_024)


def model(name: str = "athanor-mini", **changes: Any) -> ModelView:
    """One that is served, with two tenants, a group and a public prefix in its memory."""
    accounts = (
        account("alpha", 300, 100),
        account("group/team", 120, 40, "group", 128),
        account("beta", 80),
        account("public/system", 32, 0, "public"),
    )
    kv = KvView(blocks=1_024, free=492, cached=140, block_tokens=16, accounts=accounts)
    base = ModelView(
        name=name,
        state="ready",
        runner="model",
        tenant="",
        running=3,
        waiting=1,
        sandboxes=(sandbox("engine"), sandbox("text", pid=4243)),
        kv=kv,
    )
    return replace(base, **changes)


def tenant(name: str, **changes: Any) -> TenantView:
    """One that is at work."""
    base = TenantView(
        id=name,
        isolation_class="shared",
        priority="normal",
        weight=1,
        retention="standard",
        group=None,
        in_flight=3,
        concurrency=8,
        requests=120,
        tokens=51_234,
        refused=2,
        output_tokens_per_s=210.0,
        requests_per_s=1.4,
        refused_per_s=0.0,
        requests_per_minute=600,
        tokens_per_minute=100_000,
        requests_left=580,
        tokens_left=42_000,
        max_context_tokens=8_192,
        max_output_tokens=1_024,
        kv_reserved=0.0,
        kv_cap=1.0,
        kv_blocks=400,
    )
    return replace(base, **changes)


def card(**changes: Any) -> CardStatus:
    """A GPU that is well and at work."""
    figures = {"memory_total_bytes": 80 << 30, "memory_used_bytes": 61 << 30, "busy_percent": 93}
    figures |= {"temperature_c": 61, "power_mw": 512_000, "ecc_uncorrected": 0, "clock_reasons": 4}
    held = ModelMemory(model="athanor-mini", held=60 << 30, share=72 << 30)
    base = CardStatus(index=0, uuid="GPU-0a1b", state="ok", figures=figures, models=(held,), engines=("athanor-mini",))
    return replace(base, **changes)


def batch(**changes: Any) -> BatchView:
    """A batch whose lines run."""
    base = BatchView(
        id="batch_7",
        tenant="alpha",
        endpoint="/v1/completions",
        status="in_progress",
        total=400,
        ended=120,
        running=16,
        created_at=1_795_260_000.0,
        still_s=2.0,
        obstacle="",
        model="athanor-mini",
    )
    return replace(base, **changes)


def queue(*rows: BatchView, **changes: Any) -> BatchQueue:
    """What is kept, with these batches."""
    base = BatchQueue(
        open=len(rows),
        waiting_lines=sum(one.total - one.ended for one in rows),
        running_lines=sum(one.running for one in rows),
        oldest_s=3_200.0 if rows else 0.0,
        files=12,
        responses=3,
        stored_bytes=5 << 20,
        max_bytes=16 << 30,
        stuck=sum(one.stuck for one in rows),
        rows=rows,
    )
    return replace(base, **changes)


def picture(**changes: Any) -> Look:
    """An appliance that is well and at work."""
    now = time.time()
    points = tuple(
        Point(UP_S - 600 + 2 * step, 1_000 + 150 * step * (step % 7 > 1), step % 5, int(step > 280), 0.3, 0)
        for step in range(300)
    )
    rows = tuple(trace.summary for trace in traces())
    tenants = (tenant("alpha"), tenant("beta", in_flight=8, refused_per_s=3.2, isolation_class="strict"))
    base = Look(
        now=now,
        version="0.1.0",
        page="p1",
        started_at=now - UP_S,
        ready=True,
        sandbox="gvisor/systrap",
        limits="cgroup v1: memory, cpu, pids",
        load=LOAD,
        alerts=(),
        models=(model(),),
        cards=(),
        batches=None,
        own=(),
        own_total=0,
        tenants=Tenants(total=2, matching=2, offset=0, active=2, rows=tenants),
        latency=Latency(
            requests=312,
            window_s=840.0,
            first_token=Spread(0.041, 0.113, 0.242),
            each_token=Spread(0.0018, 0.0096, 0.0196),
            total=Spread(0.101, 0.357, 1.718),
        ),
        policy=POLICY,
        period_s=2.0,
        points=points,
        requests=Requests(mark="3/", recorded=3, kept=3, rows=rows),
    )
    return replace(base, **changes)


def traces() -> tuple[StoredTrace, ...]:
    """The sample requests, newest first."""
    return samples.failed(), samples.refused(), samples.answered()


def facts(**changes: Any) -> Facts:
    """What alerts are made of, nothing of which is one."""
    now = 1_795_263_200.0
    base = Facts(
        now=now,
        up_s=UP_S,
        attached=True,
        draining=False,
        sandbox="gvisor/systrap",
        models=(model(),),
        own=(),
        users={"athanor-mini": 2},
        num_tenants=2,
        policy=POLICY,
        audit_problem="",
        audit_refuses=False,
        audit_witness="",
        integrity_failures=0,
        silence_s={"athanor-mini": 0.4},
        defects=0,
        points=tuple(Point(UP_S - 60 + 2 * step, step, 1, 0, 0.2, 0) for step in range(30)),
        latency=Latency(requests=50, window_s=600, first_token=Spread(0.1, 0.2, 0.3)),
        recent=(samples.SUMMARY,),
    )
    return replace(base, **changes)


class FakeGateway:
    """Answers looks by a picture that a test may exchange, as the gateway's feed would."""

    def __init__(self) -> None:
        self.traces = TraceStore()
        for trace in reversed(traces()):
            self.traces.record(trace)
        self.questions: list[Question] = []
        self.usage = FakeUsage()
        self.fleet = FakeFleet()
        self.reset()

    def reset(self) -> None:
        """The appliance is well."""
        self.shown = picture()
        self.page = ""
        self.clock_step_s = 0.0
        self.questions.clear()
        self.usage.reset()
        self.fleet.reset()

    def look(self, question: Question, page: str) -> Look:
        """The picture as of now."""
        self.questions.append(question)
        shown = replace(self.shown, now=time.time() + self.clock_step_s, page=self.page or page)
        shown = replace(shown, points=tuple(point for point in shown.points if point.at > question.after))
        if shown.requests is not None:
            shown = replace(shown, requests=self._requests(shown.requests, question))
        return shown

    @staticmethod
    def _requests(requests: Requests, question: Question) -> Requests | None:
        mark = f"{requests.recorded}/{question.outcome}"
        rows = tuple(one for one in requests.rows if question.outcome in ("", one.outcome))
        return None if mark == question.seen else replace(requests, mark=mark, rows=rows)
