"""Digest of a policy: equal for files that differ only in comments, order or layout. Pure.

It is the SHA-256 of one JSON text. Most tenants of a large policy differ in few values, and the loader makes equal
parts of them one object, so the text of a part is written once and remembered by its object.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from policy.model import PriceRule, PublicPrefix, Route, SharingGroup, Tenant

DIGEST_DOMAIN = "athanor policy 11"


def digest_of(
    tenants: Mapping[str, Tenant],
    groups: Mapping[str, SharingGroup],
    public: Mapping[str, PublicPrefix],
    prices: tuple[str, tuple[PriceRule, ...]],
    routes: Mapping[str, Route],
) -> str:
    """Hash the JSON form of ``[DIGEST_DOMAIN, tenants, groups, public, prices, routes]``, a part at a time: encoding
    thousands of tenants at once would keep all other threads waiting. ``prices`` begin with their currency."""
    shared = {name: asdict(group) | {"tenants": sorted(group.tenants)} for name, group in groups.items()}
    published = {name: asdict(prefix) for name, prefix in public.items()}
    priced = [prices[0], [asdict(rule) for rule in prices[1]]]
    state = hashlib.sha256(f"[{_json(DIGEST_DOMAIN)},{{".encode())
    texts: dict[tuple[str, int], str] = {}
    for index, tenant_id in enumerate(sorted(tenants)):
        state.update(f"{',' if index else ''}{_json(tenant_id)}:{_tenant_text(tenants[tenant_id], texts)}".encode())
    state.update(f"}},{_json(shared)},{_json(published)},{_json(priced)},".encode())
    state.update(f"{_json({name: asdict(route) for name, route in routes.items()})}]".encode())
    return state.hexdigest()


def _tenant_text(tenant: Tenant, texts: dict[tuple[str, int], str]) -> str:
    """Return a tenant as a JSON object with sorted keys. ``texts`` has the text of each value by its field and object;
    the tenants keep the objects, so no other one takes the place of any."""
    found = []
    for name, values_of in _FIELDS:
        value = getattr(tenant, name)
        text = texts.get((name, id(value)))
        if text is None:
            text = f'"{name}":{_json(values_of(value))}'
            if name not in _OWN:
                texts[name, id(value)] = text
        found.append(text)
    return f"{{{','.join(found)}}}"


def _section(part: Any) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in fields(part)}


def _content(part: Any) -> dict[str, Any]:
    return {**_section(part), "denied_fields": sorted({*part.denied_fields})}


def _model_regions(entries: Any) -> list[list[Any]]:
    return sorted([one.models, one.regions] for one in entries)


def _itself(value: Any) -> Any:
    return value


_OWN = frozenset({"id", "credentials"})
"""Fields whose values no two tenants share."""

_VALUES: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("limits", "features", "end_users", "kv"), _section),
    "content": _content,
    "model_regions": _model_regions,
    # The order of these lists carries no meaning.
    **dict.fromkeys(("credentials", "models", "networks", "regions", "hours", "adapters"), sorted),
}
"""Field of a tenant -> what its value is in JSON, where that is not the value itself."""

_FIELDS = tuple(sorted((field.name, _VALUES.get(field.name, _itself)) for field in fields(Tenant)))
_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
