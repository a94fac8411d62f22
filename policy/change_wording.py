"""Words for changes between two policies: one entry for each field of the policy's values. Pure.

A change is *wider* when it allows more or protects less, *narrower* when it allows less or protects more. A text is a
predicate: the name of the tenant, group or prefix goes before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from policy.match import glob_matches
from policy.model import (
    WHOLE_POOL,
    ContentRules,
    Determinism,
    EndUserLimits,
    Exceeded,
    External,
    Features,
    IsolationClass,
    KvShare,
    Limits,
    ModelRegions,
    Namespace,
    Price,
    PriceRule,
    Priority,
    PublicPrefix,
    Retention,
    Route,
    SharingGroup,
    Target,
    Tenant,
)
from policy.prices import MILLION, amount_text
from policy.rates import BURSTS, TREATMENTS
from policy.route_wording import ROUTE_WORDINGS, TARGET_WORDINGS
from policy.told import Direction, Sides, Told, Wording, listed, more
from policy.wording import counted


def _number(before: str, noun: str, after: str) -> Wording:
    """Tell a limit: ``before``, the new number with its noun, ``after``, the old number."""

    def tell(old: int, new: int, _sides: Sides) -> list[Told]:
        return [Told(more(new > old), f"{before} {counted(new, noun)}{after} instead of {old:,}")]

    return tell


def _spend(period: str) -> Wording:
    """Tell a limit of spend, which may be absent."""

    def tell(old: int | None, new: int | None, sides: Sides) -> list[Told]:
        if new is None:
            before = f"{amount_text(old or 0)} {sides.old.currency}"
            return [Told(Direction.WIDER, f"may spend without a limit in a {period} instead of {before}")]
        text = f"may spend {amount_text(new)} {sides.new.currency} a {period}"
        if old is None:
            return [Told(Direction.NARROWER, f"{text} instead of any amount")]
        return [Told(more(new > old), f"{text} instead of {amount_text(old)}")]

    return tell


def _optional(verb: str, noun: str, after: str) -> Wording:
    """Tell a limit that may be absent."""

    def tell(old: int | None, new: int | None, _sides: Sides) -> list[Told]:
        if new is None:
            return [Told(Direction.WIDER, f"may {verb} any number of {noun}s {after} instead of {old:,}")]
        before = f"{old:,}" if old is not None else "any number"
        wider = old is not None and new > old
        return [Told(more(wider), f"may {verb} {counted(new, noun)} {after} instead of {before}")]

    return tell


def _burst(verb: str, noun: str) -> Wording:
    """Tell a burst; None where its rate is absent, and whatever that says is told of the rate."""

    def tell(old: int | None, new: int | None, _sides: Sides) -> list[Told]:
        if new is None or new == old:
            return []
        if old is None:
            return [Told(Direction.OTHER, f"may {verb} {counted(new, noun)} at once")]
        return [Told(more(new > old), f"may {verb} {counted(new, noun)} at once instead of {old:,}")]

    return tell


_TREATMENTS = {
    Exceeded.REFUSE: ("is refused", "being refused"),
    Exceeded.QUEUE: ("waits", "waiting"),
    Exceeded.DOWNGRADE: ("is served with low priority", "being served with low priority"),
}
"""Treatment of a request beyond a limit -> what becomes of it, and the same as an alternative."""


def _exceeded(what: str) -> Wording:
    """Tell the treatment of requests beyond a limit; None where the limit is absent."""

    def tell(old: Exceeded | None, new: Exceeded | None, _sides: Sides) -> list[Told]:
        if new is None or new is old:
            return []
        text = f"{_TREATMENTS[new][0]} beyond its {what}"
        if old is None:
            return [Told(Direction.OTHER, text)]
        direction = more(old is Exceeded.REFUSE) if Exceeded.REFUSE in (old, new) else Direction.OTHER
        return [Told(direction, f"{text} instead of {_TREATMENTS[old][1]}")]

    return tell


def _price(tokens: str) -> Wording:
    """Tell the price of one kind of tokens; a lower one is wider, since money buys more."""

    def tell(old: int, new: int, sides: Sides) -> list[Told]:
        text = f"is {price_text(new)} {sides.new.currency} for a million {tokens} instead of {price_text(old)}"
        return [Told(more(new < old), text)]

    return tell


def _batch_price(old: Price | None, new: Price | None, sides: Sides) -> list[Told]:
    """Tell the price of requests of batches, which may be absent."""

    def told(price: Price | None) -> str:
        if price is None:
            return "that of other requests"
        return " / ".join(price_text(each) for each in (price.input, price.cached_input, price.output))

    unit = f" {sides.new.currency} for a million prompt, cached and output tokens" if new is not None else ""
    return [Told(Direction.OTHER, f"is {told(new)}{unit} for requests of batches instead of {told(old)}")]


def price_text(billionths: int) -> str:
    """Return the price of one token as that of a million, as the policy states it."""
    return amount_text(billionths * MILLION)


def _switch(on: str, off: str) -> Wording:
    """Tell a yes or no, of which yes is wider."""

    def tell(_old: bool, new: bool, _sides: Sides) -> list[Told]:
        return [Told(more(new), on if new else off)]

    return tell


def _priority(old: Priority, new: Priority, _sides: Sides) -> list[Told]:
    ranks = list(Priority)
    wider = ranks.index(new) < ranks.index(old)
    return [Told(more(wider), f"is served with {new.value} priority instead of {old.value}")]


_DETERMINISM = {
    Determinism.NEVER: "no longer gets deterministic results",
    Determinism.ALLOWED: "may ask for deterministic results",
    Determinism.ALWAYS: "always gets deterministic results",
}
"""Grant to its words; the order is from narrow to wide."""


def _deterministic(old: Determinism, new: Determinism, _sides: Sides) -> list[Told]:
    ranks = list(_DETERMINISM)
    return [Told(more(ranks.index(new) > ranks.index(old)), f"{_DETERMINISM[new]}, instead of {old.value}")]


def _isolation_class(old: IsolationClass, new: IsolationClass, _sides: Sides) -> list[Told]:
    apart = old is not IsolationClass.SHARED, new is not IsolationClass.SHARED
    direction = Direction.OTHER if apart[0] == apart[1] else more(apart[0])
    return [Told(direction, f"has class {new.value} instead of {old.value}")]


def _retention(old: Retention, new: Retention, _sides: Sides) -> list[Told]:
    kept = "finished KV blocks may be kept for it" if new is Retention.STANDARD else "nothing is kept for it"
    text = f"has retention {new.value} instead of {old.value}: {kept}"
    return [Told(more(new is Retention.STANDARD), text)]


_EXTERNAL = {
    External.REFUSE: "may use no model outside of the appliance",
    External.BY_CLASS: "may use models outside of the appliance if its class and retention allow it",
    External.ALLOW: "may use models outside of the appliance, where nothing that its class promises holds",
}
"""Grant to its words; the order is from narrow to wide."""


def _external(old: External, new: External, _sides: Sides) -> list[Told]:
    ranks = list(_EXTERNAL)
    return [Told(more(ranks.index(new) > ranks.index(old)), f"{_EXTERNAL[new]}, instead of {old.value}")]


def _namespace(old: Namespace, new: Namespace, _sides: Sides) -> list[Told]:
    found = "each end user's own requests" if new is Namespace.USER else "all its requests"
    text = f"has namespace {new.value} instead of {old.value}: its cached prefixes are found by {found}"
    return [Told(more(new is Namespace.TENANT), text)]


def _percent(before: str, after: str) -> Wording:
    """Tell a share of the KV pool."""

    def tell(old: int, new: int, _sides: Sides) -> list[Told]:
        return [Told(more(new > old), f"{before} {percent(new)} {after} instead of {percent(old)}")]

    return tell


def _credentials(old: Sequence[str], new: Sequence[str], sides: Sides) -> Iterator[Told]:
    for name in sorted(set(new) - set(old)):
        before = sides.old.principals.get(name)
        text = f"is called with {name}" if before is None else f"takes over {name} from {before}"
        yield Told(Direction.WIDER, text)
    for name in sorted(set(old) - set(new)):
        after = sides.new.principals.get(name)
        fate = "calls with it are refused" if after is None else f"it belongs to {after}"
        yield Told(Direction.NARROWER, f"loses {name}: {fate}")


def _models(old: Sequence[str], new: Sequence[str], _sides: Sides) -> Iterator[Told]:
    told = False
    for pattern in sorted(set(new) - set(old)):
        told = True
        covering = _covering(pattern, old)
        if covering is None:
            yield Told(Direction.WIDER, f"may use {_model(pattern)}")
        else:
            yield Told(Direction.OTHER, f"lists {pattern}, which {covering} allowed already")
    for pattern in sorted(set(old) - set(new)):
        told = True
        covering = _covering(pattern, new)
        if covering is None:
            yield Told(Direction.NARROWER, f"may no longer use {_model(pattern)}")
        else:
            yield Told(Direction.OTHER, f"no longer lists {pattern}, which {covering} still allows")
    if not told and Counter(old) != Counter(new):
        yield Told(Direction.OTHER, "lists a model another number of times, without effect")


def _bounds(verb: str, unbounded: str) -> Wording:
    """Wording of a list that bounds what is taken of a tenant, and bounds nothing where it is empty."""

    def told(old: Sequence[str], new: Sequence[str], _sides: Sides) -> Iterator[Told]:
        added, gone = sorted(set(new) - set(old)), sorted(set(old) - set(new))
        if not old and new:
            yield Told(Direction.NARROWER, f"{verb} {listed(sorted(new))} alone, where it was {unbounded}")
        elif old and not new:
            yield Told(Direction.WIDER, f"{verb} {unbounded.removeprefix('from ')}, where it was {listed(sorted(old))}")
        else:
            if added:
                yield Told(Direction.WIDER, f"{verb} {listed(added)} too")
            if gone:
                yield Told(Direction.NARROWER, f"no longer {verb} {listed(gone)}")
            if not added and not gone:
                yield Told(Direction.OTHER, "has its networks, regions or hours in another order, or some twice")

    return told


def _denied_fields(old: Sequence[str], new: Sequence[str], _sides: Sides) -> Iterator[Told]:
    for names, verb in ((set(old) - set(new), "may use"), (set(new) - set(old), "may no longer use")):
        if names:
            fields = "field" if len(names) == 1 else "fields"
            yield Told(more(verb == "may use"), f"{verb} the {fields} {listed(sorted(names))}")


def _covering(pattern: str, others: Sequence[str]) -> str | None:
    """Return one of ``others`` that matches every name that ``pattern`` matches, if one is seen to. A star of
    ``pattern`` is matched by a star of the other alone, since no other character of a pattern matches it."""
    return next((other for other in others if glob_matches(other, pattern)), None)


def _model(pattern: str) -> str:
    if pattern == "*":
        return "every model"
    return f"models named {pattern}" if "*" in pattern else f"model {pattern}"


def _model_regions(old: Sequence[ModelRegions], new: Sequence[ModelRegions], _sides: Sides) -> Iterator[Told]:
    for one in new:
        if one not in old:
            text = f"has {listed([_model(name) for name in one.models])} served in {listed(one.regions)} alone"
            yield Told(Direction.NARROWER, text)
    for one in old:
        if one not in new:
            text = (
                f"no longer has {listed([_model(name) for name in one.models])} served in {listed(one.regions)} alone"
            )
            yield Told(Direction.WIDER, text)
    if {*old} == {*new}:
        yield Told(Direction.OTHER, "has its model_regions in another order, or some twice")


def _group(old: str | None, new: str | None, sides: Sides) -> Iterator[Told]:
    if old is not None:
        text = f"no longer shares cached prefixes in group {old}"
        yield Told(Direction.NARROWER, text, f"sharing_groups.{old}.tenants")
    if new is not None:
        # The tenant itself is one of the members.
        others = counted(len(sides.new.groups[new].tenants) - 1, "other tenant")
        text = f"shares cached prefixes in group {new}, with {others}"
        yield Told(Direction.WIDER, text, f"sharing_groups.{new}.tenants")


def _public(old: Sequence[str], new: Sequence[str], _sides: Sides) -> Iterator[Told]:
    for name in sorted(set(new) - set(old)):
        yield Told(Direction.WIDER, f"may begin with public prefix {name}", f"public_prefixes.{name}.tenants")
    for name in sorted(set(old) - set(new)):
        text = f"may no longer begin with public prefix {name}"
        yield Told(Direction.NARROWER, text, f"public_prefixes.{name}.tenants")


def _adapters(old: Sequence[str], new: Sequence[str], _sides: Sides) -> Iterator[Told]:
    for name in sorted(set(new) - set(old)):
        yield Told(Direction.WIDER, f"may use adapter {name}")
    for name in sorted(set(old) - set(new)):
        yield Told(Direction.NARROWER, f"may no longer use adapter {name}")
    if set(old) == set(new):
        yield Told(Direction.OTHER, "lists its adapters in another order, or some twice")


def _members(old: Sequence[str], new: Sequence[str], _sides: Sides) -> Iterator[Told]:
    if joined := sorted(set(new) - set(old)):
        yield Told(Direction.WIDER, f"has {counted(len(joined), 'more member')}: {listed(joined)}")
    if left := sorted(set(old) - set(new)):
        yield Told(Direction.NARROWER, f"has {counted(len(left), 'member')} less: {listed(left)}")


def _prefix_model(old: str, new: str, _sides: Sides) -> list[Told]:
    return [Told(Direction.OTHER, f"is for model {new} instead of {old}")]


def _prefix_kind(_old: bool, new: bool, _sides: Sides) -> list[Told]:
    return [Told(Direction.OTHER, "is a conversation instead of a text" if new else "is a text, not a conversation")]


def _prefix_source(old: str, new: str, _sides: Sides) -> list[Told]:
    text = f"has other content: {counted(len(new.encode()), 'byte')} instead of {len(old.encode()):,}"
    return [Told(Direction.OTHER, text)]


def _told_at_tenants(_old: Sequence[str], _new: Sequence[str], _sides: Sides) -> list[Told]:
    """Tell nothing: ``Tenant.public`` of each tenant tells it."""
    return []


def percent(parts: int) -> str:
    """Return parts of ``WHOLE_POOL`` as text: ``12.5%``."""
    return f"{parts * 100 / WHOLE_POOL:g}%"


IDENTITIES: Mapping[type, frozenset[str]] = {
    Tenant: frozenset({"id"}),
    SharingGroup: frozenset({"id"}),
    PublicPrefix: frozenset({"id"}),
    Route: frozenset({"id"}),
    PriceRule: frozenset({"models", "isolation_class"}),
    ModelRegions: frozenset({"models", "regions"}),
}
"""Fields by which two values are known to be one, and which so are the same on both sides."""

KEYS: Mapping[type, Mapping[str, str]] = {
    Tenant: {"isolation_class": "class"},
    PriceRule: {"price": ""},
    Limits: {name: f"{rate}.burst" for name, rate in BURSTS.items()}
    | {name: f"{limit}.exceeded" for name, limit in TREATMENTS.items()},
}
"""Key in the policy file of a field that has another name; empty: its own fields stand there in its place."""

WORDINGS: Mapping[type, Mapping[str, Wording]] = {
    ModelRegions: {},
    Tenant: {
        "credentials": _credentials,
        "models": _models,
        "isolation_class": _isolation_class,
        "retention": _retention,
        "namespace": _namespace,
        "weight": _number("has a weight of", "part", " in fair service"),
        "priority": _priority,
        "deterministic": _deterministic,
        "external": _external,
        "kv_export": _switch("may have sealed KV leave the machine", "no longer has sealed KV leave the machine"),
        "kv_fleet": _switch("may have its KV used by the whole fleet", "no longer has its KV used by other hosts"),
        "freeze_idle": _switch("may have its idle sandboxes frozen", "no longer has its idle sandboxes frozen"),
        "networks": _bounds("is taken from", "from everywhere"),
        "regions": _bounds("is served in", "any region"),
        "model_regions": _model_regions,
        "hours": _bounds("is served at", "always"),
        "group": _group,
        "public": _public,
        "adapters": _adapters,
        "unsafe_allow_all": _switch("is allowed everything, unsafely", "is no longer allowed everything"),
    },
    Limits: {
        "requests_per_minute": _number("may send", "request", " a minute"),
        "tokens_per_minute": _number("may use", "token", " a minute"),
        "concurrency": _number("may have", "request", " running at once"),
        "max_context_tokens": _number("may use", "token", " a request, prompt and output together,"),
        "max_output_tokens": _number("may ask for", "output token", " a request"),
        "spend_per_day": _spend("day"),
        "spend_per_month": _spend("month"),
        "input_tokens_per_minute": _optional("use", "input token", "a minute"),
        "output_tokens_per_minute": _optional("use", "output token", "a minute"),
        "requests_burst": _burst("send", "request"),
        "tokens_burst": _burst("use", "token"),
        "input_tokens_burst": _burst("use", "input token"),
        "output_tokens_burst": _burst("use", "output token"),
        "requests_exceeded": _exceeded("rate of requests"),
        "tokens_exceeded": _exceeded("rate of tokens"),
        "input_tokens_exceeded": _exceeded("rate of input tokens"),
        "output_tokens_exceeded": _exceeded("rate of output tokens"),
        "concurrency_exceeded": _exceeded("requests at once"),
        "kv_tokens": _optional("need KV of", "token", "at once"),
        "kv_tokens_exceeded": _exceeded("tokens of KV at once"),
        "max_queued_requests": _number("may have", "request", " waiting at once"),
        "max_queue_s": _number("may have a request wait", "second", ""),
        "max_stored_bytes": _number("may keep", "byte", " of files, results and responses"),
    },
    Features: {
        "structured_output": _switch("may use structured output", "may no longer use structured output"),
        "tokenize": _switch("may use the tokenizer alone", "may no longer use the tokenizer alone"),
        "tools": _switch("may use tools", "may no longer use tools"),
        "attestation": _switch("may ask for attestations", "may no longer ask for attestations"),
        "embeddings": _switch("may have texts embedded", "may no longer have texts embedded"),
        "rerank": _switch("may rerank and classify", "may no longer rerank and classify"),
        "wake": _switch("may wake models", "may no longer wake models"),
        "stored_responses": _switch("has its responses kept", "no longer has its responses kept"),
        "batches": _switch("may leave files and batches", "may no longer leave files and batches"),
        "reasoning": _switch("is shown the model's reasoning", "is no longer shown the model's reasoning"),
    },
    ContentRules: {
        "max_request_bytes": _optional("send", "byte", "of content a request"),
        "denied_fields": _denied_fields,
        "roles": _bounds("sends messages of role", "any"),
    },
    EndUserLimits: {
        "requests_per_minute": _optional("send", "request", "a minute for one end user"),
        "output_tokens_per_minute": _optional("use", "output token", "a minute for one end user"),
        "concurrency": _optional("have", "request", "of one end user running at once"),
    },
    KvShare: {
        "reservation": _percent("has", "of the KV pool reserved"),
        "cap": _percent("may fill", "of the KV pool"),
        "borrow": _switch("borrows idle KV memory and lends its own", "neither borrows nor lends KV memory"),
    },
    Price: {
        "input": _price("prompt tokens"),
        "cached_input": _price("cached prompt tokens"),
        "output": _price("output tokens"),
    },
    PriceRule: {"batch": _batch_price},
    SharingGroup: {"tenants": _members},
    Route: ROUTE_WORDINGS,
    Target: TARGET_WORDINGS,
    PublicPrefix: {"model": _prefix_model, "chat": _prefix_kind, "source": _prefix_source, "tenants": _told_at_tenants},
}
"""Class to field to what is told of a change. A field that is a value with fields of its own has no entry here: its
class has."""
