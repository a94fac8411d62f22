"""State of the appliance as values: sandboxes, tenants, KV, rates, policy and alerts.

The gateway builds it in one place (``appliance.gateway.watch.state``), so that a number means the same in ``athanor
status``, in ``athanor top`` and on the console. Times are seconds; a moment is Unix time, told as if the machine's
clock had always been as it is now. None means unknown or unlimited, as each field says. Nothing that a tenant wrote is
among it: names, counts, times and reasons only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from appliance.common.batch_status import BatchQueue
from appliance.common.cards import CardStatus
from appliance.common.checkpoint_status import CheckpointStatus
from appliance.common.figures import counted, printable
from appliance.common.fleet_status import FleetStatus

UNSAFE_KINDS = ("none", "unsafe")
"""Sandbox kinds that begin so are no sandbox: shown loudly wherever they appear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStatus:
    """State of one sandbox."""

    role: str = "text"
    """``engine`` or ``text``."""
    state: str
    """``booting``, ``ready``, ``hung``, ``draining``, ``failed``, ``stopped``, ``asleep``; ``shared`` where a tenant
    has no such sandbox of its own."""
    kind: str
    """Kind of its isolation: ``gvisor-systrap``, ... or a kind that begins with one of ``UNSAFE_KINDS``."""
    generation: int = 0
    """Boots since the appliance started; the first is 1."""
    restarts: int = 0
    pid: int | None = None
    uptime_s: float | None = None
    """Seconds since it became ready, whether or not it hangs; None before that."""
    since: float | None = None
    """When it entered its state; None where there is no such sandbox."""
    cause: str = ""
    """Why it is not ready, or hangs, as the supervisor or the link said."""
    frozen: bool = False
    """Whether it is frozen because nobody uses it; it is ready all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus(SandboxStatus):
    """State of one engine sandbox."""

    role: str = "engine"
    num_blocks: int = 0
    """KV blocks in the pool."""
    free_blocks: int = 0
    cached_blocks: int = 0
    """Both as in ``KvView``."""
    running: int = 0
    """Requests in the last step, those that have ended since left out."""
    waiting: int = 0
    """Requests that wait inside the engine."""
    computes: str = ""
    """What it says that it computes with, and the times of the trial that chose this."""
    adapters: int = 0
    """Adapters that it has in memory."""
    weights: str = ""
    """Form in which it holds its weights, in the words of ``isolation.ipc.messages.WeightForm``; empty: not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountView:
    """One account of KV in one engine, in blocks."""

    name: str
    kind: str
    """``tenant``, ``group`` or ``public``."""
    held: int
    cached: int
    reserved: int
    cap: int
    lost: int = 0
    preempted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvView:
    """KV pool of one engine, in blocks."""

    blocks: int
    free: int
    """Blocks that a request can have: empty, or cached and evictable, as the engine's last step said."""
    cached: int
    """Part of the free blocks whose content a later request may find, as the accounts last said."""
    block_tokens: int
    accounts: tuple[AccountView, ...]
    """Accounts with the most blocks, the largest first."""
    other_accounts: int = 0
    """Number of accounts that are not listed; their blocks together follow."""
    other_held: int = 0
    other_cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One served model, or one tenant's own sandboxes of it."""

    name: str
    state: str
    """``ready``: a request would be answered now; ``starting``, ``hung``, ``draining``, ``waking`` or ``asleep``."""
    runner: str
    tenant: str
    """Tenant whose own sandboxes these are; empty: shared."""
    running: int
    waiting: int
    sandboxes: tuple[SandboxStatus, ...]
    kv: KvView | None
    """None while there is no engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One served model and its two sandboxes, as ``athanor status`` shows them."""

    name: str
    state: str
    """``ready`` when a request would be taken now."""
    engine: EngineStatus
    text: SandboxStatus
    runner: str = "model"
    """``null``: a benchmark's, which computes nothing."""
    tenant: str = ""
    """Tenant whose own sandboxes these are; empty: shared. An engine that it does not have is ``shared``."""
    used_at: float | None = None
    """When a request last used it; None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStatus:
    """One tenant of the policy in force. Counts are since the start (see ``Counts``), rates those of the last seconds
    (see ``Rates``); None: not counted."""

    id: str
    isolation_class: str
    """``shared``, ``strict`` or ``dedicated``."""
    in_flight: int
    """Requests of this tenant now."""
    max_in_flight: int | None = None
    """The concurrency limit; None: none."""
    requests: int | None = None
    tokens: int | None = None
    """Input and output tokens."""
    refused: int | None = None
    output_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    refused_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUse:
    """Requests of one tenant that have ended since the start, by outcome, and their tokens: the same counts as those of
    the metrics, whatever label they have there."""

    tenant: str
    """Empty: calls that were refused before their tenant was known."""
    series: str
    """Label under which its requests count from now on: its id, or ``other``."""
    ok: int
    refused: int
    invalid: int
    cancelled: int
    failed: int
    input_tokens: int
    cached_tokens: int
    """Part of the input tokens that was found in KV."""
    output_tokens: int

    @property
    def requests(self) -> int:
        """All requests."""
        return self.ok + self.refused + self.invalid + self.cancelled + self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTable:
    """Every tenant that has called since the gateway started, by id."""

    started_at: float
    tenants: tuple[TenantUse, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests by how they ended (``appliance.common.outcomes``), and tokens, since the gateway's start."""

    ok: int = 0
    refused: int = 0
    invalid: int = 0
    cancelled: int = 0
    failed: int = 0
    input_tokens: int = 0
    """Prompts' tokens, counted once an engine has taken their request up."""
    cached_tokens: int = 0
    """Part of the input that the engine found in its KV."""
    output_tokens: int = 0
    """As they are delivered; in the end what the request is charged."""

    @property
    def requests(self) -> int:
        """Requests that have ended."""
        return self.ok + self.refused + self.invalid + self.cancelled + self.failed

    @property
    def tokens(self) -> int:
        """Input and output tokens."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Increases of ``Counts``, for each second of the same ``over_s`` seconds by a monotonic clock."""

    over_s: float = 0.0
    """0: the gateway has just started, and there are no rates yet."""
    requests: float = 0.0
    refused: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplianceLoad:
    """What the whole appliance does now: every surface shows these numbers, or sums that are equal to them."""

    up_s: float = 0.0
    """Since the gateway's start."""
    running: int = 0
    """Requests in the engines' last steps."""
    waiting: int = 0
    """Requests that wait inside engines."""
    in_flight: int = 0
    """Admitted outputs that have not ended, wherever they are: a request of ``n`` outputs counts ``n`` times."""
    requests: int = 0
    """Requests that have ended since the start, those of ``counts`` together."""
    counts: Counts = Counts()
    rates: Rates = Rates()
    kv_blocks: int = 0
    kv_held: int = 0
    """Blocks that requests hold: all that are not free."""
    kv_free: int = 0
    kv_cached: int = 0
    sandboxes: int = 0
    """Sandboxes that are there or are being booted, those of single tenants among them."""
    sandboxes_ready: int = 0
    restarts: int = 0
    """Restarts of these sandboxes since the supervisor's start."""


@dataclass(frozen=True, slots=True)
class Point:
    """The appliance at one moment."""

    at: float
    """Seconds since the gateway's start, by a monotonic clock."""
    tokens: int
    """Output tokens since the start, as in ``Counts``."""
    running: int
    waiting: int
    kv_held: float
    """Share of all KV blocks that running requests hold, 0 to 1."""
    restarts: int
    """Restarts of all sandboxes since the start."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a time, in seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Times of requests that were answered lately; None where there were none."""

    requests: int
    window_s: float
    """How far back the oldest of them lies."""
    first_token: Spread | None = None
    each_token: Spread | None = None
    total: Spread | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """Policy in force, and how the last attempt to replace it ended."""

    digest: str
    loaded_at: float
    file: str
    last_error: str | None = None
    """Why the last reload changed nothing; None when it succeeded."""
    last_attempt_at: float | None = None
    """When it was last read, with whatever success; None: not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicPrefixStatus:
    """One public prefix in its model's engine."""

    id: str
    model: str
    state: str
    """``resident``; ``pending`` before it is; ``waiting`` for its model's sandboxes; ``refused``: see ``reason``."""
    tenants: int = 0
    """How many may begin with it."""
    num_tokens: int = 0
    num_blocks: int = 0
    """KV blocks that it keeps."""
    hits: int = 0
    """Requests that began with it since it became resident."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that the operator should know, in words."""

    key: str
    """Names the matter; it does not change from look to look."""
    level: str
    """``broken``: requests fail or tenants are less apart than promised; ``degraded``: it works, and not well;
    ``note``."""
    what: str
    who: str = ""
    """Whom it concerns."""
    do: str = ""
    """Remedy, in words."""
    command: str = ""
    """Command to type."""
    since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplianceStatus:
    """State of the whole appliance."""

    version: str
    started_at: float
    """When the gateway started, by the clock of that moment; ``load.up_s`` says how long ago that is."""
    sandbox: str
    """The sandbox kind that new sandboxes get, one of the ``kind`` values above."""
    cgroup: str
    """One sentence on what limits of memory, CPU and processes are in force."""
    models: tuple[ModelStatus, ...]
    tenants: tuple[TenantStatus, ...]
    policy: PolicyStatus
    load: ApplianceLoad = ApplianceLoad()
    latency: Latency = Latency(requests=0, window_s=0.0)
    public: tuple[PublicPrefixStatus, ...] = ()
    """Public prefixes of the policy in force."""
    own: tuple[ModelStatus, ...] = ()
    """Sandboxes of single tenants that are there or are being booted."""
    alerts: tuple[Alert, ...] = ()
    """Alerts of now, the worst first, as on the console."""
    cards: tuple[CardStatus, ...] = ()
    """GPUs that models use."""
    fleet: FleetStatus = field(default_factory=FleetStatus)
    """Its part in a fleet."""
    batches: BatchQueue | None = None
    """Batches that are not over, and what is kept; None where no files are."""
    checkpoints: tuple[CheckpointStatus, ...] = ()
    """Checkpoints that sandboxes begin with, the bases first; none where none are kept."""


SERVING_STATES = ("serving", "starting", "failed", "hung", "draining", "waking", "asleep")
"""States of a served model, as commands and the metric ``athanor_models`` name them."""


def serving_state(state: str, boxes: Iterable[str]) -> str:
    """Return which of ``SERVING_STATES`` a model is in.

    Args:
        state: of ``ModelStatus`` or ``ModelView``.
        boxes: states of its sandboxes.
    """
    if state == "ready":
        return "serving"
    return "failed" if state == "starting" and "failed" in boxes else state


MAX_SUMMARY_CHARS = 400
"""Longest line about a reload in a service's status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerStatus:
    """Keys of one token issuer."""

    name: str
    keys: tuple[str, ...]
    """Ids of the keys in force."""
    problem: str
    """Why the newest keys are not in force; empty where they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysStatus:
    """API keys in force."""

    file: str
    """Path of the key table."""
    digest: str
    """SHA-256 of the key table's file that is in force, in hex."""
    keys: int
    """Keys in the table, revoked and expired ones included."""
    loaded_at: float
    """Unix time."""
    problem: str = ""
    """Why the file as it is now is not in force; empty where it is."""
    issuers: tuple[IssuerStatus, ...] = ()
    """Issuers of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadOutcome:
    """Result of a reload of policy, keys and configuration. When not ``ok`` all that was before is still in force."""

    ok: bool
    digest: str
    """Digest of the policy in force after the attempt."""
    message: str
    """One line for the operator."""
    problems: tuple[str, ...] = ()
    """``file:line:column: path: message``, one each."""
    warnings: tuple[str, ...] = ()
    """What is no reason to refuse it and yet worth a look, a line each."""
    applied: tuple[str, ...] = ()
    """Keys of athanor.yaml that have come into force with it: ``KEY (OLD -> NEW)``."""
    restart: tuple[str, ...] = ()
    """Keys of athanor.yaml that have changed and come into force with a restart."""
    restart_command: str = ""
    """Command that restarts what is needed for them."""

    @property
    def summary(self) -> str:
        """The outcome on one line of at most ``MAX_SUMMARY_CHARS``, with the first problem of a refused reload: what
        systemctl status shows."""
        if self.ok:
            keys = counted(len(self.restart), "key")
            text = self.message + (f"; waiting for a restart: {keys} of athanor.yaml" if self.restart else "")
        else:
            more = f" (and {counted(len(self.problems) - 1, 'more problem')})" if len(self.problems) > 1 else ""
            text = f"reload refused, nothing changed: {''.join(self.problems[:1]) or self.message}{more}"
        return printable(text if len(text) <= MAX_SUMMARY_CHARS else f"{text[: MAX_SUMMARY_CHARS - 3]}...")


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Whether the appliance can answer a request now; ``reason`` says why not."""

    ready: bool
    reason: str = ""


def is_unsafe(kind: str) -> bool:
    """Whether a sandbox kind is none at all."""
    return kind.lower().startswith(UNSAFE_KINDS)


def runs_unsafe(status: ApplianceStatus) -> bool:
    """Whether anything in this appliance runs, or would be started, without a sandbox."""
    held = (kind for model in status.models for kind in (model.engine.kind, model.text.kind))
    return is_unsafe(status.sandbox) or any(is_unsafe(kind) for kind in held)
