"""Where the values of a policy are written, from its texts: for commands, not for requests. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from policy.inheritance import Inheritance
from policy.loader import Source
from policy.positions import Path, dotted, load_yaml
from policy.schema import PolicySchema
from policy.written import WrittenFile

_RULE = re.compile(r"tenants\.(?P<tenant>[^.]+)\.(?P<keys>.+)")
_PART = re.compile(r"\[(?P<index>\d+)\]|(?P<key>[^.\[]+)")


@dataclass(frozen=True, slots=True)
class Origin:
    """Place of a value of a tenant."""

    path: str
    """Dotted path where it is written, such as ``tenant_groups.staff.limits.concurrency``."""
    file: str
    line: int
    column: int
    inherited: bool
    """Whether it is written at a tenant group or the defaults."""

    def __str__(self) -> str:
        return f"{self.path} ({self.file}:{self.line}:{self.column})"


def written_files(sources: Iterable[Source]) -> list[WrittenFile]:
    """Return the files of a policy that was loaded before, in the loader's order.

    Raises:
        PolicySyntaxError, pydantic.ValidationError: the texts are no policy.
    """
    files = []
    for source in sorted(sources, key=lambda source: source.name):
        data, locator = load_yaml(source.text, source.name)
        files.append(WrittenFile(source.name, locator, PolicySchema.model_validate(data), source.files))
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
    layer = None if file is None else Inheritance(files).origin(file, tenant, keys)
    if layer is None:
        return None
    path = (*layer.path, *keys)
    return Origin(dotted(path), layer.file.name, *layer.file.locator(path), layer.path[0] != "tenants")
