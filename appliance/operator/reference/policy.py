"""docs/reference/policy.md: the keys of a policy file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from appliance.operator.reference.markdown import code, first_paragraph, page, section, table
from policy.content import REQUEST_FIELDS
from policy.schema import schema_text

ABOUT = """
Who may use which models, and how much. What a policy does not allow is denied. A policy is one file with every
`policy.d/*.yaml` beside it (of `policy.yaml`; `NAME.d` of `NAME.yaml`), or a folder of such files alone. Each file is
complete in itself, and no tenant, group, public prefix, route or credential stands in two of them. Tenants inherit from
tenant groups and `defaults` of all files (`docs/policy.md`). `athanor policy check FILE...` prints every problem with
its line and column, `athanor policy diff` what a new one changes, `athanor reload` puts an edited policy in force.
`athanor policy schema` prints this schema for editors. TENANT, GROUP and PREFIX are names that the file chooses:
lower-case letters, digits and dashes. NAME is what clients send as `model`.
"""

DENIED = """
The names of `denied_fields`, and what else they stand for. A field counts where it asks for something.
"""

SECTIONS = {
    "": "PolicySchema",
    "tenants.TENANT": "TenantSchema",
    "tenants.TENANT.limits": "LimitsSchema",
    "tenants.TENANT.limits.requests_per_minute": "RequestRateSchema",
    "tenants.TENANT.limits.tokens_per_minute": "TokenRateSchema",
    "tenants.TENANT.limits.concurrency": "ConcurrencySchema",
    "tenants.TENANT.limits.kv_tokens": "KvTokensSchema",
    "tenants.TENANT.features": "FeaturesSchema",
    "tenants.TENANT.content": "ContentSchema",
    "tenants.TENANT.end_users": "EndUsersSchema",
    "tenants.TENANT.model_regions[]": "ModelRegionsSchema",
    "tenants.TENANT.kv": "KvSchema",
    "defaults": "DefaultsSchema",
    "tenant_groups.GROUP": "TenantGroupSchema",
    "sharing_groups.GROUP": "GroupSchema",
    "sharing_groups.GROUP.kv": "KvSchema",
    "public_prefixes.PREFIX": "PublicPrefixSchema",
    "public_prefixes.PREFIX.messages[]": "PrefixMessageSchema",
    "prices": "PricesSchema",
    "prices.rules[]": "PriceSchema",
    "routes.NAME": "RouteSchema",
    "routes.NAME.to[]": "TargetSchema",
}
"""Place in the file to the definition in the schema."""

MEANINGS = {
    "version": "Version of the policy's form.",
    "limits": "Limits of the tenant; a section.",
    "features": "Parts of the API that can be withheld; a section.",
    "end_users": "Limits of each end user; a section.",
    "kv": "Share of the KV pool of each model; a section.",
    "role": "Role of the message, as chat templates know it.",
    "content": "Content of requests; a section. Of a message: its text.",
}
"""Meanings of keys whose schema has no description of its own."""


MOST_NAMED = 12
"""Words that the type of a key lists; more are a table of their own."""


Row = tuple[str, str, str, str]
"""Key, type, default and meaning, with code between backticks."""


def sections() -> Iterator[tuple[str, str, list[Row]]]:
    """Place in the file, meaning and rows of each section."""
    schema = json.loads(schema_text())
    for place, name in SECTIONS.items():
        shape = schema if name == "PolicySchema" else schema["$defs"][name]
        required = shape.get("required", ())
        rows: list[Row] = [(key, *_facts(key, one, key in required)) for key, one in shape["properties"].items()]
        yield place, first_paragraph(shape.get("description")), rows


def render() -> str:
    """The page."""
    parts = []
    for place, about, rows in sections():
        cells = [[code(key), *facts] for key, *facts in rows]
        parts.append(
            section(code(place) or "At the top", about + "\n", table(("key", "type", "default", "meaning"), cells))
        )
    fields = [f"- {code(name)}{f': {about}' if about else ''}" for name, about in REQUEST_FIELDS.items()]
    parts.append(section("Fields that can be denied", DENIED.lstrip(), "\n".join(fields) + "\n"))
    return page("Policy", ABOUT, *parts)


def _facts(key: str, shape: Mapping[str, Any], required: bool) -> tuple[str, str, str]:
    meaning = shape.get("description") or MEANINGS[key]
    default = "required" if required else _default(shape)
    return _type(shape), default, meaning


def _default(shape: Mapping[str, Any]) -> str:
    value = shape.get("default", ...)
    if value is ... or isinstance(value, dict):
        return "defaults of its keys" if "$ref" in shape else "none"
    return "none" if value is None else code(str(value).lower() if isinstance(value, bool) else str(value))


def _type(shape: Mapping[str, Any]) -> str:
    """Type in words, with its bounds."""
    match shape:
        case {"enum": values} if len(values) > MOST_NAMED:
            return "one of the fields below"
        case {"enum": values}:
            return "one of " + ", ".join(map(str, values))
        case {"const": value}:
            return str(value)
        case {"anyOf": several} | {"oneOf": several}:
            return " or ".join(_type(one) for one in several if one.get("type") != "null")
        case {"$ref": _}:
            return "section"
        case {"type": "object"}:
            return f"mapping, at most {shape['maxProperties']} entries"
        case {"type": "array", "items": items}:
            return f"list of {shape.get('minItems', 0)} to {shape['maxItems']}: {_type(items)}"
        case {"type": "number"}:
            return f"number, {shape['minimum']:g} to {shape['maximum']:.0f}"
        case {"type": "integer"}:
            return f"whole number, {shape['minimum']} to {shape['maximum']}"
        case {"type": "string", "pattern": pattern}:
            return f"text like {code(pattern)}"
    return {"boolean": "true or false", "string": "text"}[shape["type"]]
