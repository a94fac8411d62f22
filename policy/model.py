"""Policy as immutable values for the evaluator, built by ``policy.loader`` from validated files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from policy.feature import Feature


class IsolationClass(StrEnum):
    """Degree of isolation of a tenant; ``docs/classes.md`` gives the cost of each. Code reads the properties of a
    class, never its name."""

    SHARED = "shared"
    STRICT = "strict"
    """Shares the engine without observing other tenants: batch-invariant bits, a KV partition, padded responses."""
    DEDICATED = "dedicated"
    """Runs in sandboxes that no other tenant's request enters."""

    @property
    def pads(self) -> bool:
        """Whether responses leave in records of one size at fixed intervals."""
        return self is not IsolationClass.SHARED

    @property
    def own_text(self) -> bool:
        """Whether the tenant's prompts and grammars are processed in its own text sandbox."""
        return self is not IsolationClass.SHARED

    @property
    def own_engine(self) -> bool:
        """Whether the tenant's requests run in its own engine."""
        return self is IsolationClass.DEDICATED

    @property
    def exact(self) -> bool:
        """Whether all its requests are deterministic, because they share batches with other tenants."""
        return self is IsolationClass.STRICT

    @property
    def partitions(self) -> bool:
        """Whether its share of a shared engine's KV is neither lent nor exceeded: reservation equals cap."""
        return self is IsolationClass.STRICT


class Retention(StrEnum):
    """Retention of request data after the request."""

    STANDARD = "standard"
    """Finished blocks may serve later requests of this tenant."""
    NONE = "none"
    """Nothing is kept after the request."""


class Namespace(StrEnum):
    """Who finds the KV blocks that a tenant's request left."""

    TENANT = "tenant"
    """Requests of the tenant, or of its sharing group."""
    USER = "user"
    """Requests for the same end user of the tenant; one that names no end user finds and leaves nothing."""


class External(StrEnum):
    """Whether a tenant may use models that are computed outside of the appliance."""

    BY_CLASS = "by_class"
    """Yes, unless its class or its retention promises what nobody here can keep there."""
    ALLOW = "allow"
    REFUSE = "refuse"


class Determinism(StrEnum):
    """Permission to request batch-invariant results. Without compiled kernels this costs engine time, so it must be
    granted."""

    NEVER = "never"
    ALLOWED = "allowed"
    """A request may ask for deterministic results."""
    ALWAYS = "always"


class Priority(StrEnum):
    """Priority class; the order is strict, so ``LOW`` receives only what the others leave."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class Exceeded(StrEnum):
    """Treatment of a request that exceeds a rate, or the number of requests at once."""

    REFUSE = "refuse"
    QUEUE = "queue"
    """It waits in the gateway, within the tenant's bounds of waiting."""
    DOWNGRADE = "downgrade"
    """It is served with priority ``LOW``, up to once the burst more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one tenant; every number is at least 1. A burst of None is one minute's units."""

    requests_per_minute: int
    """Rate of requests."""
    tokens_per_minute: int
    """Rate of prompt and output tokens together."""
    concurrency: int
    """Requests admitted and not yet finished; each choice of a request counts."""
    max_context_tokens: int
    """Prompt and output tokens of one request."""
    max_output_tokens: int
    """Output tokens of one request, all its choices together."""
    spend_per_day: int | None = None
    """Cost of all requests of one day (UTC), in billionths of the currency's unit; None: unlimited."""
    spend_per_month: int | None = None
    """Cost of all requests of one calendar month (UTC), in billionths of the currency's unit; None: unlimited."""
    input_tokens_per_minute: int | None = None
    """Rate of prompt tokens, beside that of all tokens; None: none of its own."""
    output_tokens_per_minute: int | None = None
    """Rate of output tokens, beside that of all tokens; None: none of its own."""
    requests_burst: int | None = None
    """Requests that a full bucket holds."""
    tokens_burst: int | None = None
    input_tokens_burst: int | None = None
    output_tokens_burst: int | None = None
    requests_exceeded: Exceeded = Exceeded.REFUSE
    tokens_exceeded: Exceeded = Exceeded.REFUSE
    input_tokens_exceeded: Exceeded = Exceeded.REFUSE
    output_tokens_exceeded: Exceeded = Exceeded.REFUSE
    concurrency_exceeded: Exceeded = Exceeded.REFUSE
    kv_tokens: int | None = None
    """Tokens whose KV running requests may need at once, prompts and most outputs; None: unlimited."""
    kv_tokens_exceeded: Exceeded = Exceeded.REFUSE
    max_queued_requests: int = 64
    """Requests that wait at once where a limit is exceeded; others are refused."""
    max_queue_s: int = 30
    """Seconds that a request waits at most at each decision; then it is refused."""
    max_stored_bytes: int = 1 << 30
    """Bytes of files and of results of batches that are kept."""

    @property
    def bounds_spend(self) -> bool:
        """Whether there is a limit of spend."""
        return self.spend_per_day is not None or self.spend_per_month is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """API features that can be withheld from a tenant."""

    structured_output: bool = True
    """Whether a request may supply a grammar for its output."""
    tokenize: bool = True
    """Whether the tenant may ask for the token ids of a text, and for the text of token ids."""
    tools: bool = True
    """Whether a request may offer tools for the model to call."""
    reasoning: bool = True
    """Whether answers show what a model wrote to itself; without it those tokens are charged and not shown."""

    attestation: bool = True
    """Whether the tenant may ask for a signed statement of what serves it."""
    embeddings: bool = True
    """Whether the tenant may have vectors of texts."""
    rerank: bool = True
    """Whether the tenant may have documents scored against a query, and texts classified."""
    wake: bool = True
    """Whether requests of the tenant may wake a model that sleeps."""
    batches: bool = False
    """Whether the tenant may leave files, and batches of requests in them."""
    stored_responses: bool = False
    """Whether responses of the tenant are kept, so that later ones may continue them."""

    def grants(self, feature: Feature) -> bool:
        """Return whether the tenant has it."""
        granted: bool = getattr(self, feature.value)
        return granted


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentRules:
    """What a tenant's requests may hold (``policy.content``)."""

    max_request_bytes: int | None = None
    """Bytes of one request's content; None: no limit of their own."""
    denied_fields: tuple[str, ...] = ()
    """Fields of requests that are refused by name."""
    roles: tuple[str, ...] = ()
    """Roles of messages that are taken; none: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndUserLimits:
    """Limits of each end user of a tenant (``policy.end_users``); None: none."""

    requests_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrency: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return self is not NO_END_USER_LIMITS and self != NO_END_USER_LIMITS


NO_END_USER_LIMITS = EndUserLimits()
"""Limits of the end users of a tenant whose policy says nothing of them."""

WHOLE_POOL = 10_000
"""Number of parts of a model's KV pool in which shares are counted: hundredths of a percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShare:
    """Share of one tenant, or one sharing group, in the KV pool of each model that it may use."""

    reservation: int = 0
    """Guaranteed share, in parts of ``WHOLE_POOL``."""
    cap: int = WHOLE_POOL
    """Largest share, in parts of ``WHOLE_POOL``."""
    borrow: bool = True
    """Whether it may use unreserved or idle memory, and lends the idle part of its reservation. If not, cap and
    reservation are equal and the share is a partition."""

    @property
    def bounded(self) -> bool:
        """Whether it differs from the default share."""
        return self is not DEFAULT_SHARE and self != DEFAULT_SHARE


DEFAULT_SHARE = KvShare()
"""Share of a tenant whose policy says nothing of one: nothing is reserved, and nothing is withheld."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingGroup:
    """Tenants that share cached prefixes, by the operator's decision."""

    id: str
    tenants: tuple[str, ...]
    """Ids of its members, at least two."""
    kv: KvShare = KvShare()
    """Share of all members together: their blocks belong to the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicPrefix:
    """Prompt prefix published by the operator: computed once and always resident, for several tenants."""

    id: str
    model: str
    """Name of the served model."""
    chat: bool
    """Whether ``source`` is a conversation for the model's chat template; otherwise it is literal text."""
    source: str
    """The text, or the messages as JSON, ``[{"role": ..., "content": ...}, ...]``."""
    tenants: tuple[str, ...]
    """Ids of the tenants that may use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRegions:
    """Regions in which some models are served."""

    models: tuple[str, ...]
    """Patterns of names of served models, sorted."""
    regions: tuple[str, ...]
    """At least one; sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant: its credentials, the models it may call, and its limits."""

    id: str
    credentials: tuple[str, ...]
    """Credentials as named by the identity layer: ``key:ID`` or a SPIFFE URI."""
    models: tuple[str, ...]
    """Patterns of model names; ``*`` matches any characters."""
    isolation_class: IsolationClass
    retention: Retention
    weight: int
    """Share in fair service relative to other tenants, 1..1000."""
    priority: Priority
    """Most urgent priority of its requests; a request may ask for less."""
    deterministic: Determinism
    limits: Limits
    features: Features = Features()
    content: ContentRules = ContentRules()
    end_users: EndUserLimits = NO_END_USER_LIMITS
    networks: tuple[str, ...] = ()
    """Networks from which its credentials are taken (``policy.networks``); none: from everywhere."""
    regions: tuple[str, ...] = ()
    """Regions in which its requests are taken; none: everywhere."""
    model_regions: tuple[ModelRegions, ...] = ()
    """Regions in which models are served; every entry that matches counts, and none: everywhere."""
    hours: tuple[str, ...] = ()
    """Hours in which its requests are taken (``policy.hours``); none: always."""
    namespace: Namespace = Namespace.TENANT
    external: External = External.BY_CLASS
    """Whether it may use models that are computed outside of the appliance."""
    kv_export: bool = False
    """Whether its KV may lie, sealed, in a store outside of the machine."""
    kv_fleet: bool = False
    """Whether other hosts of the fleet may use its KV from there."""
    freeze_idle: bool = False
    """Whether sandboxes that it uses may be frozen while nobody uses them."""
    kv: KvShare = KvShare()
    group: str | None = None
    """Id of the tenant's sharing group, if it is in one."""
    public: tuple[str, ...] = ()
    """Ids of the public prefixes with which its requests may begin."""
    adapters: tuple[str, ...] = ()
    """Whole names of the adapters that it may use, ``MODEL:ADAPTER``."""
    unsafe_allow_all: bool = False
    """Whether its limits, features and rules are the widest because one key says so (``policy.allow_all``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of one token of each kind, in billionths of the currency's unit."""

    input: int = 0
    cached_input: int = 0
    """Price of a prompt token whose KV was found in the cache."""
    output: int = 0


FREE = Price()
"""Price where the policy has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRule:
    """One entry of the policy's prices; the first that matches a request decides."""

    models: tuple[str, ...]
    """Patterns of model names."""
    isolation_class: IsolationClass | None
    """Class of the tenants whose requests it is for; None: all."""
    price: Price
    batch: Price | None = None
    """Price of requests of batches; None: as of others."""


class Choose(StrEnum):
    """Way in which a route chooses the model of a request."""

    WEIGHT = "weight"
    """By a draw; each target has its share."""
    CHEAPEST = "cheapest"
    """By price: the cheapest target, or the next one when that cannot serve."""


class ModelState(StrEnum):
    """State of a served model, as far as a choice between models depends on it."""

    READY = "ready"
    BUSY = "busy"
    """It serves, and requests wait in it or its KV is full."""
    UNREADY = "unready"
    """It is starting, hangs, ends, or is not served."""
    ASLEEP = "asleep"
    """It sleeps or wakes, and would serve after a wait; as good as ready for a route that does not pass it over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Model that a route chooses among others."""

    model: str
    """Name of the served model."""
    weight: int = 1
    """Share relative to the other targets, 1..1000; without effect where the price decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Name that clients use like a model's, an *alias*, with the models that it leads to."""

    id: str
    """The alias."""
    to: tuple[Target, ...]
    """Models that are chosen from, at least one; all different."""
    choose: Choose = Choose.WEIGHT
    fallback: tuple[str, ...] = ()
    """Names of models that are tried in this order when the chosen one is in a state of ``fall_back_when``."""
    fall_back_when: tuple[ModelState, ...] = (ModelState.UNREADY,)
    """States in which a model is passed over, sorted."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of all models that it leads to, each once."""
        return tuple(dict.fromkeys([*(target.model for target in self.to), *self.fallback]))


@dataclass(frozen=True, slots=True)
class PolicySet:
    """All tenants of one load, with the index from credential to tenant."""

    tenants: Mapping[str, Tenant]
    """Tenants by id."""
    principals: Mapping[str, str]
    """Tenant id by credential; a credential belongs to exactly one tenant."""
    digest: str
    """SHA-256 of the content in hex: equal for files that differ only in comments, order or layout."""
    groups: Mapping[str, SharingGroup]
    """Sharing groups by id."""
    public: Mapping[str, PublicPrefix]
    """Public prefixes by id."""
    prices: tuple[PriceRule, ...] = ()
    """Prices in the order in which they are tried."""
    currency: str = ""
    """Name of the unit of prices and spend, such as ``EUR``; empty without prices."""
    routes: Mapping[str, Route] = field(default_factory=dict)
    """Routes by alias."""

    @property
    def bounds_spend(self) -> bool:
        """Whether any tenant has a limit of spend."""
        return any(tenant.limits.bounds_spend for tenant in self.tenants.values())
