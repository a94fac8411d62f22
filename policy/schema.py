"""Schema of the policy file: names, types, bounds and defaults; errors name the offending key.

``schema.json`` beside this module is this schema for editors; ``python -m policy.export`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from policy.content_schema import ContentSchema
from policy.credential_form import checked_credential
from policy.end_user_schema import EndUsersSchema
from policy.outside_schema import MAX_HOURS, MAX_NETWORKS, MAX_REGIONS, Hours, Network
from policy.rate_schema import Concurrency, KvTokens, RequestRate, TokenRate
from policy.route_schema import MAX_ROUTES, MODEL_NAME, ModelName, RouteSchema
from policy.wording import counted

S = TypeVar("S", bound=BaseModel)

MAX_TENANTS = 10_000
MAX_CREDENTIALS = 256
MAX_MODELS = 256
MAX_GROUPS = 1_000
MAX_TENANT_GROUPS = 1_000
"""Largest number of tenant groups in all files of a policy."""
MAX_MEMBERS = 256
MAX_PUBLIC_PREFIXES = 64
MAX_PUBLIC_BYTES = 256 << 10
"""Largest size of one public prefix in UTF-8 bytes: some hundred pages."""
MAX_PUBLIC_MESSAGES = 64
MAX_PRICES = 256
MAX_PRICE = 1_000_000
"""Largest price of a million tokens, in units of the currency: one unit a token."""
PRICE_DECIMALS = 3
"""Decimals of a price: a thousandth for a million tokens is a billionth for one."""
MAX_CONTEXT_TOKENS = 1 << 20
"""Largest limits of tokens of one request, prompt and output or output alone."""
MAX_QUEUED_REQUESTS = 1_024
MAX_QUEUE_S = 600
MAX_STORED_BYTES = 1 << 50
MAX_SPEND = 1_000_000_000
"""Largest limit of spend, in units of the currency."""
SPEND_DECIMALS = 2
AMOUNT_ROUNDING = 1e-12
"""Relative error of a decimal number as a float, with a margin: less than the last decimal of any amount."""
CURRENCY = r"^[A-Z][A-Z0-9]{1,7}$"
TENANT_ID = r"^[a-z0-9][a-z0-9-]{0,62}$"
PERCENT = r"^(100|[0-9]{1,2})(\.[0-9]{1,2})?%$"
ROLE = r"^[a-z][a-z0-9_-]{0,31}$"
PREFIX_FILE = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\.(txt|json)$"
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}:[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
MAX_ADAPTERS = 128
"""Largest number of adapters of one tenant; an engine has no more."""
MODEL_PATTERN = r"^[A-Za-z0-9*][A-Za-z0-9*._:/-]{0,127}$"


def _checked_credential(value: str) -> str:
    try:
        return checked_credential(value)
    except ValueError as error:
        raise _refusal(str(error)) from None


def _refusal(message: str) -> PydanticCustomError:
    return PydanticCustomError("policy", "{text}", {"text": message})


def _amount(decimals: int, most: int) -> Callable[[object], object]:
    """Return the check of an amount of money: a number from 0 to ``most`` with at most so many decimals."""

    def checked(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refusal("must be a number, such as 0.25")
        if not 0 <= value <= most:
            raise _refusal(f"must be at least 0 and at most {most}")
        if abs(round(value, decimals) - value) > AMOUNT_ROUNDING * max(1.0, value):
            raise _refusal(f"must have at most {counted(decimals, 'decimal')}")
        return float(value)

    return checked


Amount = Annotated[float, Field(ge=0, le=MAX_PRICE), BeforeValidator(_amount(PRICE_DECIMALS, MAX_PRICE))]
Spend = Annotated[float, Field(ge=0, le=MAX_SPEND), BeforeValidator(_amount(SPEND_DECIMALS, MAX_SPEND))]
Credential = Annotated[str, AfterValidator(_checked_credential)]
AdapterName = Annotated[str, StringConstraints(pattern=ADAPTER_NAME)]
ModelPattern = Annotated[str, StringConstraints(pattern=MODEL_PATTERN)]
Percent = Annotated[str, StringConstraints(pattern=PERCENT)]
RegionName = Annotated[str, StringConstraints(pattern=TENANT_ID)]
TenantId = Annotated[str, StringConstraints(pattern=TENANT_ID)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


def _always(section: S) -> Callable[[], S]:
    """Return a factory of one object: ten thousand tenants that write nothing of a section have one section together.
    A frozen model is safe to share."""
    return lambda: section


class LimitsSchema(_Strict):
    """Limits of one tenant. The defaults suit one team and keep one tenant from filling the machine."""

    requests_per_minute: RequestRate = Field(
        default=600, description="Requests a minute, which is also the burst unless a mapping says otherwise."
    )
    tokens_per_minute: TokenRate = Field(
        default=200_000,
        description="Prompt and output tokens a minute, which is also the burst unless a mapping says otherwise. "
        "Reserved at the most a request may use, settled at what it used. A prompt that can never be served is charged "
        "what its tokenising cost, at most twice max_context_tokens.",
    )
    input_tokens_per_minute: TokenRate | None = Field(
        default=None,
        description="Prompt tokens a minute, beside tokens_per_minute and counted as there. Left out: no limit of "
        "their own.",
    )
    output_tokens_per_minute: TokenRate | None = Field(
        default=None,
        description="Output tokens a minute, beside tokens_per_minute and counted as there. A request that names no "
        "number reserves max_output_tokens, so a smaller burst refuses it. Left out: no limit of their own.",
    )
    concurrency: Concurrency = Field(
        default=64, description="Requests admitted and not yet finished; each choice of a request (n) counts."
    )
    kv_tokens: KvTokens | None = Field(
        default=None,
        description="Tokens whose KV running requests may need at once: of each its whole prompt and the most output "
        "that it may give, for every choice (n). A request that names no number needs max_output_tokens. Tokens "
        "because bytes differ between models. Left out: no limit beside the share of the pool (kv).",
    )
    max_context_tokens: int = Field(
        default=4_096, ge=2, le=MAX_CONTEXT_TOKENS, description="Prompt and output tokens of one request."
    )
    max_output_tokens: int = Field(
        default=1_024,
        ge=1,
        le=MAX_CONTEXT_TOKENS,
        description="Output tokens of one request, all its choices (n) together; the context limit holds beside it.",
    )
    spend_per_day: Spend | None = Field(
        default=None,
        description="What the requests of one day (UTC) may cost, in the currency of prices. Reserved at the most a "
        "request may cost, settled at what it cost; needs the audit log. Left out: no limit.",
    )
    spend_per_month: Spend | None = Field(
        default=None, description="What the requests of one calendar month (UTC) may cost. Left out: no limit."
    )
    max_queued_requests: int = Field(
        default=64,
        ge=1,
        le=MAX_QUEUED_REQUESTS,
        description="Requests that wait at once where a limit says exceeded: queue; others are refused.",
    )
    max_queue_s: int = Field(
        default=30,
        ge=1,
        le=MAX_QUEUE_S,
        description="Seconds that a request waits at most, and never beyond its deadline. One that would have to wait "
        "longer is refused at once.",
    )
    max_stored_bytes: int = Field(
        default=1 << 30,
        ge=1,
        le=MAX_STORED_BYTES,
        description="Bytes of files, results of batches and responses that are kept; uploads beyond it are refused.",
    )


class FeaturesSchema(_Strict):
    """API features that can be withheld from a tenant."""

    structured_output: bool = Field(
        default=True,
        description="Answers that follow a JSON Schema, a regular expression or a grammar of the caller's.",
    )
    tokenize: bool = Field(
        default=True,
        description="Token ids of a text, their number, and the text of token ids, without an answer of the model.",
    )
    tools: bool = Field(
        default=True,
        description="Tools that a request offers for the model to call; the caller runs them, never the appliance.",
    )
    reasoning: bool = Field(
        default=True,
        description="The reasoning of models that reason, in answers to conversations; else its tokens are charged and "
        "not shown. A plain completion shows what the model wrote.",
    )
    attestation: bool = Field(
        default=True,
        description="Attestations: signed statements of the image, sandbox, policy and model that serve the tenant.",
    )
    embeddings: bool = Field(
        default=True, description="Vectors of texts, from a model that embeds; those that score documents are rerank's."
    )
    rerank: bool = Field(
        default=True,
        description="Scores of documents against a query, and labels of texts, from a model that embeds or classifies.",
    )
    wake: bool = Field(
        default=True,
        description="Models that sleep: false refuses its requests for one, until another tenant or the operator has "
        "woken it. Sandboxes of its own (class dedicated) need no wake.",
    )
    batches: bool = Field(default=False, description="Files, kept sealed, and batches. Not with retention: none.")
    stored_responses: bool = Field(
        default=False,
        description="Answers of /v1/responses, kept sealed on disk for 30 days. Not with retention: none.",
    )


class KvSchema(_Strict):
    """Share in the KV pool of each model, in percent of the pool."""

    reservation: Percent = Field(
        default="0%",
        description="What can always be had: no other tenant's need evicts it, or preempts requests within it. All "
        "reservations are together at most 100%.",
    )
    cap: Percent | None = Field(
        default=None, description="What is never exceeded; not below the reservation. Left out: the whole pool."
    )
    borrow: bool = Field(
        default=True,
        description="Whether more than the reservation may be used while others leave it, and what is left of the "
        "reservation may be used by others. false makes it a partition, which has no other cap.",
    )


MODELS_FROM = ("models", "inherits", "unsafe_allow_all")
"""Keys of a tenant of which one has to be there: they say which models it may call."""


class _CredentialsSchema(_Strict):
    credentials: list[Credential] = Field(
        min_length=1,
        max_length=MAX_CREDENTIALS,
        description="key:ID of an API key, oidc:ISSUER:VALUE of tokens whose claim has exactly this value, or the "
        "SPIFFE URI of a client certificate. Each belongs to one tenant.",
    )


class _InheritingSchema(_Strict):
    inherits: TenantId = Field(
        default_factory=str,
        description="Tenant group whose keys hold where this entry has none of its own, down to the keys of sections; "
        "a list is replaced whole. Left out: no group.",
    )
    models: list[ModelPattern] = Field(
        default_factory=list,
        min_length=1,
        max_length=MAX_MODELS,
        description="Models the tenant may call: names, with * for any characters. Everything else is denied. "
        "A tenant has them itself or from a tenant group.",
    )
    adapters: list[AdapterName] = Field(
        default_factory=list,
        max_length=MAX_ADAPTERS,
        description="Adapters the tenant may call, by their whole names, MODEL:ADAPTER; no pattern matches one. The "
        "configuration says where their files are. Others cannot tell that they exist.",
    )


class ModelRegionsSchema(_Strict):
    """Regions in which some models are served."""

    models: list[ModelPattern] = Field(min_length=1, max_length=MAX_MODELS, description="Served models: names, with *.")
    regions: list[RegionName] = Field(min_length=1, max_length=MAX_REGIONS, description="Where they are served alone.")


class DefaultsSchema(_Strict):
    """Settings of all tenants of the policy, in all its files, where a tenant and its tenant groups say nothing. One
    file has them."""

    isolation_class: Literal["shared", "strict", "dedicated"] = Field(
        default="shared",
        alias="class",
        description="How far apart the tenant is kept. shared: engine and text sandbox with others, its own KV. "
        "strict: in a shared engine with the same bits whatever is beside it (deterministic: always), its own text "
        "sandbox, answers in records of one size at fixed moments. dedicated: engine and text sandbox of its own.",
    )
    retention: Literal["standard", "none"] = Field(
        default="standard",
        description="standard: finished KV blocks may serve later requests of this tenant. none: nothing is kept.",
    )
    kv_export: bool = Field(
        default=False,
        description="Whether KV blocks of this tenant may lie, sealed, in the store outside of the machine that the "
        "configuration's kv_store names. Not with retention: none. Classes strict and dedicated go there only so.",
    )
    kv_fleet: bool = Field(
        default=False,
        description="Whether all members of the fleet that the configuration's kv_store.members names may read and "
        "write KV blocks of this tenant there, so that a prompt that one host has computed is found by the others. "
        "Only with kv_export: true. What one host's engine computed is then used by others.",
    )
    namespace: Literal["tenant", "user"] = Field(
        default="tenant",
        description="Who finds the KV blocks that a request left. tenant: the tenant's requests. user: requests for "
        "the same end user (user or safety_identifier); one that names none finds and leaves nothing.",
    )
    weight: int = Field(default=1, ge=1, le=1_000, description="Share in fair service when tenants compete.")
    priority: Literal["high", "normal", "low"] = Field(
        default="normal",
        description="Who is served first, strictly: low gets what the others leave. A request may ask for less than "
        "its tenant's, never for more. Between tenants of one priority the weight decides.",
    )
    features: FeaturesSchema = Field(default_factory=_always(FeaturesSchema()))
    content: ContentSchema = Field(default_factory=_always(ContentSchema()))
    end_users: EndUsersSchema = Field(default_factory=_always(EndUsersSchema()))
    freeze_idle: bool = Field(
        default=False,
        description="Whether sandboxes that this tenant uses may be frozen while nobody uses them, so that they take "
        "no processor time. A shared one is frozen only where all its tenants allow it. The first request after that "
        "waits a few milliseconds, which shows its sender that nobody was served for a while; class strict refuses it.",
    )
    deterministic: Literal["never", "allowed", "always"] = Field(
        default="never",
        description="Whether tokens and log-probabilities are the same bits alone and in any batch: never, for "
        "requests that ask for it, or always. Costs nothing with compiled kernels, several times the compute without. "
        "Class strict means always; saying otherwise there is refused.",
    )
    external: Literal["by_class", "allow", "refuse"] = Field(
        default="by_class",
        description="Whether the tenant may use models that a cluster outside of the appliance computes (runner: "
        "external). by_class: yes, unless its class is strict or dedicated or its retention none: what these promise "
        "does not hold there. allow: yes, whatever its class promises. refuse: no.",
    )
    networks: list[Network] = Field(
        default_factory=list,
        max_length=MAX_NETWORKS,
        description="Networks from which the tenant's credentials are taken, such as 10.0.0.0/8; from elsewhere they "
        "are refused like unknown ones. Behind trusted proxies the client's address counts. Left out: from everywhere.",
    )
    regions: list[RegionName] = Field(
        default_factory=list,
        max_length=MAX_REGIONS,
        description="Regions in which requests are taken, compared with region of the configuration; an appliance "
        "without one is in none of them. Left out: everywhere.",
    )
    model_regions: list[ModelRegionsSchema] = Field(
        default_factory=list,
        max_length=MAX_REGIONS,
        description="Regions of models, beside regions: every entry that matches the model must have the appliance's.",
    )
    hours: list[Hours] = Field(
        default_factory=list,
        max_length=MAX_HOURS,
        description="Hours in which requests are taken, UTC, such as mon-fri 08:00-18:00; 22:00-06:00 goes on into the "
        "next day. What runs at their end goes on. Left out: always.",
    )
    limits: LimitsSchema = Field(default_factory=_always(LimitsSchema()))
    kv: KvSchema = Field(default_factory=_always(KvSchema()))


class TenantGroupSchema(DefaultsSchema, _InheritingSchema):
    """Settings that tenants and other tenant groups inherit. It shares no cached prefixes: sharing_groups do that."""


class TenantSchema(TenantGroupSchema, _CredentialsSchema):
    """One tenant."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": [key]} for key in MODELS_FROM]})
    unsafe_allow_all: bool = Field(
        default=False,
        description="true allows everything: every model, every feature, any content, from everywhere and at all "
        "times, with the largest number for each limit and none of spend. No other rule may stand beside it, and "
        "defaults narrow none of it; class, retention, namespace, priority, weight, kv, external and adapters stay the "
        "tenant's. For trials: check and doctor warn of it.",
    )


class GroupSchema(_Strict):
    """Tenants that share cached prefixes. Each member can tell by the response time whether another has sent the same
    beginning."""

    tenants: list[TenantId] = Field(
        min_length=2, max_length=MAX_MEMBERS, description="Members; a tenant is in one group at most."
    )
    kv: KvSchema = Field(default_factory=_always(KvSchema()), description="What all members together may keep.")


class PrefixMessageSchema(_Strict):
    """One message of a published conversation."""

    role: Annotated[str, StringConstraints(pattern=ROLE)]
    content: Annotated[str, StringConstraints(max_length=MAX_PUBLIC_BYTES)]


class PublicPrefixSchema(_Strict):
    """Prompt prefix shared by several tenants: always resident, so that a cache hit discloses nothing. Its content is
    public to the tenants that may use it."""

    model: Annotated[str, StringConstraints(pattern=MODEL_NAME)] = Field(description="The served model.")
    tenants: Literal["all"] | Annotated[list[TenantId], Field(min_length=1, max_length=MAX_TENANTS)] = Field(
        description="Who may begin with it: tenants of class shared, or all of them that may use the model."
    )
    text: Annotated[str, StringConstraints(min_length=1, max_length=MAX_PUBLIC_BYTES)] | None = Field(
        default=None, description="Beginning of plain prompts. One of text, messages and file is given."
    )
    messages: Annotated[list[PrefixMessageSchema], Field(min_length=1, max_length=MAX_PUBLIC_MESSAGES)] | None = Field(
        default=None, description="Beginning of conversations, rendered by the model's chat template."
    )
    file: Annotated[str, StringConstraints(pattern=PREFIX_FILE)] | None = Field(
        default=None,
        description="A file in the folder public/ beside the policy: NAME.txt is text, NAME.json a list of messages.",
    )


class BatchPriceSchema(_Strict):
    """Price of requests of batches, in units of the currency for a million tokens."""

    input: Amount = Field(description="Price of a million prompt tokens.")
    cached_input: Amount | None = Field(default=None, description="Price of a million cached ones. Left out: as input.")
    output: Amount = Field(description="Price of a million output tokens.")


class PriceSchema(_Strict):
    """Price of models, in units of the currency for a million tokens."""

    models: list[ModelPattern] = Field(
        min_length=1, max_length=MAX_MODELS, description="Models it is for: names, with * for any characters."
    )
    isolation_class: Literal["shared", "strict", "dedicated"] | None = Field(
        default=None, alias="class", description="Class of the tenants it is for. Left out: all classes."
    )
    input: Amount = Field(description="Price of a million prompt tokens.")
    cached_input: Amount | None = Field(default=None, description="Price of a million cached ones. Left out: as input.")
    output: Amount = Field(description="Price of a million output tokens.")
    batch: BatchPriceSchema | None = Field(default=None, description="Price of batches. Left out: as of others.")


class PricesSchema(_Strict):
    """What requests cost. One file has them; the first rule that matches model and class decides. A model without a
    price costs nothing, and a tenant with a limit of spend may not use it."""

    currency: Annotated[str, StringConstraints(pattern=CURRENCY)] = Field(
        description="Name of the unit, such as EUR; it is shown beside amounts."
    )
    rules: list[PriceSchema] = Field(
        min_length=1, max_length=MAX_PRICES, description="Prices in the order in which they are tried."
    )


def _no_other_one(value: object) -> object:
    """Refuse what equals the number 1 and is another type: true and 1.0."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("version", "the version is the number 1")
    return value


class PolicySchema(_Strict):
    """Policy file: the models each tenant may use, and how much. Everything not allowed is denied."""

    version: Annotated[Literal[1], BeforeValidator(_no_other_one)]
    tenants: dict[TenantId, TenantSchema] = Field(max_length=MAX_TENANTS, description="Tenants by id.")
    defaults: DefaultsSchema | None = Field(
        default=None, description="Settings of every tenant that neither it nor its tenant groups have."
    )
    tenant_groups: dict[TenantId, TenantGroupSchema] = Field(
        default_factory=dict, max_length=MAX_TENANT_GROUPS, description="Settings that tenants inherit, by group id."
    )
    sharing_groups: dict[TenantId, GroupSchema] = Field(
        default_factory=dict, max_length=MAX_GROUPS, description="Groups of tenants that share cached prefixes, by id."
    )
    public_prefixes: dict[TenantId, PublicPrefixSchema] = Field(
        default_factory=dict,
        max_length=MAX_PUBLIC_PREFIXES,
        description="Beginnings of prompts that are computed once and always there, by id.",
    )
    prices: PricesSchema | None = Field(default=None, description="What requests cost, by model and class.")
    routes: dict[ModelName, RouteSchema] = Field(
        default_factory=dict, max_length=MAX_ROUTES, description="Names that lead to one of several models, by name."
    )


def schema_text() -> str:
    """Return the JSON Schema (draft 2020-12) of a policy file, as published for editors."""
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **PolicySchema.model_json_schema(by_alias=True),
    }
    return json.dumps(schema, indent=2) + "\n"
