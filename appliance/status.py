"""What ``athanor status`` shows: the appliance's state as values, filled by the gateway, served by
the admin listener.

Times are seconds; a moment is Unix time. None means unknown or unlimited, as each field says.
"""

from __future__ import annotations

from dataclasses import dataclass

UNSAFE_KINDS = ("none", "unsafe")
"""Sandbox kinds that begin so are no sandbox: shown loudly wherever they appear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine sandbox."""

    state: str
    """``booting``, ``ready``, ``draining``, ``failed``, ``stopped``."""
    kind: str
    """What holds it: ``gvisor-systrap``, ... or a kind that begins with one of ``UNSAFE_KINDS``.
    """
    generation: int = 0
    """Boots of this sandbox since the appliance started; the first is 1."""
    restarts: int = 0
    pid: int | None = None
    uptime_s: float | None = None
    num_blocks: int = 0
    """KV blocks in the pool."""
    free_blocks: int = 0
    running: int = 0
    """Requests in the last step."""
    waiting: int = 0
    """Requests that wait inside the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStatus:
    """One text sandbox; the fields mean what they mean in ``EngineStatus``."""

    state: str
    kind: str
    generation: int = 0
    restarts: int = 0
    pid: int | None = None
    uptime_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One served model and its two sandboxes."""

    name: str
    state: str
    """``ready`` when a request would be taken now."""
    engine: EngineStatus
    text: TextStatus
    runner: str = "model"
    """``null``: a benchmark's, which computes nothing and answers with meaningless ids."""
    tenant: str = ""
    """Whose own these are; empty: shared. The engine of one that has its own text sandbox only is ``shared``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStatus:
    """One tenant of the policy in force."""

    id: str
    isolation_class: str
    """``shared``, ``strict`` or ``dedicated``."""
    in_flight: int
    """Requests of this tenant now."""
    max_in_flight: int | None = None
    """The concurrency limit; None: none."""
    requests: int | None = None
    """Requests since the start; None: not counted."""
    tokens: int | None = None
    """Input and output tokens since the start; None: not counted."""
    refused: int | None = None
    """Requests refused since the start; None: not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """The policy in force and how the last attempt to replace it ended."""

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
    """The same for the same matter in the next look."""
    level: str
    """``broken``: requests fail or tenants are less apart than promised; ``degraded``: it works, and not well;
    ``note``."""
    what: str
    who: str = ""
    """Whom it concerns."""
    do: str = ""
    """What mends it."""
    command: str = ""
    """What to type."""
    since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplianceStatus:
    """The whole appliance."""

    version: str
    started_at: float
    sandbox: str
    """The sandbox kind that new sandboxes get, one of the ``kind`` values above."""
    cgroup: str
    """One sentence on what limits of memory, CPU and processes are in force."""
    models: tuple[ModelStatus, ...]
    tenants: tuple[TenantStatus, ...]
    policy: PolicyStatus
    public: tuple[PublicPrefixStatus, ...] = ()
    """Public prefixes of the policy in force."""
    own: tuple[ModelStatus, ...] = ()
    """Sandboxes of single tenants that are there, or are being booted."""
    alerts: tuple[Alert, ...] = ()
    """What the operator should know now, the worst first: the same as on the console."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadOutcome:
    """How a reload of the policy ended. When not ``ok`` the policy before is still in force."""

    ok: bool
    digest: str
    """Of the policy in force after the attempt."""
    message: str
    """One line for the operator."""
    problems: tuple[str, ...] = ()
    """``file:line:column: path: message``, one each."""


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
