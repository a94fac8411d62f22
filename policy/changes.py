"""Changes from one policy to another, as sentences with the path of the rule. Pure.

Goes over the fields of the policy's values: a field without a wording in ``policy.change_wording`` is told by its path
and values, never left out. No change is told exactly where both policies have one digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any

from policy.change_wording import IDENTITY, KEYS, WORDINGS, Direction, Sides, Told, listed
from policy.model import PolicySet, PublicPrefix, SharingGroup, Tenant
from policy.wording import counted


class SubjectKind(StrEnum):
    """Kind of what a change is about."""

    TENANT = "tenant"
    GROUP = "sharing group"
    PREFIX = "public prefix"
    ENTRY = "entry"
    """Entry of a mapping that this module has no words for."""


SECTIONS: Mapping[str, tuple[str, SubjectKind]] = {
    "tenants": ("tenants", SubjectKind.TENANT),
    "groups": ("sharing_groups", SubjectKind.GROUP),
    "public": ("public_prefixes", SubjectKind.PREFIX),
}
"""Field of ``PolicySet`` to its section of the file, and the kind of its entries."""

DERIVED = frozenset({"principals", "digest"})
"""Fields of ``PolicySet`` that follow from the others."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change, for one tenant, sharing group or public prefix."""

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
        name = self.subject if self.kind is SubjectKind.TENANT else f"{self.kind.value} {self.subject}"
        return f"{name} {self.predicate}"


def changes(old: PolicySet, new: PolicySet) -> tuple[Change, ...]:
    """Return what changes: tenants by id, then sharing groups, then public prefixes; in the order of the fields."""
    return tuple(_changes(Sides(old, new)))


def _changes(sides: Sides) -> Iterator[Change]:
    for field in fields(PolicySet):
        if field.name in DERIVED:
            continue
        section, kind = SECTIONS.get(field.name, (field.name, SubjectKind.ENTRY))
        before, after = getattr(sides.old, field.name), getattr(sides.new, field.name)
        for name in sorted({*before, *after}):
            yield from _entry(kind, name, f"{section}.{name}", before.get(name), after.get(name), sides)


def _entry(kind: SubjectKind, name: str, path: str, old: Any, new: Any, sides: Sides) -> Iterator[Change]:
    if old is None:
        yield Change(kind, name, path, _direction(kind, is_new=True), f"is new: {_summary(new)}")
    elif new is None:
        yield Change(kind, name, path, _direction(kind, is_new=False), f"is gone{_consequence(old, sides)}")
    elif is_dataclass(new):
        yield from _fields(kind, name, path, old, new, sides)
    elif old != new:
        yield Change(kind, name, path, Direction.OTHER, f"is {new} instead of {old}", old, new)


def _fields(kind: SubjectKind, name: str, path: str, old: Any, new: Any, sides: Sides) -> Iterator[Change]:
    for field in fields(new):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after or field.name == IDENTITY:
            continue
        place = f"{path}.{KEYS.get(type(new), {}).get(field.name, field.name)}"
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
    if kind is SubjectKind.ENTRY:
        return Direction.OTHER
    return Direction.WIDER if is_new else Direction.NARROWER


def _summary(new: Any) -> str:
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
    return str(asdict(new) if is_dataclass(new) and not isinstance(new, type) else new)


def _consequence(old: Any, sides: Sides) -> str:
    """Say what becomes of the credentials of a tenant that the new policy does not have."""
    if not isinstance(old, Tenant):
        return ""
    moved = [
        f"{name} belongs to {sides.new.principals[name]}" for name in old.credentials if name in sides.new.principals
    ]
    refused = [name for name in old.credentials if name not in sides.new.principals]
    parts = [f"calls with {listed(refused)} are refused"] if refused else []
    return ": " + "; ".join(parts + moved)
