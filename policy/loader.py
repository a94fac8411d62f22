"""Policy texts to one ``PolicySet``, or every problem found, each as ``file:line:column: path:
message``.

One file or a directory of drop-ins: each file is complete in itself (version and tenants), files
are read in the lexical order of their names, and a tenant or a credential stands in one file
only. Nothing is half loaded: any problem in any file refuses all of them, and the caller keeps
the policy it has.

Pure: ``policy.files`` or the caller reads the files.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from policy.errors import PolicySchemaError, PolicySyntaxError, Problem
from policy.model import Determinism, Features, IsolationClass, Limits, PolicySet, Priority, Retention, Tenant
from policy.positions import Locator, Path, dotted, load_yaml
from policy.schema import FeaturesSchema, LimitsSchema, PolicySchema, TenantSchema

MAX_PROBLEMS = 100
"""Problems reported of one load; past that, mending the first ones comes first."""

SHOWN_CHARACTERS = 40
"""Characters of a wrong value repeated in a message."""

DIGEST_DOMAIN = "athanor policy 1"


@dataclass(frozen=True, slots=True)
class Source:
    """One policy text and the name its problems carry."""

    name: str
    text: str


def load_policy(sources: Iterable[Source]) -> PolicySet:
    """The policy that all ``sources`` make together.

    Raises:
        PolicySyntaxError: a text is not the YAML we accept (see ``policy.positions``).
        PolicySchemaError: the YAML is no policy, or sources contradict each other.
    """
    syntax: list[Problem] = []
    problems: list[Problem] = []
    files: list[_File] = []
    for source in sorted(sources, key=lambda source: source.name):
        try:
            data, locator = load_yaml(source.text, source.name)
        except PolicySyntaxError as error:
            syntax.extend(error.problems)
            continue
        try:
            files.append(_File(source.name, locator, PolicySchema.model_validate(data)))
        except ValidationError as error:
            problems.extend(_problems(error, source.name, locator))
    if syntax:
        raise PolicySyntaxError(syntax[:MAX_PROBLEMS])
    tenants, principals = _merged(files, problems)
    if problems:
        raise PolicySchemaError(problems[:MAX_PROBLEMS])
    return PolicySet(MappingProxyType(tenants), MappingProxyType(principals), _digest(tenants))


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    locator: Locator
    content: PolicySchema

    def problem(self, path: Path, message: str, *, at_key: bool = False) -> Problem:
        place = self.locator.key(path) if at_key else self.locator(path)
        return Problem(self.name, *place, dotted(path), message)


def _merged(files: Sequence[_File], problems: list[Problem]) -> tuple[dict[str, Tenant], dict[str, str]]:
    tenants: dict[str, Tenant] = {}
    principals: dict[str, str] = {}
    origin: dict[str, str] = {}
    for file in files:
        for tenant_id, content in file.content.tenants.items():
            path: Path = ("tenants", tenant_id)
            if tenant_id in tenants:
                message = f"tenant {tenant_id!r} stands in {origin[tenant_id]} already"
                problems.append(file.problem(path, message, at_key=True))
                continue
            origin[tenant_id] = file.name
            tenants[tenant_id] = _tenant(tenant_id, content)
            written = "deterministic" in content.model_fields_set
            if written and tenants[tenant_id].deterministic.value != content.deterministic:
                message = f"class strict is always deterministic; leave {content.deterministic!r} out, or the class"
                problems.append(file.problem((*path, "deterministic"), message))
            for index, credential in enumerate(content.credentials):
                owner = principals.setdefault(credential, tenant_id)
                if owner != tenant_id or content.credentials.index(credential) != index:
                    message = f"credential {credential!r} belongs to tenant {owner!r} already"
                    problems.append(file.problem((*path, "credentials", index), message))
    return tenants, principals


def _tenant(tenant_id: str, content: TenantSchema) -> Tenant:
    isolation_class = IsolationClass(content.isolation_class)
    return Tenant(
        id=tenant_id,
        credentials=tuple(content.credentials),
        models=tuple(content.models),
        isolation_class=isolation_class,
        retention=Retention(content.retention),
        weight=content.weight,
        priority=Priority(content.priority),
        deterministic=Determinism.ALWAYS if isolation_class.exact else Determinism(content.deterministic),
        limits=Limits(**content.limits.model_dump()),
        features=Features(**content.features.model_dump()),
    )


def _digest(tenants: Mapping[str, Tenant]) -> str:
    content = {}
    for tenant_id, tenant in tenants.items():
        values = asdict(tenant)
        # The order of these two lists carries no meaning.
        content[tenant_id] = values | {
            "credentials": sorted(values["credentials"]),
            "models": sorted(values["models"]),
        }
    canonical = json.dumps([DIGEST_DOMAIN, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


_KNOWN_KEYS = {
    0: tuple(PolicySchema.model_fields),
    2: tuple(field.alias or name for name, field in TenantSchema.model_fields.items()),
}
"""Keys of the mapping at each depth: the file, ``tenants.ID``."""

_KNOWN_BELOW = {
    "features": tuple(FeaturesSchema.model_fields),
    "limits": tuple(LimitsSchema.model_fields),
}
"""Keys of the mappings of a tenant."""


def _problems(error: ValidationError, name: str, locator: Locator) -> list[Problem]:
    found = []
    for item in error.errors(include_url=False):
        at_key = item["type"] == "extra_forbidden" or item["loc"][-1:] == ("[key]",)
        path = tuple(part for part in item["loc"] if part != "[key]")
        place = locator.key(path) if at_key else locator(path)
        found.append(Problem(name, *place, dotted(path), _message(item, path)))
    return sorted(found, key=lambda problem: (problem.line, problem.column))


_MESSAGES: Mapping[str, str] = {
    "missing": "this key is required",
    "int_type": "must be a whole number, found {shown}",
    "string_type": "must be text, found {shown}",
    "list_type": "must be a list, found {shown}",
    "model_type": "must be a mapping, found {shown}",
    "dict_type": "must be a mapping, found {shown}",
    "greater_than_equal": "must be at least {ge}, found {shown}",
    "less_than_equal": "must be at most {le}, found {shown}",
    "literal_error": "must be {expected}, found {shown}",
    "too_short": "must have at least {min_length} entry",
    "too_long": "must have at most {max_length} entries",
    "string_pattern_mismatch": "{shown} does not fit the pattern {pattern}",
}
"""Our wording for the kinds of error that pydantic reports; its own text stands for any other."""


def _message(item: Mapping[str, Any], path: Path) -> str:
    if item["type"] == "extra_forbidden":
        return _unknown_key(path)
    template = _MESSAGES.get(item["type"])
    if template is None:
        return str(item["msg"])
    return template.format_map({**item.get("ctx", {}), "shown": _shown(item["input"])})


def _unknown_key(path: Path) -> str:
    known = _KNOWN_BELOW[str(path[2])] if len(path) > 3 else _KNOWN_KEYS[len(path) - 1]
    close = difflib.get_close_matches(str(path[-1]), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
    return f"unknown key; {hint}"


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
