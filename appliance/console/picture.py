"""What one look of the operator's console shows, as values: filled by the gateway, drawn by the page.

Nothing that a tenant wrote is among it: names, counts, times and reasons only. Times are seconds, a moment is Unix
time; None means unknown or unlimited. Lists are bounded here, at their source, and say how much they leave out.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.status import Alert, PolicyStatus
from appliance.telemetry.store import TraceSummary

MAX_TENANT_ROWS = 12
"""Tenants of one look: a page of the table."""

MAX_ACCOUNTS = 8
"""Accounts of KV shown apart, for each model: as many as colours that can be told from each other."""

MAX_TRACE_ROWS = 20
"""Requests of one look."""

MAX_OWN_SANDBOXES = 32
"""Sandboxes of single tenants shown."""

MAX_FIND_CHARS = 64
"""Characters of a tenant's name that are searched for."""

OUTCOMES = ("", "ok", "refused", "cancelled", "failed")
"""What requests may be filtered by; the first is no filter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the page asks for in one look."""

    after: float = 0.0
    """Points of the history later than this."""
    seen: str = ""
    """``Requests.mark`` of the list that the page has: the same one is not sent again."""
    offset: int = 0
    """Tenants passed over."""
    find: str = ""
    """Part of the tenants' names; empty: all."""
    outcome: str = ""
    """Of the requests listed, one of ``OUTCOMES``."""


@dataclass(frozen=True, slots=True)
class Point:
    """The appliance at one moment."""

    at: float
    tokens: int
    """Output tokens received from engines since the start."""
    running: int
    waiting: int
    kv_held: float
    """Share of all KV blocks that running requests hold, 0 to 1."""
    restarts: int
    """Restarts of all sandboxes since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxView:
    """One sandbox."""

    role: str
    """``engine`` or ``text``."""
    state: str
    kind: str
    pid: int | None
    generation: int
    restarts: int
    since: float
    """When it entered its state."""
    cause: str = ""
    """Why it is not ready, as the supervisor or the link said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountView:
    """One account of KV in one engine; in blocks."""

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
    """The KV pool of one engine; in blocks."""

    blocks: int
    available: int
    """Free, or cached and evictable, as the engine's last step said."""
    block_tokens: int
    accounts: tuple[AccountView, ...]
    """The largest first."""
    other_accounts: int = 0
    """Accounts that are not among these, with what they have together."""
    other_held: int = 0
    other_cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model, or one tenant's own sandboxes of it."""

    name: str
    state: str
    runner: str
    tenant: str
    """Whose own these are; empty: shared."""
    tokens: int
    """Output tokens since the start."""
    running: int
    waiting: int
    sandboxes: tuple[SandboxView, ...]
    kv: KvView | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantView:
    """One tenant with what it may use and what it uses."""

    id: str
    isolation_class: str
    priority: str
    weight: int
    retention: str
    group: str | None
    in_flight: int
    concurrency: int
    requests: int
    tokens: int
    refused: int
    """Counts since the start, of requests that ended."""
    tokens_per_s: float
    requests_per_s: float
    refused_per_s: float
    """Rates of the last seconds, of requests that ended."""
    requests_per_minute: int
    tokens_per_minute: int
    requests_left: int | None
    tokens_left: int | None
    """What the tenant could use at once; None: all of it, since it has used none."""
    max_context_tokens: int
    max_output_tokens: int
    kv_reserved: float
    kv_cap: float
    """Shares of each model's pool, 0 to 1."""
    kv_blocks: int
    """Blocks with its content now, in all engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """A page of tenants: those at work first, then by name."""

    total: int
    matching: int
    offset: int
    active: int
    """Tenants with a request in flight, or that had one end in the last seconds."""
    rows: tuple[TenantView, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a time, in seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Times of requests that were answered lately; None: of none."""

    requests: int
    window_s: float
    """How far back the oldest of them lies."""
    first_token: Spread | None = None
    each_token: Spread | None = None
    total: Spread | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The newest finished requests."""

    mark: str
    recorded: int
    kept: int
    """How many can still be looked at."""
    rows: tuple[TraceSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One look."""

    now: float
    version: str
    page: str
    """Digest of the page's files: another one than the page was loaded with means that it is out of date."""
    started_at: float
    ready: bool
    sandbox: str
    limits: str
    """One sentence on what limits of memory, CPU and processes are in force."""
    tokens: int
    """Output tokens of all engines since the start."""
    alerts: tuple[Alert, ...]
    models: tuple[ModelView, ...]
    own: tuple[ModelView, ...]
    own_total: int
    tenants: Tenants
    latency: Latency
    policy: PolicyStatus
    period_s: float
    """Between two points of the history."""
    points: tuple[Point, ...]
    requests: Requests | None
    """None: what the page has is still right."""
