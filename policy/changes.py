"""Changes from one policy to another, as sentences with the path of the rule. Pure.

Goes over the fields of the policy's values: a field without a wording in ``policy.change_wording`` is told by its path
and values, never left out. No change is told exactly where both policies have one digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any

from policy.change_wording import IDENTITIES, KEYS, WORDINGS, price_text
from policy.model import Limits, PolicySet, Price, PriceRule, PublicPrefix, Route, SharingGroup, Tenant
from policy.rates import BURSTS, TREATMENTS, effective
from policy.route_text import route_text
from policy.told import Direction, Sides, Told, listed
from policy.wording import counted


class SubjectKind(StrEnum):
    """Kind of what a change is about."""

    TENANT = "tenant"
    GROUP = "sharing group"
    PREFIX = "public prefix"
    PRICES = "prices"
    PRICE = "price of"
    ROUTE = "route"
    ENTRY = "entry"
    """Entry of a mapping that this module has no words for."""


SECTIONS: Mapping[str, tuple[str, SubjectKind]] = {
    "tenants": ("tenants", SubjectKind.TENANT),
    "groups": ("sharing_groups", SubjectKind.GROUP),
    "public": ("public_prefixes", SubjectKind.PREFIX),
    "routes": ("routes", SubjectKind.ROUTE),
}
"""Field of ``PolicySet`` to its section of the file, and the kind of its entries."""

DERIVED = frozenset({"principals", "digest"})
"""Fields of ``PolicySet`` that follow from the others."""

PRICED = ("currency", "prices")
"""Fields of ``PolicySet`` about prices, which are compared together."""

_RuleKey = tuple[tuple[str, ...], str, int]
"""Models and class of a price, and how many of the same came before it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change, for one tenant, sharing group, public prefix or route."""

    kind: SubjectKind
    subject: str
    path: str
    """Path of the rule: in the new policy, or in the old one where it is gone."""
    direction: Direction
    predicate: str
    """What changes, without the subject: ``may send 100 requests a minute instead of 600``."""
    old: Any = None
    """Old value where it is one number, text or truth value."""
    new: Any = None

    @property
    def sentence(self) -> str:
        """Return the change with its subject."""
        return f"{self.name} {self.predicate}"

    @property
    def name(self) -> str:
        """Return the subject with its kind: ``beta``, ``public prefix style``, ``price of big-*``."""
        return self.subject if self.kind is SubjectKind.TENANT else f"{self.kind.value} {self.subject}".strip()


def changes(old: PolicySet, new: PolicySet) -> tuple[Change, ...]:
    """Return what changes: tenants by id, then sharing groups, public prefixes, routes and prices; in the order
    of the fields."""
    return tuple(_changes(Sides(old, new)))


def _changes(sides: Sides) -> Iterator[Change]:
    for field in fields(PolicySet):
        before, after = getattr(sides.old, field.name), getattr(sides.new, field.name)
        if field.name in DERIVED or field.name in PRICED or before == after:
            continue
        if not isinstance(before, Mapping):
            yield _unworded_change(field.name, before, after)
            continue
        section, kind = SECTIONS.get(field.name, (field.name, SubjectKind.ENTRY))
        for name in sorted({*before, *after}):
            yield from _entry(kind, name, f"{section}.{name}", before.get(name), after.get(name), sides)
    yield from _prices(sides)


def _unworded_change(name: str, old: Any, new: Any) -> Change:
    return Change(SubjectKind.ENTRY, name, name, Direction.OTHER, f"is {new} instead of {old}")


def _prices(sides: Sides) -> Iterator[Change]:
    old, new = sides.old.currency, sides.new.currency
    if old != new:
        text = f"are in {new} instead of {old}" if old and new else f"are new, in {new}" if new else "are gone"
        yield Change(SubjectKind.PRICES, "", "prices.currency", Direction.OTHER, text, old or None, new or None)
    before, after = _rules(sides.old), _rules(sides.new)
    for key in [*after, *(key for key in before if key not in after)]:
        place = after.get(key) or before[key]
        path = f"prices.rules[{place[0]}]"
        then, now = (side[key][1] if key in side else None for side in (before, after))
        yield from _entry(SubjectKind.PRICE, _label(place[1]), path, then, now, sides)
    kept = [key for key in before if key in after]
    if kept != [key for key in after if key in before]:
        text = "are tried in another order; the first that matches decides"
        yield Change(SubjectKind.PRICES, "", "prices.rules", Direction.OTHER, text)


def _rules(policy: PolicySet) -> dict[_RuleKey, tuple[int, PriceRule]]:
    """Return prices with their place in the list, by what makes two of them one."""
    found: dict[_RuleKey, tuple[int, PriceRule]] = {}
    for index, rule in enumerate(policy.prices):
        number = 0
        while (key := (rule.models, rule.isolation_class or "", number)) in found:
            number += 1
        found[key] = index, rule
    return found


def _label(rule: PriceRule) -> str:
    only = "" if rule.isolation_class is None else f" for class {rule.isolation_class.value}"
    return listed(rule.models) + only


def _entry(kind: SubjectKind, name: str, path: str, old: Any, new: Any, sides: Sides) -> Iterator[Change]:
    if old is None:
        yield Change(kind, name, path, _direction(kind, is_new=True), f"is new: {_summary(new, sides)}")
    elif new is None:
        yield Change(kind, name, path, _direction(kind, is_new=False), f"is gone{_consequence(old, sides)}")
    elif is_dataclass(new):
        yield from _fields(kind, name, path, old, new, sides)
    elif old != new:
        yield Change(kind, name, path, Direction.OTHER, f"is {new} instead of {old}", old, new)


def _fields(kind: SubjectKind, name: str, path: str, old: Any, new: Any, sides: Sides) -> Iterator[Change]:
    for field in fields(new):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after or field.name in IDENTITIES.get(type(new), ()):
            continue
        if isinstance(new, Limits) and (field.name in BURSTS or field.name in TREATMENTS):
            before, after = effective(old, field.name), effective(new, field.name)
        key = KEYS.get(type(new), {}).get(field.name, field.name)
        place = f"{path}.{key}" if key else path
        wording = WORDINGS.get(type(new), {}).get(field.name)
        if wording is None and is_dataclass(before) and type(before) is type(after):
            yield from _fields(kind, name, place, before, after, sides)
            continue
        told = [_unworded(place, before, after)] if wording is None else wording(before, after, sides)
        for one in told:
            yield Change(
                kind,
                name,
                one.path or place,
                one.direction,
                one.text,
                _plain(field.name, before),
                _plain(field.name, after),
            )


def _unworded(path: str, old: Any, new: Any) -> Told:
    return Told(Direction.OTHER, f"has {path.rpartition('.')[2]} {new} instead of {old}")


def _plain(name: str, value: Any) -> Any:
    """Return a value for a program; None for lists, and for the text of a prefix."""
    return None if name == "source" or not isinstance(value, str | int | float) else value


def _direction(kind: SubjectKind, *, is_new: bool) -> Direction:
    if kind in (SubjectKind.ENTRY, SubjectKind.PRICE):
        return Direction.OTHER
    return Direction.WIDER if is_new else Direction.NARROWER


def _summary(new: Any, sides: Sides) -> str:
    """Describe an entry that the old policy does not have."""
    match new:
        case Tenant():
            limits = new.limits
            return (
                f"models {listed(new.models)}; {counted(limits.requests_per_minute, 'request')} and "
                f"{counted(limits.tokens_per_minute, 'token')} a minute; class {new.isolation_class.value}; "
                f"called with {listed(new.credentials)}"
            )
        case SharingGroup():
            return listed(new.tenants)
        case PublicPrefix():
            kind = "conversation" if new.chat else "text"
            return f"a {kind} of {counted(len(new.source.encode()), 'byte')} for model {new.model}"
        case Route():
            return f"requests for it go to {route_text(new)}"
        case PriceRule(price=Price() as price):
            return (
                f"{price_text(price.input)} {sides.new.currency} for a million prompt tokens, "
                f"{price_text(price.cached_input)} cached, {price_text(price.output)} for output"
            )
    return str(asdict(new) if is_dataclass(new) and not isinstance(new, type) else new)


def _consequence(old: Any, sides: Sides) -> str:
    """Say what becomes of the credentials of a tenant, or the requests of a route, that are gone."""
    if isinstance(old, Route):
        return ": requests for it are refused, unless a model of this name is served"
    if not isinstance(old, Tenant):
        return ""
    moved = [
        f"{name} belongs to {sides.new.principals[name]}" for name in old.credentials if name in sides.new.principals
    ]
    refused = [name for name in old.credentials if name not in sides.new.principals]
    parts = [f"calls with {listed(refused)} are refused"] if refused else []
    return ": " + "; ".join(parts + moved)
