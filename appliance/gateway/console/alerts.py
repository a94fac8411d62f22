"""Alerts for the operator: what is broken, who is affected, what to do. Pure.

Each alert is three short sentences, and only what an operator can act on, or has to know, is one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from appliance.common.batch_status import BatchQueue
from appliance.common.cards import ABSENT, LOST, RESET, CardStatus
from appliance.common.certificate_dates import DAY_S, RENEW_DAYS, whole_days
from appliance.common.disk_space import PLACES, DiskSpace
from appliance.common.figures import counted, size
from appliance.common.kv_store_state import KvStoreState
from appliance.common.outcomes import FAILED, REFUSED
from appliance.common.status import Alert, Latency, ModelView, Point, PolicyStatus, SandboxStatus, is_unsafe
from appliance.gateway.console.batch_alerts import batch_alerts
from appliance.gateway.console.kv_store_alerts import kv_store_alerts
from appliance.gateway.console.latency import WINDOW_S
from appliance.gateway.telemetry.store import TraceSummary

RECENT_S = 60.0
"""Seconds since their end within which requests count as recent."""

FAILED_SHARE = 0.01
"""Share of recent requests that have to fail for an alert, as in the shipped alert rules."""

REFUSED_SHARE = 0.5
"""Share of one tenant's recent requests that have to be refused for an alert."""

MIN_REFUSED = 5
"""Least number of refusals for an alert."""

WAIT_S = 20.0
"""Seconds for which requests must have waited, without a break, for an alert."""

KV_FULL = 0.95
"""Share of KV held by running requests from which on new ones wait for memory."""

SLOW_S = 2.5
"""Seconds to the first token that one request in ten has to exceed for an alert, as in the shipped alert rules."""

MIN_SLOW = 20
"""Least number of requests for which one in ten is significant."""

SILENCE_S = 15.0
"""Seconds without a finished step, in an engine with requests, that no long step explains."""

RESTARTS = 3
"""Restarts within the history from which on the alert is more than a note."""

SHOWN = 3
"""Names listed before "and N more"."""

ORDER = {"broken": 0, "degraded": 1, "note": 2}

AUDIT_SAID = "the audit log cannot be written: "
"""Beginning of the audit writer's own message, which the alert's text repeats."""

_LOGS = "athanor logs --level warning"

_GONE = {
    LOST: "is lost: it has fallen off the bus",
    RESET: "is lost until it is reset",
    ABSENT: "is not listed by the driver",
}
"""What is said of a GPU on which nothing can compute."""


_LOST = (
    "Its engines were ended; each for which another GPU has room is placed there. Reset the card, or start the machine "
    "anew; the kernel's log has the Xid."
)
"""What is to be done about a GPU that is lost."""

_NO_GPU = (
    "It is started as soon as a GPU has room: its own, once that has answered for long enough, or another, with a "
    "smaller gpu_share or fewer models there, and athanor reload."
)
"""What is to be done for an engine whose GPU was lost and for which no other has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """State from which alerts are derived."""

    now: float
    """Unix time."""
    up_s: float
    """Seconds since the gateway's start, as points of the history have them."""
    attached: bool
    """Whether the supervisor is there."""
    draining: bool
    sandbox: str
    models: tuple[ModelView, ...]
    own: tuple[ModelView, ...]
    users: dict[str, int]
    """How many tenants may use a model."""
    num_tenants: int
    policy: PolicyStatus
    audit_problem: str
    audit_refuses: bool
    audit_witness: str
    integrity_failures: int
    """Since the start."""
    silence_s: dict[str, float]
    """Seconds for which each model's engine has had requests and has finished no step."""
    defects: int
    """Promises that engines themselves found broken."""
    points: tuple[Point, ...]
    latency: Latency
    recent: tuple[TraceSummary, ...]
    """Requests that ended in the last ``RECENT_S``, the newest first."""
    certificate: tuple[float, float] | None = None
    """Unix times between which the certificate that the gateway serves with is valid; None: it has none."""
    disks: tuple[DiskSpace, ...] = ()
    """Space for what the supervisor writes."""
    cards: tuple[CardStatus, ...] = ()
    """GPUs that models use."""
    cards_problem: str = ""
    """Why nothing is known of them; empty where they are read, and where there are none."""
    batches: BatchQueue | None = None
    """Batches that are not over; None where no files are kept."""
    charges_problem: str = ""
    """Why charges of running requests would not outlive the gateway; empty while they do."""
    kv_store: KvStoreState = KvStoreState.NONE
    """State of the store outside of this machine for sealed KV."""
    unplaced: frozenset[str] = frozenset()
    """Models of which an engine has no GPU, since its own was lost and no other has room."""


def alerts(facts: Facts) -> tuple[Alert, ...]:
    """Return all alerts of now, the worst first."""
    told = (_sandboxes, _promises, _charges, _requests, _load, _policy, _certificate, _disks, _cards)
    found = [alert for tell in told for alert in tell(facts)]
    found += [*batch_alerts(facts.batches, facts.now), *kv_store_alerts(facts.kv_store)]
    return tuple(sorted(found, key=lambda one: ORDER[one.level]))


def _sandboxes(facts: Facts) -> Iterator[Alert]:
    """Yield alerts about sandboxes and the supervisor."""
    if facts.draining:
        yield Alert(
            key="draining",
            level="note",
            what="The appliance is shutting down",
            who="Running requests may end; new ones are told to try again.",
        )
    if not facts.attached:
        yield Alert(
            key="supervisor",
            level="broken",
            what="The supervisor is gone",
            who=_everybody(facts.num_tenants),
            do="No sandbox can be started until it is back; the gateway looks for it five times a second.",
            command="systemctl status athanor-supervisor",
        )
    for model in (*facts.models, *facts.own):
        for box in model.sandboxes:
            if box.state == "hung":
                silent = box.role == "engine" and facts.silence_s.get(model.name, 0.0) >= SILENCE_S
                if not silent:
                    yield _hung(model, box, facts.users.get(model.name, 0))
            elif box.state not in ("ready", "shared", "asleep") and facts.attached:
                no_gpu = box.role == "engine" and model.name in facts.unplaced
                yield _down(model, box, facts.users.get(model.name, 0), no_gpu=no_gpu)
    for name, silence_s in facts.silence_s.items():
        if silence_s >= SILENCE_S:
            yield Alert(
                key=f"silent/{name}",
                level="broken",
                what=f"The engine of {name} has requests and finishes no step",
                since=facts.now - silence_s,
                who="Everybody whose request is in it.",
                do="It is ended and started again after sandbox: step_timeout_s. To do it now, end its process:",
                command=_ending(facts.models, name),
            )
    grown = facts.points[-1].restarts - facts.points[0].restarts if facts.points else 0
    if grown > 0:
        minutes = max(1, round((facts.points[-1].at - facts.points[0].at) / 60))
        lately = "in the last minute" if minutes == 1 else f"in the last {minutes} min"
        yield Alert(
            key="restarts",
            level="degraded" if grown >= RESTARTS else "note",
            what=f"A sandbox died {lately}, and is back or coming"
            if grown == 1
            else f"Sandboxes died {grown} times {lately}",
            who="Requests that had shown nothing were tried again; others ended with an error.",
            do="A request that kills an engine is quarantined at its second time. The log has each cause.",
            command=_LOGS,
        )


def _ending(models: tuple[ModelView, ...], name: str) -> str:
    """Return the command that ends a model's engine; the log's where its process is not known."""
    pids = [box.pid for model in models if model.name == name for box in model.sandboxes if box.role == "engine"]
    return f"kill -KILL {pids[0]}" if pids and pids[0] is not None else _LOGS


def _hung(model: ModelView, box: SandboxStatus, users: int) -> Alert:
    name = f"{model.name} of {model.tenant}" if model.tenant else model.name
    return Alert(
        key=f"hung/{model.name}/{model.tenant}/{box.role}",
        level="broken",
        what=f"The {box.role} sandbox of {name} {box.cause}",
        who=f"Tenant {model.tenant}" if model.tenant else _everybody(users),
        do="It is ended and started again after sandbox: step_timeout_s. To do it now, end its process:",
        command=f"kill -KILL {box.pid}" if box.pid is not None else _LOGS,
    )


def _down(model: ModelView, box: SandboxStatus, users: int, *, no_gpu: bool) -> Alert:
    name = f"{model.name} of {model.tenant}" if model.tenant else model.name
    who = f"Tenant {model.tenant}" if model.tenant else _everybody(users)
    key = f"down/{model.name}/{model.tenant}/{box.role}"
    if box.state == "booting" and not box.restarts and not box.cause:
        return Alert(
            key=key,
            level="note",
            what=f"The {box.role} sandbox of {name} is booting",
            since=box.since,
            who=who,
            do="Nothing: weights are read, then it serves. Requests wait 8 s, then are told to try again.",
        )
    cause = f": {box.cause}" if box.cause else ""
    return Alert(
        key=key,
        level="broken",
        what=f"The {box.role} sandbox of {name} is down{cause}",
        since=box.since,
        who=who,
        do=_NO_GPU if no_gpu else "It is started again by itself. If it goes on dying, the log has all it said.",
        command="athanor status" if no_gpu else "athanor logs -n 50",
    )


def _promises(facts: Facts) -> Iterator[Alert]:
    """Yield alerts about broken promises to tenants."""
    if is_unsafe(facts.sandbox):
        yield Alert(
            key="unsafe",
            level="broken",
            what="There is no sandbox: models and prompts run with this user's rights",
            who=_everybody(facts.num_tenants),
            do="Never serve strangers like this. Start without unsafe_no_sandbox.",
        )
    if facts.integrity_failures:
        yield Alert(
            key="integrity",
            level="broken",
            what=f"{counted(facts.integrity_failures, 'request')} met KV memory that was not their own",
            who="They were ended before anything was read.",
            do="Keep a support archive, and tell the maintainers.",
            command="athanor bundle",
        )
    if facts.defects:
        yield Alert(
            key="defects",
            level="degraded",
            what="An engine found a promise between tenants broken",
            who="Some tenant was served less than its share.",
            do="Keep a support archive, and tell the maintainers.",
            command="athanor bundle",
        )
    if facts.audit_problem:
        yield Alert(
            key="audit",
            level="broken" if facts.audit_refuses else "degraded",
            what=f"The audit log cannot be written: {facts.audit_problem.removeprefix(AUDIT_SAID)}",
            who="All requests are refused." if facts.audit_refuses else "Requests go on without entries.",
            do="Make room on its disk, or mend its directory.",
            command="athanor doctor",
        )
    if facts.audit_witness:
        yield Alert(
            key="witness",
            level="degraded",
            what=f"The audit log is not cosigned: {facts.audit_witness}",
            who="Requests go on; what the log says is not confirmed elsewhere.",
            do="A refusal may be a sign that the log was changed: keep a copy, and compare it with the witness.",
            command="athanor audit witness",
        )
    null = [model.name for model in facts.models if model.runner == "null"]
    if null:
        yield Alert(
            key="null",
            level="note",
            what=f"{_names(null)} computes nothing: the null runner of a benchmark",
            who="Answers are meaningless ids.",
        )


def _charges(facts: Facts) -> Iterator[Alert]:
    """Yield an alert about charges that a killed gateway would take with it."""
    if facts.charges_problem:
        yield Alert(
            key="charges",
            level="degraded",
            what="What running requests are to be charged is not kept over the end of the gateway",
            who="Requests go on; if the gateway is killed, what it serves then is charged to nobody.",
            do=f"It is tried again each second; {facts.charges_problem}.",
            command=_LOGS,
        )


def _requests(facts: Facts) -> Iterator[Alert]:
    """Yield alerts about failed and refused requests."""
    recent = facts.recent
    failed = [one for one in recent if one.outcome == FAILED]
    if failed and len(failed) > FAILED_SHARE * len(recent):
        reasons = Counter(one.error or "unknown" for one in failed)
        yield Alert(
            key="failures",
            level="broken",
            what=f"{len(failed)} of the last minute's {counted(len(recent), 'request')} failed by our fault: "
            f"{_names([reason for reason, _ in reasons.most_common()])}",
            who=f"Tenants {_names(_callers(failed))}",
            do="Open one of them; the log has the cause.",
            command=_LOGS,
        )
    by_tenant = Counter(one.tenant for one in recent)
    turned = Counter(one.tenant for one in recent if one.outcome == REFUSED and one.tenant is not None)
    for tenant, count in turned.most_common(SHOWN):
        if count >= MIN_REFUSED and count >= REFUSED_SHARE * by_tenant[tenant]:
            refused = [one for one in recent if one.outcome == REFUSED and one.tenant == tenant]
            reason, _ = Counter(one.error or "refused" for one in refused).most_common(1)[0]
            yield Alert(
                key=f"refused/{tenant}",
                level="degraded",
                what=f"{tenant} is refused ({reason}): {count} of its last minute's "
                f"{counted(by_tenant[tenant], 'request')}",
                who=f"Only tenant {tenant}",
                do="If it shall have more, raise its limits in the policy and reload.",
                command="athanor reload",
            )
    strangers = sum(one.tenant is None and one.error == "unauthenticated" for one in recent)
    if strangers >= MIN_REFUSED:
        yield Alert(
            key="strangers",
            level="note",
            what=f"{strangers} calls of the last minute had no valid key",
            who="Nobody who is known.",
            do="A client with an old key, or somebody who tries keys.",
        )


def lasting(points: Iterable[Point], holds: Callable[[Point], bool]) -> float | None:
    """Return since when something holds without a break up to the newest point; None when it does not hold there."""
    since = None
    for point in reversed(tuple(points)):
        if not holds(point):
            break
        since = point.at
    return since


def _load(facts: Facts) -> Iterator[Alert]:
    """Yield alerts about load."""
    waiting = lasting(facts.points, lambda point: point.waiting > 0)
    if waiting is not None and facts.up_s - waiting >= WAIT_S:
        yield Alert(
            key="queue",
            level="degraded",
            what=f"{counted(facts.points[-1].waiting, 'request')} wait for their turn",
            since=facts.now - (facts.up_s - waiting),
            who="Whoever calls now. Tenants take turns, so light ones wait least.",
            do="See who has most in flight; lower concurrency in the policy, or serve on more.",
            command="athanor top",
        )
    full = lasting(facts.points, lambda point: point.kv_held >= KV_FULL)
    if full is not None and facts.up_s - full >= WAIT_S:
        yield Alert(
            key="kv",
            level="degraded",
            what="Running requests hold all KV memory",
            since=facts.now - (facts.up_s - full),
            who="New requests wait; who is above its reservation may be set back.",
            do="Raise kv_bytes in athanor.yaml, or lower concurrency or context in the policy.",
        )
    first = facts.latency.first_token
    if first is not None and facts.latency.requests >= MIN_SLOW and first.p90 > SLOW_S:
        yield Alert(
            key="slow",
            level="degraded",
            what=f"One first token in ten takes more than {first.p90:.1f} s",
            who=f"Of the {facts.latency.requests} requests answered in the last {round(WINDOW_S / 60)} min.",
            do="A slow one, opened, shows which phase takes the time.",
            command="athanor traces",
        )


def _policy(facts: Facts) -> Iterator[Alert]:
    if facts.policy.last_error is not None:
        yield Alert(
            key="policy",
            level="degraded",
            what=f"The last policy reload changed nothing: {facts.policy.last_error}",
            since=facts.policy.last_attempt_at,
            who=f"Nobody yet: the policy before, {facts.policy.digest[:12]}, is in force.",
            do="Mend the file, then athanor reload. All its problems:",
            command=f"athanor policy check {facts.policy.file}",
        )


def _disks(facts: Facts) -> Iterator[Alert]:
    """Yield one alert for all places that lie on disks with too little space; several are often on one disk."""
    low = sorted((one for one in facts.disks if one.low), key=lambda one: one.free)
    if not low:
        return
    places = _names([PLACES[one.place] for one in low])
    yield Alert(
        key="disk",
        level="degraded",
        what=f"The disk is full: {places}" if low[0].full else f"{size(low[0].free)} of disk are left: {places}",
        who="Whoever needs what is written there: entries, blocks or starts are lost or refused once it is full.",
        do="Make room on it, or give it another disk in athanor.yaml.",
        command="athanor doctor",
    )


def _cards(facts: Facts) -> Iterator[Alert]:
    """Yield alerts about GPUs that models use."""
    if facts.cards_problem:
        yield Alert(
            key="gpu watch",
            level="degraded",
            what=f"The GPUs cannot be watched: {facts.cards_problem}",
            who="Nobody yet: engines go on. None that takes too much of a card's memory is ended.",
            do="If nvidia-smi hangs too, the driver does, and the machine has to start anew.",
            command="nvidia-smi",
        )
    for card in facts.cards:
        users = _names(list(card.engines)) if card.engines else "No model: no engine has it now."
        command = f"nvidia-smi -q -i {card.uuid or card.index}"
        if card.state in _GONE:
            key, what = f"gpu/{card.index}", f"GPU {card.index} {_GONE[card.state]}"
            yield Alert(key=key, level="broken", what=what, who=users, do=_LOST, command=command)
        elif card.out:
            what = f"GPU {card.index} gets no engine: {card.out}"
            do = "If it comes and goes, replace it; once it is mended, a restart of the appliance gives it engines."
            yield Alert(key=f"gpu out/{card.index}", level="degraded", what=what, who=users, do=do, command=command)
        elif card.failing:
            do = "See its remapped rows; a reset applies what is pending. If errors come back, replace it."
            what = f"GPU {card.index} has bad memory: {card.failing}"
            yield Alert(key=f"gpu memory/{card.index}", level="degraded", what=what, who=users, do=do, command=command)
        elif set(card.throttled) & {"heat", "hardware"}:
            degrees = card.figures.get("temperature_c")
            what = f"GPU {card.index} is slowed down" + ("" if degrees is None else f" at {degrees} degrees Celsius")
            do = "Look at the cooling, and at the power supply where it is not hot."
            yield Alert(key=f"gpu heat/{card.index}", level="degraded", what=what, who=users, do=do, command=command)


def _certificate(facts: Facts) -> Iterator[Alert]:
    """Yield an alert about the certificate in use, which may be older than the file's."""
    begins, ends = facts.certificate or (0.0, math.inf)
    if begins <= facts.now < ends - RENEW_DAYS * DAY_S:
        return
    valid = begins <= facts.now < ends
    if facts.now < begins:
        what, do = "is not valid yet", "See if this machine's clock is right; else wait, or use the one before."
    else:
        what = f"ends in {whole_days(ends - facts.now)}" if valid else "has expired"
        do = "Renew it: the gateway takes the new files within seconds. If it has not, doctor says why."
    yield Alert(
        key="certificate",
        level="degraded" if valid else "broken",
        what=f"The certificate {what}",
        since=ends if facts.now >= ends else None,
        who="Everybody who will call then." if valid else "Everybody: clients refuse to connect.",
        do=do,
        command="athanor doctor",
    )


def _callers(failed: list[TraceSummary]) -> list[str]:
    counts = Counter(one.tenant or "unknown" for one in failed)
    return [tenant for tenant, _ in counts.most_common()]


def _everybody(count: int) -> str:
    return "The one tenant" if count == 1 else f"All {count:,} tenants that may use it" if count else "Nobody"


def _names(names: list[str]) -> str:
    shown, more = names[:SHOWN], len(names) - SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
