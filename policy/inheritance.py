"""Tenant groups and defaults: what each tenant has in effect, and where that is written. Pure.

A key of a tenant comes from the tenant, else from its group, that group's group and so on, else from ``defaults``, else
from the schema. Sections such as ``limits`` are merged key by key; a list, or any other value of a key, is replaced
whole. The tenants of an ``EffectiveFile`` have all these keys, and its problems stand where a value is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from policy.errors import Problem
from policy.positions import Path
from policy.schema import MAX_TENANT_GROUPS, DefaultsSchema, TenantSchema
from policy.told import listed
from policy.written import WrittenFile

MAX_INHERITANCE = 8
"""Largest number of tenant groups from which one tenant inherits: its own, that group's, and so on. More than an
operator can follow."""

MERGED_KEYS = 2
"""Keys in a path down to which values are merged: a section of a tenant, and a key of that."""

OWN = frozenset({"credentials", "inherits", "unsafe_allow_all"})
"""Keys that are never inherited."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A tenant, a tenant group or the defaults, as written."""

    file: WrittenFile
    path: Path
    content: DefaultsSchema

    def has(self, keys: Path) -> bool:
        """Return whether the value at ``keys`` is written here; parts below the key of a section come with it."""
        part: object = self.content
        for key in keys[:MERGED_KEYS]:
            if not isinstance(part, BaseModel):
                break
            name = _ALIASES.get(str(key), str(key))
            if name not in part.model_fields_set:
                return False
            part = getattr(part, name)
        return True


_ALIASES = {field.alias: name for name, field in TenantSchema.model_fields.items() if field.alias}
"""Field by key, where they differ."""


@dataclass(frozen=True, slots=True)
class EffectiveFile(WrittenFile):
    """A file whose tenants have what they inherit."""

    written: WrittenFile
    inheritance: Inheritance

    def problem(self, path: Path, message: str, *, at_key: bool = False) -> Problem:
        """Return a problem of the value at ``path``, where that is written: perhaps in a group, and in another file."""
        return self.inheritance.problem(self.written, path, message, at_key=at_key)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a tenant inherits."""

    values: Mapping[str, Any]
    """Value by the name of its field; those that are written."""
    whole: bool
    """Whether all of it is known: without an unknown group, a circle, or a file that cannot be read."""


class Inheritance:
    """Tenant groups and defaults of all files of a policy."""

    def __init__(self, files: Sequence[WrittenFile], unread: Iterable[object] = ()) -> None:
        """``unread``: data of the files that are refused: what may be in them is not taken for missing."""
        self.problems: list[Problem] = []
        """Problems of groups, defaults and what inherits them, in the order of the files."""
        refused = [data for data in unread if isinstance(data, dict)]
        self._unread = {str(name) for data in refused for name in _keys(data.get("tenant_groups"))}
        self._whole = not any("defaults" in data for data in refused)
        self._defaults: list[Layer] = []
        self._groups: dict[str, Layer] = {}
        for file in files:
            self._collect(file)
        self._check_groups()
        below = _laid_over(self._defaults[0].content, {}) if self._defaults else {}
        self._settings = {"": _Settings(below, self._whole)}
        self._heirs: dict[Problem, list[str]] = {}
        self._doubtful: set[Problem] = set()

    def effective(self, files: Sequence[WrittenFile]) -> list[WrittenFile]:
        """Return the files with all that their tenants have; what is missing is added to ``problems``."""
        return [self._effective(file) for file in files]

    def origin(self, file: WrittenFile, tenant: str, keys: Path) -> Layer | None:
        """Return where a tenant of ``file`` has the value at ``keys`` from; None where it is written nowhere."""
        content = file.content.tenants[tenant]
        own = Layer(file, ("tenants", tenant), content)
        layers = (own, *self._chain(content.inherits)[0], *self._defaults)
        return next((layer for layer in layers if layer.has(keys)), None)

    def problem(self, file: WrittenFile, path: Path, message: str, *, at_key: bool = False) -> Problem:
        """Return a problem of the value that is in effect at ``path`` of ``file``."""
        if len(path) < 3 or path[0] != "tenants" or path[2] in OWN:
            return file.problem(path, message, at_key=at_key)
        name, keys = str(path[1]), path[2:]
        layer = self.origin(file, name, keys) or Layer(file, path[:2], file.content.tenants[name])
        found = layer.file.problem((*layer.path, *keys), message, at_key=at_key)
        if not self._settings_of(file.content.tenants[name].inherits).whole:
            self._doubtful.add(found)
        elif layer.path != path[:2]:
            self._heirs.setdefault(found, []).append(name)
        return found

    def told(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return each problem once. One of an inherited value names the tenants that have it; one that may be gone when
        all that a tenant inherits is known is left out, since another problem says what is not known."""
        found = []
        for problem in dict.fromkeys(problems):
            heirs = self._heirs.get(problem)
            if heirs:
                verb = f"tenant {heirs[0]} inherits" if len(heirs) == 1 else f"tenants {listed(heirs)} inherit"
                found.append(replace(problem, message=f"{problem.message}; {verb} it"))
            elif problem not in self._doubtful:
                found.append(problem)
        return found

    def _collect(self, file: WrittenFile) -> None:
        """Take the groups and the defaults of one file."""
        for name, content in file.content.tenant_groups.items():
            path: Path = ("tenant_groups", name)
            if name in self._groups:
                message = f"tenant group {name!r} stands in {self._groups[name].file.name} already"
                self.problems.append(file.problem(path, message, at_key=True))
                continue
            self._groups[name] = Layer(file, path, content)
            if len(self._groups) == MAX_TENANT_GROUPS + 1:
                message = f"there are more than {MAX_TENANT_GROUPS} tenant groups together"
                self.problems.append(file.problem(path, message, at_key=True))
        if file.content.defaults is None:
            return
        if self._defaults:
            message = f"defaults stand in {self._defaults[0].file.name} already; one file has them"
            self.problems.append(file.problem(("defaults",), message, at_key=True))
        else:
            self._defaults.append(Layer(file, ("defaults",), file.content.defaults))

    def _check_groups(self) -> None:
        """Check that each group's chain ends, and is not too long; each circle is told once."""
        in_circles: set[str] = set()
        for name, layer in self._groups.items():
            members = {name: None}
            following = _inherits(layer)
            self._check_name(layer, following)
            while following in self._groups and following not in members:
                members[following] = None
                following = _inherits(self._groups[following])
            if following == name and name not in in_circles:
                in_circles |= members.keys()
                way = f", by way of {listed([*members][1:])}" if len(members) > 1 else ""
                message = f"this tenant group inherits from itself{way}"
            elif following not in members and len(members) == MAX_INHERITANCE + 1:
                message = f"this chain has more than {MAX_INHERITANCE} tenant groups: {', '.join(members)}"
            else:
                continue
            self.problems.append(layer.file.problem((*layer.path, "inherits"), message))

    def _check_name(self, layer: Layer, name: str) -> None:
        if name and name not in self._groups and name not in self._unread:
            message = f"there is no tenant group {name!r}"
            self.problems.append(layer.file.problem((*layer.path, "inherits"), message))

    def _chain(self, name: str) -> tuple[list[Layer], bool]:
        """Return a group and what it inherits, and whether that is known to its end."""
        layers: list[Layer] = []
        while name:
            layer = self._groups.get(name)
            if layer is None or len(layers) == MAX_INHERITANCE:
                return layers, False
            layers.append(layer)
            name = _inherits(layer)
        return layers, True

    def _settings_of(self, name: str) -> _Settings:
        """Return what a tenant of this group inherits; of no group, when the name is empty."""
        found = self._settings.get(name)
        if found is None:
            layers, whole = self._chain(name)
            values = self._settings[""].values
            for layer in reversed(layers):
                values = _laid_over(layer.content, values)
            found = self._settings[name] = _Settings(values, whole and self._whole)
        return found

    def _effective(self, file: WrittenFile) -> WrittenFile:
        """Return a file with all that its tenants have; the file itself where they inherit nothing."""
        changed: dict[str, TenantSchema] = {}
        doubtful = False
        for name, content in file.content.tenants.items():
            settings = self._settings_of(content.inherits)
            doubtful |= not settings.whole
            if content.inherits:
                self._check_name(Layer(file, ("tenants", name), content), content.inherits)
            if settings.values:
                changed[name] = content.model_copy(update=_laid_over(content, settings.values))
            if not content.models and "models" not in settings.values and (settings.whole or not content.inherits):
                where = ", here or in a tenant group from which the tenant inherits" if content.inherits else ""
                self.problems.append(file.problem(("tenants", name, "models"), f"this key is required{where}"))
        if not changed and not doubtful:
            return file
        whole = file.content.model_copy(update={"tenants": {**file.content.tenants, **changed}})
        return EffectiveFile(file.name, file.locator, whole, file.files, file, self)


def _inherits(layer: Layer) -> str:
    name: str = getattr(layer.content, "inherits", "")
    return name


def _keys(value: object) -> Iterable[object]:
    return value if isinstance(value, dict) else ()


def _laid_over(content: BaseModel, below: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is written in ``content``, and what is below where nothing is."""
    own = content.model_fields_set - OWN
    return {**below, **{name: _merged(getattr(content, name), below.get(name)) for name in own}}


def _merged(value: Any, below: Any) -> Any:
    """Return a value over the one below it. Of a section the keys are merged, and the value of a key stays whole: its
    parts were checked together."""
    if not isinstance(value, BaseModel) or not isinstance(below, BaseModel):
        return value
    return below.model_copy(update={name: getattr(value, name) for name in value.model_fields_set})
