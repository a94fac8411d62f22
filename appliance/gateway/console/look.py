"""One look of the operator's console: a question of the page and the values that answer it.

Lists are bounded here, at their source, and say how much they leave out.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.common.batch_status import BatchQueue
from appliance.common.cards import CardStatus
from appliance.common.status import Alert, ApplianceLoad, Latency, ModelView, Point, PolicyStatus, TenantStatus
from appliance.gateway.telemetry.store import TraceSummary

MAX_TENANT_ROWS = 12
"""Tenants of one look, a page of the table."""

MAX_ACCOUNTS = 8
"""Accounts of KV shown apart, for each model: as many as colours that can be told from each other."""

MAX_TRACE_ROWS = 20
"""Requests of one look."""

MAX_OWN_SANDBOXES = 32
"""Sandboxes of single tenants shown."""

MAX_FIND_CHARS = 64
"""Characters of a tenant's name that are searched for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One look as the page asks for it."""

    after: float = 0.0
    """Only points of the history later than this are wanted, in seconds since the gateway's start."""
    seen: str = ""
    """``Requests.mark`` of the list that the page has: the same one is not sent again."""
    offset: int = 0
    """Number of tenants to skip."""
    find: str = ""
    """Part of the names of tenants to show; empty: all."""
    outcome: str = ""
    """Outcome of the requests to list, one of ``appliance.common.outcomes``; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantView(TenantStatus):
    """One tenant with what it uses and what it may use."""

    priority: str
    weight: int
    retention: str
    group: str | None
    concurrency: int
    requests_per_minute: int
    tokens_per_minute: int
    requests_left: int | None
    tokens_left: int | None
    """Requests and tokens that the tenant could use at once; None: all of them, since it has used none."""
    max_context_tokens: int
    max_output_tokens: int
    kv_reserved: float
    kv_cap: float
    """Shares of each model's pool, 0 to 1."""
    kv_blocks: int
    """Blocks with its content now, in all engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """A page of tenants: those at work first, the busiest on top (``busiest_first``), then by name."""

    total: int
    matching: int
    offset: int
    active: int
    """Tenants at work: with a request in flight, or with one that ended in the seconds that rates are of."""
    rows: tuple[TenantView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The newest finished requests."""

    mark: str
    recorded: int
    kept: int
    """How many can still be looked at."""
    rows: tuple[TraceSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """State of the appliance as one look shows it."""

    now: float
    """Unix time, for labels and for the age of moments that are Unix time too."""
    version: str
    page: str
    """Digest of the page's files: another one than the page was loaded with means that it is out of date."""
    started_at: float
    ready: bool
    sandbox: str
    limits: str
    """One sentence on what limits of memory, CPU and processes are in force."""
    load: ApplianceLoad
    alerts: tuple[Alert, ...]
    models: tuple[ModelView, ...]
    cards: tuple[CardStatus, ...]
    """GPUs that models use."""
    batches: BatchQueue | None
    """Batches that are not over, and what is kept; None where no files are."""
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
