"""Policy texts to one ``PolicySet``, or every problem found, each as ``file:line:column: path: message``.

The policy is one file with a directory of drop-ins beside it, or such a directory alone: each file is complete in
itself (version and tenants), files are read in the lexical order of their paths, and a tenant, a group, a public prefix
or a credential may appear in one file only. Tenant groups and defaults hold for the tenants of all files. Loading is
atomic: any problem in any file refuses all of them, and the caller keeps its current policy.

Pure: ``policy.files`` or the caller reads the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from policy import allow_all
from policy.content_schema import ContentSchema
from policy.digest import digest_of
from policy.end_user_schema import EndUsersSchema
from policy.errors import PolicySchemaError, PolicySyntaxError, Problem
from policy.inheritance import Inheritance
from policy.model import (
    IsolationClass,
    Namespace,
    PolicySet,
    Price,
    PriceRule,
    PublicPrefix,
    Retention,
    Route,
    SharingGroup,
    Tenant,
)
from policy.positions import Locator, Path, dotted, load_yaml
from policy.prices import BILLIONTHS_A_TOKEN
from policy.public_prefixes import PrefixError, read_prefix
from policy.rate_schema import KNOWN, without_marks
from policy.route_reading import read_routes
from policy.route_schema import RouteSchema, TargetSchema
from policy.schema import (
    MAX_PUBLIC_PREFIXES,
    MAX_TENANTS,
    MODELS_FROM,
    BatchPriceSchema,
    DefaultsSchema,
    FeaturesSchema,
    GroupSchema,
    KvSchema,
    LimitsSchema,
    PolicySchema,
    PrefixMessageSchema,
    PriceSchema,
    PricesSchema,
    PublicPrefixSchema,
    TenantGroupSchema,
    TenantSchema,
)
from policy.shares import check_partition, check_reservations, check_share, share_of
from policy.tenant_parts import TenantParts
from policy.wording import worded
from policy.written import WrittenFile

MAX_PROBLEMS = 100
"""Largest number of problems reported for one load."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """A policy text and the name shown in its problems."""

    name: str
    text: str
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of the folder ``public`` beside it, by name."""


def load_policy(sources: Iterable[Source]) -> PolicySet:
    """Load the policy that all ``sources`` together describe.

    Raises:
        PolicySyntaxError: a text is not the YAML we accept (see ``policy.positions``).
        PolicySchemaError: the YAML is no policy, or sources contradict each other.
    """
    syntax: list[Problem] = []
    problems: list[Problem] = []
    files: list[WrittenFile] = []
    refused: list[object] = []
    for source in sorted(sources, key=lambda source: source.name):
        try:
            data, locator = load_yaml(source.text, source.name)
        except PolicySyntaxError as error:
            syntax.extend(error.problems)
            continue
        try:
            content = PolicySchema.model_validate(data)
        except ValidationError as error:
            problems.extend(_problems(error, source.name, locator, data))
            refused.append(data)
            continue
        files.append(WrittenFile(source.name, locator, allow_all.expanded(content), source.files))
        problems.extend(allow_all.contradictions(files[-1], content))
        _free(data["tenants"])
        if files[-1].content is not content:
            _free(content.tenants)
    if syntax:
        raise PolicySyntaxError(syntax[:MAX_PROBLEMS])
    inheritance = Inheritance(files, refused)
    written, files = files, inheritance.effective(files)
    problems.extend(inheritance.problems)
    tenants, principals = _merged(files, problems)
    groups = _grouped(files, tenants, problems)
    routes = read_routes(files, problems)
    public = _published(files, tenants, routes, problems)
    check_reservations(files, problems)
    _check_accounts(files, problems)
    currency, prices = _priced(files, problems)
    if problems:
        raise PolicySchemaError(inheritance.told(problems)[:MAX_PROBLEMS])
    digest = digest_of(tenants, groups, public, (currency, prices), routes)
    for file in (*files, *written):
        _free(file.content.tenants)
    maps = MappingProxyType(tenants), MappingProxyType(principals), MappingProxyType(groups), MappingProxyType(public)
    return PolicySet(maps[0], maps[1], digest, maps[2], maps[3], prices, currency, MappingProxyType(routes))


def _free(mapping: dict[Any, Any]) -> None:
    """Free a mapping of thousands of tenants one by one: freed at once they keep all other threads waiting."""
    while mapping:
        mapping.popitem()


def _merged(files: Sequence[WrittenFile], problems: list[Problem]) -> tuple[dict[str, Tenant], dict[str, str]]:
    tenants: dict[str, Tenant] = {}
    principals: dict[str, str] = {}
    origin: dict[str, str] = {}
    parts = TenantParts()
    for file in files:
        for tenant_id, content in file.content.tenants.items():
            path: Path = ("tenants", tenant_id)
            if tenant_id in tenants:
                message = f"tenant {tenant_id!r} stands in {origin[tenant_id]} already"
                problems.append(file.problem(path, message, at_key=True))
                continue
            origin[tenant_id] = file.name
            tenants[tenant_id] = parts.tenant(tenant_id, content)
            written = "deterministic" in content.model_fields_set and not content.unsafe_allow_all
            if written and tenants[tenant_id].deterministic.value != content.deterministic:
                message = f"class strict is always deterministic; leave {content.deterministic!r} out, or the class"
                problems.append(file.problem((*path, "deterministic"), message))
            if content.freeze_idle and tenants[tenant_id].isolation_class.exact:
                message = "a thaw shows that nobody was served; class strict shows nothing of others: leave it out"
                problems.append(file.problem((*path, "freeze_idle"), message))
            if tenants[tenant_id].isolation_class.partitions:
                check_partition(file, path, content.kv, problems)
            elif content.kv.model_fields_set:
                check_share(file, path, content.kv, problems)
            for index, credential in enumerate(content.credentials):
                owner = principals.get(credential)
                if owner is None:
                    principals[credential] = tenant_id
                else:
                    where = f" in {origin[owner]}" if origin[owner] != file.name else ""
                    message = f"credential {credential!r} belongs to tenant {owner!r}{where} already"
                    problems.append(file.problem((*path, "credentials", index), message))
    return tenants, principals


def _grouped(
    files: Sequence[WrittenFile], tenants: dict[str, Tenant], problems: list[Problem]
) -> dict[str, SharingGroup]:
    """Collect all sharing groups and record them in their members."""
    groups: dict[str, SharingGroup] = {}
    origin: dict[str, str] = {}
    for file in files:
        for group_id, content in file.content.sharing_groups.items():
            path: Path = ("sharing_groups", group_id)
            if group_id in groups:
                message = f"sharing group {group_id!r} stands in {origin[group_id]} already"
                problems.append(file.problem(path, message, at_key=True))
                continue
            origin[group_id] = file.name
            groups[group_id] = SharingGroup(id=group_id, tenants=tuple(content.tenants), kv=share_of(content.kv))
            check_share(file, path, content.kv, problems)
            for index, member in enumerate(content.tenants):
                objection = _objection(tenants.get(member), member)
                if objection is not None:
                    problems.append(file.problem((*path, "tenants", index), objection))
                elif member in tenants:
                    tenants[member] = replace(tenants[member], group=group_id)
    return groups


def _published(
    files: Sequence[WrittenFile], tenants: dict[str, Tenant], routes: Mapping[str, Route], problems: list[Problem]
) -> dict[str, PublicPrefix]:
    """Collect all public prefixes and record them in the tenants that may use them."""
    found: dict[str, PublicPrefix] = {}
    origin: dict[str, str] = {}
    for file in files:
        for name, content in file.content.public_prefixes.items():
            path: Path = ("public_prefixes", name)
            if name in origin:
                message = f"public prefix {name!r} stands in {origin[name]} already"
                problems.append(file.problem(path, message, at_key=True))
                continue
            origin[name] = file.name
            try:
                found[name] = read_prefix(name, content, file.files, tenants, routes)
            except PrefixError as error:
                problems.append(file.problem((*path, *error.key), error.message, at_key=not error.key))
                continue
            if len(found) > MAX_PUBLIC_PREFIXES:
                message = f"there are more than {MAX_PUBLIC_PREFIXES} public prefixes together"
                problems.append(file.problem(path, message, at_key=True))
    for name in sorted(found):
        for member in found[name].tenants:
            tenants[member] = replace(tenants[member], public=(*tenants[member].public, name))
    return found


def _priced(files: Sequence[WrittenFile], problems: list[Problem]) -> tuple[str, tuple[PriceRule, ...]]:
    """Return currency and prices, which one file has; a limit of spend needs them."""
    priced = [(file, file.content.prices) for file in files if file.content.prices is not None]
    for file, _ in priced[1:]:
        message = f"prices stand in {priced[0][0].name} already; their order decides, so one file has them all"
        problems.append(file.problem(("prices",), message, at_key=True))
    if not priced:
        for file in files:
            for tenant_id, tenant in file.content.tenants.items():
                for key in ("spend_per_day", "spend_per_month"):
                    if getattr(tenant.limits, key) is not None:
                        message = "without prices nothing has a cost: write prices, or leave the limit out"
                        problems.append(file.problem(("tenants", tenant_id, "limits", key), message))
        return "", ()
    content = priced[0][1]
    for index, rule in enumerate(content.rules):
        for one, path in ((rule, ()), (rule.batch, ("batch",))):
            if one is not None and one.cached_input is not None and one.cached_input > one.input:
                message = "a cached token must not cost more than a computed one: limits reserve the price of input"
                problems.append(priced[0][0].problem(("prices", "rules", index, *path, "cached_input"), message))
    return content.currency, tuple(map(_price_rule, content.rules))


def _price_rule(content: PriceSchema) -> PriceRule:
    return PriceRule(
        models=tuple(content.models),
        isolation_class=None if content.isolation_class is None else IsolationClass(content.isolation_class),
        price=_price(content),
        batch=None if content.batch is None else _price(content.batch),
    )


def _price(content: PriceSchema | BatchPriceSchema) -> Price:
    cached = content.input if content.cached_input is None else content.cached_input
    return Price(
        input=round(content.input * BILLIONTHS_A_TOKEN),
        cached_input=round(cached * BILLIONTHS_A_TOKEN),
        output=round(content.output * BILLIONTHS_A_TOKEN),
    )


def _objection(tenant: Tenant | None, name: str) -> str | None:
    """Return the reason why a tenant cannot be in a group that names it; None when it can."""
    if tenant is None:
        return f"there is no tenant {name!r}"
    if tenant.group is not None:
        return f"tenant {name!r} is in sharing group {tenant.group!r} already"
    if tenant.retention is Retention.NONE:
        return f"tenant {name!r} has retention none: nothing of it may be kept, so nothing can be shared"
    if tenant.namespace is Namespace.USER:
        return f"tenant {name!r} has namespace user: its end users share no blocks, so other tenants cannot either"
    if tenant.isolation_class is not IsolationClass.SHARED:
        return f"tenant {name!r} is of class {tenant.isolation_class.value}, which shares nothing"
    if tenant.kv.bounded:
        return f"tenant {name!r} has a kv of its own; its blocks are the group's, so write kv at the group"
    return None


def _check_accounts(files: Sequence[WrittenFile], problems: list[Problem]) -> None:
    """Check that the tenants and sharing groups of all files do not exceed ``MAX_TENANTS``, the number of KV accounts
    in an engine; report the first one too many."""
    count = 0
    for file in files:
        paths: list[Path] = [("tenants", name) for name in file.content.tenants]
        paths += [("sharing_groups", name) for name in file.content.sharing_groups]
        count += len(paths)
        if count > MAX_TENANTS:
            message = f"there are more than {MAX_TENANTS} tenants and sharing groups together"
            problems.append(file.problem(paths[MAX_TENANTS - count], message, at_key=True))
            return


_KNOWN_KEYS = {
    "tenants": tuple(field.alias or name for name, field in TenantSchema.model_fields.items()),
    "defaults": tuple(field.alias or name for name, field in DefaultsSchema.model_fields.items()),
    "tenant_groups": tuple(field.alias or name for name, field in TenantGroupSchema.model_fields.items()),
    "sharing_groups": tuple(GroupSchema.model_fields),
    "public_prefixes": tuple(PublicPrefixSchema.model_fields),
    "prices": tuple(PricesSchema.model_fields),
    "routes": tuple(RouteSchema.model_fields),
}
"""Keys of the mappings in the file: ``tenants.ID``, ``defaults``, ``tenant_groups.ID``, ``sharing_groups.ID``,
``public_prefixes.ID``, ``prices``, ``routes.NAME``."""

_KNOWN_BELOW = {
    "kv": tuple(KvSchema.model_fields),
    "features": tuple(FeaturesSchema.model_fields),
    "content": tuple(ContentSchema.model_fields),
    "end_users": tuple(EndUsersSchema.model_fields),
    "limits": tuple(LimitsSchema.model_fields),
    "messages": tuple(PrefixMessageSchema.model_fields),
    "rules": tuple(field.alias or name for name, field in PriceSchema.model_fields.items()),
    "to": tuple(TargetSchema.model_fields),
    "batch": tuple(BatchPriceSchema.model_fields),
}
"""Keys of the mappings of a tenant, a group or a public prefix, and of an entry of ``prices.rules`` or ``to``."""


_SECTIONS = frozenset({"defaults", "prices"})
"""Sections whose entries have no names of their own."""


def _problems(error: ValidationError, name: str, locator: Locator, data: object) -> list[Problem]:
    missing = [(*path, "models") for path in _without_models(data)]
    found = [Problem(name, *locator(path), dotted(path), "this key is required") for path in missing]
    for item in error.errors(include_url=False):
        at_key = item["type"] == "extra_forbidden" or item["loc"][-1:] == ("[key]",)
        path = tuple(part for part in without_marks(item["loc"]) if part != "[key]")
        place = locator.key(path) if at_key else locator(path)
        found.append(Problem(name, *place, dotted(path), _message(item, path)))
    return sorted(found, key=lambda problem: (problem.line, problem.column))


def _message(item: Mapping[str, Any], path: Path) -> str:
    if item["type"] != "extra_forbidden" or len(path) == 1:
        return worded(item, tuple(PolicySchema.model_fields))
    inside = path[1 if path[0] in _SECTIONS else 2 :]
    if path[0] in ("tenant_groups", "defaults") and len(inside) == 1 and inside[0] in _KNOWN_KEYS["tenants"]:
        return (
            f"only tenants{'' if inside[0] in ('credentials', allow_all.KEY) else ' and tenant groups'} have this key"
        )
    if len(inside) > 2 and inside[1] in KNOWN:
        return worded(item, KNOWN[str(inside[1])])
    return worded(item, _KNOWN_BELOW[str(inside[0])] if len(inside) > 1 else _KNOWN_KEYS[str(path[0])])


def _without_models(data: object) -> list[Path]:
    """Return the path of each tenant in the data of a refused file that neither has models nor can inherit them."""
    tenants = data.get("tenants") if isinstance(data, dict) else None
    found = tenants.items() if isinstance(tenants, dict) else ()
    return [("tenants", name) for name, one in found if isinstance(one, dict) and not one.keys() & {*MODELS_FROM}]
