"""Where the values of a policy are written, from its texts: for commands, not for requests. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from policy.allow_all import KEY, allowed_all, expanded
from policy.inheritance import OWN, Inheritance, Layer
from policy.loader import Source
from policy.model import PolicySet, Tenant
from policy.positions import Path, dotted, load_yaml
from policy.schema import PolicySchema, TenantSchema
from policy.written import WrittenFile

_RULE = re.compile(r"tenants\.(?P<tenant>[^.]+)\.(?P<keys>.+)")
_PART = re.compile(r"\[(?P<index>\d+)\]|(?P<key>[^.\[]+)")


@dataclass(frozen=True, slots=True)
class Origin:
    """Place of a value of a tenant."""

    path: str
    """Dotted path where it is written, such as ``tenant_groups.staff.limits.concurrency``, or of the key that stands
    for it, ``tenants.alpha.unsafe_allow_all``."""
    file: str
    line: int
    column: int
    inherited: bool
    """Whether it is written at a tenant group or the defaults."""

    def __str__(self) -> str:
        return f"{self.path} ({self.file}:{self.line}:{self.column})"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a tenant, as it is in effect."""

    path: str
    """Path below the tenant, such as ``limits.concurrency``."""
    value: Any
    """As a file has it; None: nothing is set, and there is no default."""
    origin: Origin | None
    """Where it is written; None: it is the schema's default, or follows from the class."""


def settings_of(sources: Iterable[Source], policy: PolicySet, tenant: str) -> list[Setting]:
    """Return what a tenant may have settings for, in the reference's order, its credentials and group left out.

    Args:
        sources: texts of the policy.
        policy: loaded from them.
        tenant: id of a tenant of it.
    """
    files = written_files(sources)
    inheritance = Inheritance(files)
    index = next(index for index, file in enumerate(files) if tenant in file.content.tenants)
    content = inheritance.effective(files)[index].content.tenants[tenant]
    found = []
    for name, field in TenantSchema.model_fields.items():
        key, value = field.alias or name, getattr(content, name)
        if key in OWN:
            continue
        sections = {f"{key}.{below}": one for below, one in value} if isinstance(value, BaseModel) else {key: value}
        for path, one in sections.items():
            layer = inheritance.origin(files[index], tenant, tuple(path.split(".")))
            shown = one.model_dump(exclude_none=True) if isinstance(one, BaseModel) else one
            found.append(
                _in_effect(Setting(path, shown, _origin(layer, tuple(path.split(".")))), policy.tenants[tenant])
            )
    return found


def _origin(layer: Layer | None, keys: Path) -> Origin | None:
    """Return the place of a value below a layer: of the one key that stands for it, where that is written instead."""
    if layer is None:
        return None
    stood_for = isinstance(layer.content, TenantSchema) and allowed_all(layer.content, str(keys[0]))
    path: Path = (*layer.path, KEY) if stood_for else (*layer.path, *keys)
    return Origin(dotted(path), layer.file.name, *layer.file.locator(path), layer.path[0] != "tenants")


def _in_effect(setting: Setting, tenant: Tenant) -> Setting:
    """Return a setting as the class of the tenant makes it."""
    values = {"deterministic": tenant.deterministic.value, "kv.borrow": tenant.kv.borrow}
    value = values.get(setting.path, setting.value)
    return setting if value == setting.value else Setting(setting.path, value, None)


def written_files(sources: Iterable[Source]) -> list[WrittenFile]:
    """Return the files of a policy that was loaded before, in the loader's order.

    Raises:
        PolicySyntaxError, pydantic.ValidationError: the texts are no policy.
    """
    files = []
    for source in sorted(sources, key=lambda source: source.name):
        data, locator = load_yaml(source.text, source.name)
        files.append(WrittenFile(source.name, locator, expanded(PolicySchema.model_validate(data)), source.files))
    return files


def find_origin(sources: Iterable[Source], rule: str) -> Origin | None:
    """Return where the value of a decision's rule is written; None for a rule that is no tenant's, and for a value that
    is written nowhere because it is the schema's default.

    Args:
        sources: texts of a policy that was loaded before.
        rule: path in the policy in effect, such as ``tenants.alpha.models[0]``.
    """
    found = _RULE.fullmatch(rule)
    if found is None:
        return None
    tenant = found["tenant"]
    keys: Path = tuple(int(part["index"]) if part["index"] else part["key"] for part in _PART.finditer(found["keys"]))
    files = written_files(sources)
    file = next((file for file in files if tenant in file.content.tenants), None)
    return None if file is None else _origin(Inheritance(files).origin(file, tenant, keys), keys)
