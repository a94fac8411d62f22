"""What the strip on top says: each matter, and nothing where nothing is the matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from appliance.common.cards import CardStatus
from appliance.common.certificate_dates import DAY_S
from appliance.common.disk_space import DiskSpace
from appliance.common.kv_store_state import KvStoreState
from appliance.common.status import Latency, Point, Spread
from appliance.gateway.console.alerts import AUDIT_SAID, Facts, alerts
from appliance.gateway.telemetry.store import TraceSummary
from tests.appliance.gateway.console.pictures import POLICY, UP_S, batch, card, facts, model, queue, sandbox
from tests.appliance.gateway.telemetry import samples


def ended(outcome: str, error: str | None, tenant: str | None, count: int) -> list[TraceSummary]:
    """So many requests that ended alike."""
    return [replace(samples.SUMMARY, outcome=outcome, error=error, tenant=tenant)] * count


def test_an_appliance_that_is_well_has_no_alert() -> None:
    """The control of all others; so is one with a certificate that is good for long enough."""
    assert alerts(facts()) == ()
    assert alerts(facts(certificate=(NOW - DAY_S, NOW + 60 * DAY_S))) == ()
    assert alerts(facts(disks=(DiskSpace("audit", 1 << 30, 4 << 30), DiskSpace("run", 3 << 30, 900 << 30)))) == ()
    assert alerts(facts(cards=(card(),))) == ()
    assert alerts(facts(batches=queue(batch(), batch(still_s=800.0, obstacle="limit")))) == ()


def down(**changes: Any) -> Facts:
    """The engine is not ready."""
    return facts(models=(model(sandboxes=(sandbox("engine", **changes), sandbox("text"))),))


NOW = facts().now


def points(waiting: int = 0, kv_held: float = 0.2) -> tuple[Point, ...]:
    """Forty seconds that are all alike."""
    return tuple(Point(UP_S - 40 + 2 * step, 0, 1, waiting, kv_held, 0) for step in range(21))


def told(**figures: int) -> CardStatus:
    """A GPU with other figures."""
    return card(figures={**card().figures, **figures})


CASES: dict[str, tuple[Facts, str, str]] = {
    "supervisor": (facts(attached=False, sandbox=""), "broken", "The supervisor is gone"),
    "draining": (facts(draining=True), "note", "shutting down"),
    "booting": (down(state="booting"), "note", "engine sandbox of athanor-mini is booting"),
    "failed": (down(state="failed", cause="exit status 137"), "broken", "is down: exit status 137"),
    "again": (down(state="booting", restarts=2), "broken", "engine sandbox of athanor-mini is down"),
    "hung": (down(state="hung", cause="answers no probe"), "broken", "engine sandbox of athanor-mini answers no probe"),
    "silent": (facts(silence_s={"athanor-mini": 40.0}), "broken", "finishes no step"),
    "restarts": (facts(points=(Point(0, 0, 0, 0, 0, 1), Point(300, 0, 0, 0, 0, 5))), "degraded", "died 4 times"),
    "one death": (facts(points=(Point(0, 0, 0, 0, 0, 1), Point(300, 0, 0, 0, 0, 2))), "note", "A sandbox died"),
    "unsafe": (facts(sandbox="none"), "broken", "no sandbox"),
    "integrity": (facts(integrity_failures=2), "broken", "2 requests met KV memory"),
    "defects": (facts(defects=1), "degraded", "promise between tenants"),
    "audit": (facts(audit_problem=f"{AUDIT_SAID}disk full"), "degraded", "The audit log cannot be written: disk full"),
    "audit refuses": (facts(audit_problem="disk full", audit_refuses=True), "broken", "audit log"),
    "charges": (facts(charges_problem="no memory came"), "degraded", "not kept over the end of the gateway"),
    "kv carrier": (facts(kv_store=KvStoreState.CARRIER_AWAY), "degraded", "The carrier of sealed KV does not answer"),
    "kv store": (facts(kv_store=KvStoreState.STORE_AWAY), "degraded", "The store of sealed KV does not answer"),
    "kv refused": (facts(kv_store=KvStoreState.REFUSES), "degraded", "The store of sealed KV refuses blocks"),
    "witness": (facts(audit_witness="the witness w has never cosigned"), "degraded", "not cosigned: the witness w"),
    "disk low": (
        facts(disks=(DiskSpace("audit", 1 << 30, 100 << 30), DiskSpace("run", 50 << 30, 100 << 30))),
        "degraded",
        "1.0 GiB of disk are left: audit log",
    ),
    "disk full": (facts(disks=(DiskSpace("spill", 9, 1 << 30),)), "degraded", "The disk is full: spilled KV"),
    "gpu lost": (facts(cards=(card(state="lost", figures={}),)), "broken", "GPU 0 is lost: it has fallen off the bus"),
    "gpu to be reset": (facts(cards=(card(state="reset"),)), "broken", "GPU 0 is lost until it is reset"),
    "gpu not listed": (facts(cards=(card(state="absent"),)), "broken", "GPU 0 is not listed by the driver"),
    "gpu that was lost too often": (
        facts(cards=(card(out="card 0 was lost 5 times in a day"),)),
        "degraded",
        "GPU 0 gets no engine: card 0 was lost 5 times",
    ),
    "engine without a gpu": (
        replace(down(state="failed", cause="no GPU has room"), unplaced=frozenset({"athanor-mini"})),
        "broken",
        "engine sandbox of athanor-mini is down: no GPU has room",
    ),
    "gpu errors": (facts(cards=(told(ecc_uncorrected=2),)), "degraded", "uncorrected errors of memory: 2"),
    "gpu row": (facts(cards=(told(remap_pending=1),)), "degraded", "GPU 0 has bad memory: a bad row"),
    "gpu hot": (facts(cards=(told(clock_reasons=0x40, temperature_c=91),)), "degraded", "slowed down at 91 degrees"),
    "batch stuck": (
        facts(batches=queue(batch(still_s=1_000.0, obstacle="model", running=0), batch(id="b2"))),
        "degraded",
        "No line of batch batch_7 ends: its model is not ready (athanor-mini)",
    ),
    "batch in turn": (facts(batches=queue(batch(still_s=1_000.0, obstacle="turn"))), "note", "have their turn"),
    "batch storage": (facts(batches=queue(stored_bytes=15 << 30)), "degraded", "take 15 GiB of 16 GiB"),
    "gpu unknown": (facts(cards_problem="NVML hangs"), "degraded", "The GPUs cannot be watched: NVML hangs"),
    "null": (facts(models=(model(runner="null"),)), "note", "computes nothing"),
    "policy": (facts(policy=replace(POLICY, last_error="policy.yaml:3:1: no")), "degraded", "reload changed nothing"),
    "certificate ended": (facts(certificate=(NOW - 90 * DAY_S, NOW - DAY_S)), "broken", "certificate has expired"),
    "certificate ends today": (facts(certificate=(NOW, NOW + 7_300)), "degraded", "certificate ends in 2 hours"),
    "certificate ends": (facts(certificate=(NOW, NOW + 9.5 * DAY_S)), "degraded", "certificate ends in 9 days"),
    "clock behind": (facts(certificate=(NOW + DAY_S, NOW + 90 * DAY_S)), "broken", "certificate is not valid yet"),
    "queue": (facts(points=points(waiting=7)), "degraded", "7 requests wait"),
    "kv": (facts(points=points(kv_held=0.97)), "degraded", "all KV memory"),
    "slow": (facts(latency=Latency(requests=40, window_s=60, first_token=Spread(1, 3.14, 4))), "degraded", "3.1 s"),
    "failures": (
        facts(recent=(*ended("failed", "unavailable", "alpha", 2), *ended("ok", None, "beta", 9))),
        "broken",
        "2 of the last minute's 11 requests failed by our fault: unavailable",
    ),
    "refused": (
        facts(recent=(*ended("refused", "rate_limited", "beta", 6), *ended("ok", None, "beta", 2))),
        "degraded",
        "beta is refused (rate_limited): 6 of its last minute's 8 requests",
    ),
    "strangers": (facts(recent=tuple(ended("refused", "unauthenticated", None, 7))), "note", "7 calls"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_matter_is_said_once_with_its_level(name: str) -> None:
    """One alert, at its level, in words; those that can be mended say how."""
    given, level, words = CASES[name]
    (alert,) = alerts(given)
    assert alert.level == level
    assert words in alert.what
    assert alert.who or alert.do
    assert alert.do or level == "note"


def test_who_is_affected_is_counted() -> None:
    """A model that is down concerns those who may use it; a tenant's own concerns that tenant."""
    (shared,) = alerts(down(state="failed"))
    assert shared.who == "All 2 tenants that may use it"
    own = model(tenant="gamma", sandboxes=(sandbox("engine", state="failed"),))
    (alert,) = alerts(facts(own=(own,)))
    assert alert.who == "Tenant gamma"


def test_the_worst_comes_first() -> None:
    """Broken before degraded before notes."""
    given = facts(draining=True, defects=1, integrity_failures=1)
    assert [alert.level for alert in alerts(given)] == ["broken", "degraded", "note"]


def test_what_is_over_is_no_alert() -> None:
    """A wave of waiting requests, one refusal in passing and mistakes of callers are none."""
    mistakes = ended("invalid", "invalid_request", "beta", 20)
    wave = (*points(waiting=7)[:-1], Point(UP_S, 0, 1, 0, 0.2, 0))
    once = ended("refused", "rate_limited", "beta", 1)
    assert alerts(facts(recent=(*once, *mistakes), points=wave)) == ()


def test_since_when_is_told_by_the_wall_clock_of_now() -> None:
    """The history is measured in the gateway's life; a label has Unix time."""
    (alert,) = alerts(facts(points=points(waiting=7)))
    assert alert.since == NOW - 40


def test_a_hung_engine_is_ended_by_its_process() -> None:
    """The command names the engine's process, and the log where none is known."""
    (alert,) = alerts(facts(silence_s={"athanor-mini": 40.0}))
    assert alert.command == "kill -KILL 4242"
    unknown = facts(silence_s={"athanor-mini": 40.0}, models=(model(sandboxes=(sandbox("engine", pid=None),)),))
    assert alerts(unknown)[0].command.startswith("athanor logs")


def test_one_engine_that_hangs_is_one_alert() -> None:
    """Hung and silent with requests for long, it is told once, by its requests; hung while it is idle, by its probe,
    with the command that ends it."""
    idle = down(state="hung", cause="answers no probe")
    (alert,) = alerts(idle)
    assert (alert.key, alert.command) == ("hung/athanor-mini//engine", "kill -KILL 4242")
    (alert,) = alerts(replace(idle, silence_s={"athanor-mini": 40.0}))
    assert alert.key == "silent/athanor-mini"
