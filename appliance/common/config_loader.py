"""Reads the configuration: the file with the entries of models.d, then variables ``ATHANOR_*`` of the environment, then
options ``--set KEY=VALUE``.

A later source has precedence over an earlier one, key by key. Each problem names where the value was written: the place
in the file, the variable, or the option. Relative paths of all three are taken from the file's folder, so that a
configuration can be moved with what it names.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from appliance.common.config import ApplianceConfig
from appliance.common.config_keys import Key, default_words, keys
from appliance.common.config_text import ConfigText, Place
from appliance.common.errors import ConfigError
from appliance.common.model_entries import MODELS, ModelEntries, WrittenModels, entries_folder
from policy.errors import PolicyError
from policy.positions import dotted, load_yaml
from policy.wording import worded

PREFIX = "ATHANOR_"
NESTING = "__"
"""A variable's name: ``ATHANOR_SANDBOX__CORES`` is the key ``sandbox.cores``, ``ATHANOR_MODELS__0__NAME`` the key
``models[0].name``."""

DEFAULT = "default"
"""Origin of a value that no source gives."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration and the origin of each of its values."""

    config: ApplianceConfig
    origins: Mapping[str, str]
    """Dotted key to ``FILE:LINE:COLUMN``, variable, ``--set KEY``, or ``default``."""

    def values(self) -> dict[str, str]:
        """Dotted key to its value in words."""
        return {dotted(where): default_words(value) for where, value in values_of(self.config)}


@dataclass(frozen=True, slots=True)
class _Setting:
    """One variable or option."""

    name: str
    """How messages call it: the variable's name, or ``--set KEY``."""
    where: Place
    key: Key
    text: str


class _Overrides:
    """Environment variables, or options, over the sources ``below``. Collects problems in place of raising them."""

    def __init__(self, settings: Sequence[_Setting], below: Sequence[_Source], problems: list[str]) -> None:
        self.values: dict[str, Any] = {}
        self.names: dict[Place, str] = {}
        """Path of each value given to the name of what gives it."""
        for one in settings:
            try:
                for where, value in _leaves(one.where, _value(one)):
                    self.values = _grafted(self.values, where, value, [source.values for source in below])
                    self.names[where] = one.name
            except ValueError as error:
                problems.append(f"{one.name}: {error}")

    def behind(self, where: Place) -> str | None:
        """Name of what gives this value or a section or list around it."""
        return next((self.names[where[:end]] for end in range(len(where), 0, -1) if where[:end] in self.names), None)

    def within(self, where: Place) -> list[str]:
        """Names of what gives values inside this section."""
        return [name for place, name in self.names.items() if place[: len(where)] == where]


_Source = ConfigText | _Overrides


def load_config(
    path: Path, options: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> ApplianceConfig:
    """Configuration from the file, ``ATHANOR_*`` of the environment and options ``KEY=VALUE``.

    Raises:
        ConfigError: unreadable, or wrong; one line for each problem, with the place, variable or option that it is in.
    """
    return _merged(path, options, environment)[0]


def own_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of an environment that are the configuration's."""
    return {name: value for name, value in environment.items() if name.startswith(PREFIX)}


def resolve(path: Path, options: Sequence[str] = (), environment: Mapping[str, str] = os.environ) -> Resolved:
    """Configuration with the origin of each value; see ``load_config``."""
    config, file, overrides = _merged(path, options, environment)

    def origin(where: Place) -> str:
        given = next((name for source in overrides if (name := source.behind(where)) is not None), None)
        if file.entry(where) is not None:
            given = None  # What gives the list gives the models before it.
        return given or (file.place(where, of_key=True) if file.has(where) else DEFAULT)

    return Resolved(config, {dotted(where): origin(where) for where, _ in values_of(config)})


def values_of(node: Any, where: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Path and value of everything that is no section, in the schema's order."""
    if isinstance(node, BaseModel):
        for name, value in node:
            yield from values_of(value, (*where, name))
    elif isinstance(node, tuple) and any(isinstance(one, BaseModel) for one in node):
        for number, one in enumerate(node):
            yield from values_of(one, (*where, number))
    else:
        yield where, node


def _merged(
    path: Path, options: Sequence[str], environment: Mapping[str, str]
) -> tuple[ApplianceConfig, WrittenModels, tuple[_Overrides, ...]]:
    problems: list[str] = []
    file = ConfigText(path)
    variables = _Overrides(list(_variables(environment, problems)), [file], problems)
    chosen = _Overrides(list(_options(options, problems)), [variables, file], problems)
    if problems:
        raise ConfigError("\n".join(problems))
    values = _merge((chosen, variables, file))
    written = _with_entries(values, file, ModelEntries(entries_folder(path)))
    try:
        config = ApplianceConfig.model_validate(values)
    except ValidationError as error:
        items = error.errors(include_url=False)
        raise ConfigError("\n".join(_problem(item, written, (chosen, variables)) for item in items)) from error
    return config.anchored(path.resolve().parent), written, (chosen, variables)


def _with_entries(values: dict[str, Any], file: ConfigText, beside: ModelEntries) -> WrittenModels:
    """Add the entries of models.d to the models; gives the places of all values.

    Raises:
        ConfigError: two models have one name.
    """
    listed = values.get(MODELS) or []
    if not isinstance(listed, list):
        return WrittenModels(file, beside, 0)
    if beside.entries:
        values[MODELS] = [*listed, *beside.entries]
    written = WrittenModels(file, beside, len(listed))
    if same := list(written.same_names(values.get(MODELS) or [])):
        raise ConfigError("\n".join(same))
    return written


def _merge(sources: Iterable[_Source]) -> dict[str, Any]:
    """Values of all sources, not yet checked: the first has precedence, sections are merged key by key, and lists are
    taken as they stand."""
    merged: dict[str, Any] = {}
    for source in sources:
        merged = _over(merged, source.values)
    return merged


def _over(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings in one; what ``first`` gives holds."""
    both = {
        name: _over(first[name], second[name])
        for name in first.keys() & second.keys()
        if isinstance(first[name], Mapping) and isinstance(second[name], Mapping)
    }
    return {**second, **first, **both}


def _variables(environment: Mapping[str, str], problems: list[str]) -> Iterator[_Setting]:
    known = [_variable(name) for name in keys()]
    for variable in sorted(name for name in environment if name.startswith(PREFIX)):
        parts = variable.removeprefix(PREFIX).split(NESTING)
        where: Place = tuple(int(part) if part.isdecimal() else part.lower() for part in parts)
        key = _find(where) if variable.isupper() else None
        if key is None:
            problems.append(f"{variable}: unknown variable; {_hint(variable.upper(), known)}")
        else:
            yield _Setting(variable, where, key, environment[variable])


def _options(options: Sequence[str], problems: list[str]) -> Iterator[_Setting]:
    for option in options:
        key, equals, text = option.partition("=")
        where: Place = tuple(int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", key))
        found = _find(where)
        if not equals:
            problems.append(f"--set {option}: must be KEY=VALUE, as in sandbox.cores=4")
        elif found is None:
            problems.append(f"--set {key}: unknown key; {_hint(_shape(where), list(keys()))}")
        else:
            yield _Setting(f"--set {key}", where, found, text)


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "`athanor config reference` lists all"


def _variable(key: str) -> str:
    """Name of the variable of a key; list entries are counted from 0."""
    return PREFIX + key.replace("[]", ".0").replace(".", NESTING).upper()


def _find(where: Place) -> Key | None:
    """Key of the schema at a path; None for an unknown one."""
    name = _shape(where)
    return keys().get(name) or keys().get(f"{name}[]")


def _shape(where: Place) -> str:
    """Path in the form of the schema's keys: ``models[].name``."""
    return re.sub(r"\[\d+\]", "[]", dotted(where))


def _value(setting: _Setting) -> Any:
    """Value of a variable's or an option's text: text and paths as they stand, other types read as YAML.

    Raises:
        ValueError: not YAML.
    """
    if setting.text == "" and setting.key.optional:
        return None
    if setting.key.verbatim:
        return setting.text
    try:
        return load_yaml(setting.text, setting.name)[0]
    except PolicyError as error:
        raise ValueError(f"{setting.text!r} is not YAML as athanor.yaml has it; write lists as [a, b]") from error


def _leaves(where: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    """Path and value of everything in a mapping, so that a variable with a whole section merges key by key."""
    if not isinstance(value, dict) or not value:
        yield where, value
        return
    for name, inner in value.items():
        yield from _leaves((*where, name), inner)


def _grafted(node: Any, where: Place, value: Any, below: Sequence[Any]) -> Any:
    """``node`` with ``value`` at ``where``. A list is replaced as a whole when sources are merged, so one that ``node``
    lacks is copied from the first of ``below`` that has it.

    Raises:
        ValueError: an index beyond the end of a list.
    """
    if not where:
        return value
    head, rest = where[0], where[1:]
    if isinstance(head, str):
        inner = [one[head] for one in below if isinstance(one, dict) and head in one]
        mapping = node if isinstance(node, dict) else {}
        return {**mapping, head: _grafted(mapping.get(head), rest, value, inner)}
    entries = list(node if isinstance(node, list) else next((one for one in below if isinstance(one, list)), []))
    if head > len(entries):
        raise ValueError(f"there is no entry {head}: the list has {len(entries)}, and {len(entries)} would add one")
    entries[head : head + 1] = [_grafted(entries[head] if head < len(entries) else None, rest, value, ())]
    return entries


def _problem(item: Any, file: WrittenModels, overrides: Sequence[_Overrides]) -> str:
    """One of pydantic's errors as a line that begins with where the value was written."""
    where: Place = tuple(item["loc"])
    said = worded(item, _known_keys(where[:-1])).removeprefix("Value error, ")
    if file.entry(where) is not None:
        return f"{file.place(where, of_key=item['type'] == 'extra_forbidden')}: {file.name(where)}: {said}"
    scope = where[:-1] if item["type"] == "missing" else where
    given = [name for source in overrides if (name := source.behind(where)) is not None][:1]
    given = given or [name for source in overrides for name in source.within(scope)]
    # A key that is missing in a section is the file's problem, unless an override gave the section as a whole.
    of_file = item["type"] == "missing" and file.has(scope) and not any(one.behind(scope) for one in overrides)
    if given and scope and not of_file:
        return f"{', '.join(dict.fromkeys(given))}: {dotted(where)}: {said}"
    line = f"{file.place(where, of_key=item['type'] == 'extra_forbidden')}: {dotted(where)}: {said}"
    return f"{line} (with {', '.join(dict.fromkeys(given))} over the file)" if given and not scope else line


def _known_keys(where: Place) -> tuple[str, ...]:
    """Keys of the section at a path."""
    start = f"{_shape(where)}." if where else ""
    return tuple(
        name.removeprefix(start).removesuffix("[]")
        for name in keys()
        if name.startswith(start) and "." not in name.removeprefix(start)
    )
