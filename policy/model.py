"""A policy as frozen values: what the evaluator reads. Built by ``policy.loader`` from checked
files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class IsolationClass(StrEnum):
    """How far apart a tenant is kept from the others; ``docs/classes.md`` says what each costs. What a class asks for
    is asked of its properties, never of its name."""

    SHARED = "shared"
    STRICT = "strict"
    """In a shared engine, as if alone there: the same bits in any batch, memory of its own, a wire that tells
    nothing."""
    DEDICATED = "dedicated"
    """In sandboxes that nobody else's request enters."""

    @property
    def pads(self) -> bool:
        """Whether answers leave in records of one size at fixed moments."""
        return self is not IsolationClass.SHARED

    @property
    def own_text(self) -> bool:
        """Whether the tenant's prompts and grammars are worked on in a text sandbox of its own."""
        return self is not IsolationClass.SHARED

    @property
    def own_engine(self) -> bool:
        """Whether the tenant's requests run in an engine of its own."""
        return self is IsolationClass.DEDICATED

    @property
    def exact(self) -> bool:
        """Whether all its requests are deterministic, since others are in its batches."""
        return self is IsolationClass.STRICT

    @property
    def partitions(self) -> bool:
        """Whether its share of a shared engine's KV is neither lent nor exceeded: reservation equals cap."""
        return self is IsolationClass.STRICT


class Retention(StrEnum):
    """What may outlive a request."""

    STANDARD = "standard"
    """Finished blocks may serve later requests of the same tenant."""
    NONE = "none"
    """Nothing of the request is kept."""


class Determinism(StrEnum):
    """Whether a tenant's requests get the same bits alone and in any batch. Without compiled kernels it costs time of
    the engine, so it is granted and not just asked for."""

    NEVER = "never"
    ALLOWED = "allowed"
    """A request that asks for it gets it."""
    ALWAYS = "always"


class Priority(StrEnum):
    """Who is served first; the order is strict, so ``LOW`` gets what the others leave."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one tenant may use; every number is at least 1."""

    requests_per_minute: int
    """Rate and burst of requests: a full bucket holds one minute's worth."""
    tokens_per_minute: int
    """Rate and burst of prompt and output tokens together."""
    concurrency: int
    """Requests admitted and not yet finished; each choice of a request counts."""
    max_context_tokens: int
    """Prompt and output tokens of one request."""
    max_output_tokens: int
    """Output tokens of one request, all its choices together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What of the API one tenant may use, where that can be withheld."""

    structured_output: bool = True
    """Answers under a grammar of the caller's."""


WHOLE_POOL = 10_000
"""Parts of a model's KV pool in which shares are counted: hundredths of a percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShare:
    """What one tenant, or one sharing group, may keep in the KV pool of each model that it may use."""

    reservation: int = 0
    """What it can always have, in parts of ``WHOLE_POOL``."""
    cap: int = WHOLE_POOL
    """What it never exceeds."""
    borrow: bool = True
    """Whether it may use what is nobody's or left over, and others what it leaves of its reservation. Where not, cap
    and reservation are one number, and the share is a partition."""

    @property
    def bounded(self) -> bool:
        """Whether it says anything."""
        return self != KvShare()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingGroup:
    """Tenants that find each other's cached prefixes, because the operator says so."""

    id: str
    tenants: tuple[str, ...]
    """At least two ids."""
    kv: KvShare = KvShare()
    """What all members together may keep: their blocks are the group's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicPrefix:
    """A beginning of prompts that the operator publishes: computed once, always there, for several tenants."""

    id: str
    model: str
    """Name of the served model."""
    chat: bool
    """Whether ``source`` is a conversation for the model's chat template; else it is text as it is."""
    source: str
    """The text, or the messages as JSON, ``[{"role": ..., "content": ...}, ...]``."""
    tenants: tuple[str, ...]
    """Who may begin with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant: who it is, what it may call, how much it may use."""

    id: str
    credentials: tuple[str, ...]
    """``key:ID`` or a SPIFFE URI, as the identity layer names an authenticated caller."""
    models: tuple[str, ...]
    """Model names, ``*`` standing for any characters."""
    isolation_class: IsolationClass
    retention: Retention
    weight: int
    """Share in fair service beside other tenants, 1..1000."""
    priority: Priority
    """The most urgent that its requests may be; a request may ask for less."""
    deterministic: Determinism
    limits: Limits
    features: Features = Features()
    kv: KvShare = KvShare()
    group: str | None = None
    """The sharing group that the tenant is in."""
    public: tuple[str, ...] = ()
    """Ids of the public prefixes that its requests may begin with."""


@dataclass(frozen=True, slots=True)
class PolicySet:
    """All tenants of one load, with the index from credential to tenant."""

    tenants: Mapping[str, Tenant]
    """By tenant id."""
    principals: Mapping[str, str]
    """Tenant id by credential; a credential belongs to exactly one tenant."""
    digest: str
    """SHA-256, hex, of the content: equal for files that differ in comments, order or layout
    only."""
    groups: Mapping[str, SharingGroup]
    """Sharing groups by id."""
    public: Mapping[str, PublicPrefix]
    """Public prefixes by id."""
