"""Keys of the configuration as a flat table: name, type, unit, default, meaning; derived from ``config``'s sections.

Needs the source of ``config``, since meanings are docstrings; read only when somebody asks for them.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from appliance.common import (
    adapter_config,
    config,
    config_places,
    external_config,
    fleet_config,
    kv_store_config,
    listen_config,
    operator_config,
    split_config,
    token_config,
)
from appliance.common.config import ApplianceConfig
from appliance.common.config_section import Unit

_TYPES = {Path: "path", str: "text", int: "whole number", float: "number", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration."""

    name: str
    """Dotted name; ``[]`` follows a list of sections: ``models[].kv_bytes``."""
    field: FieldInfo
    section: type[BaseModel]
    """Section that has the key."""

    @property
    def type(self) -> str:
        """Type in words, with the bounds of a number."""
        return type_words(self.field.annotation) + _bounds(self.field)

    @property
    def unit(self) -> str:
        """Unit of a number; empty where it has none."""
        return next((one.name for one in self.field.metadata if isinstance(one, Unit)), "")

    @property
    def default(self) -> str:
        """Default in words; ``required`` where there is none."""
        return "required" if self.field.is_required() else default_words(self.field.default)

    @property
    def default_note(self) -> str:
        """``required``, or the default with that word."""
        return "required" if self.field.is_required() else f"default {self.default}"

    @property
    def meaning(self) -> str:
        """Docstring of the key, as one paragraph."""
        attribute = self.name.rpartition(".")[2].removesuffix("[]")
        places = (one.__name__ for one in self.section.__mro__)
        return next((found for one in places if (found := _docstrings().get((one, attribute)))), "")

    @property
    def verbatim(self) -> bool:
        """Whether an environment variable's text is the value as it stands; other types are read as YAML."""
        return all(one in (Path, str) or get_origin(one) is Literal for one in _alternatives(self.field.annotation))

    @property
    def is_section(self) -> bool:
        """Whether the key holds keys of its own."""
        return section_of(self.field.annotation) is not None

    @property
    def about(self) -> str:
        """What the section is for, as one paragraph; empty for a plain key."""
        inner = section_of(self.field.annotation)
        return "" if inner is None else " ".join((inner.__doc__ or "").split())

    @property
    def optional(self) -> bool:
        """Whether the key may be none."""
        return NoneType in get_args(self.field.annotation)


@functools.cache
def keys() -> Mapping[str, Key]:
    """Every key by its name, in the schema's order; a section's own key stands before its keys."""
    return {key.name: key for key in _keys("", ApplianceConfig)}


def _keys(prefix: str, section: type[BaseModel]) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        many = inner is not None and get_origin(field.annotation) is tuple
        key = f"{prefix}{name}{'[]' if many else ''}"
        yield Key(key, field, section)
        if inner is not None:
            yield from _keys(f"{key}.", inner)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Section in an annotation: itself, that of a list, or an optional one; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := section_of(one)) is not None), None)


def type_words(annotation: Any) -> str:
    """A type in words: ``one of continue, refuse``, ``list of whole numbers``."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_words(parts[0])
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin in (Union, UnionType):
        return " or ".join(type_words(part) for part in parts if part is not NoneType)
    if origin is tuple:
        return "list of " + type_words(parts[0]).replace("number", "numbers").replace("section", "sections")
    return "section" if section_of(annotation) is not None else _TYPES[annotation]


def default_words(value: object) -> str:
    """A value in words."""
    if isinstance(value, BaseModel):
        return "defaults of its keys"
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, str | Path):
        return str(value) or "empty"
    return str(value).lower() if isinstance(value, bool) else f"{value:.15g}"


def _bounds(field: FieldInfo) -> str:
    found = {name: getattr(one, name) for one in field.metadata for name in ("ge", "le") if hasattr(one, name)}
    match found:
        case {"ge": low, "le": high}:
            return f", {low} to {high}"
        case {"ge": low}:
            return f", at least {low}"
    return ""


def _alternatives(annotation: Any) -> list[Any]:
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [one for one in parts if one is not NoneType]


@functools.cache
def _docstrings() -> Mapping[tuple[str, str], str]:
    """Section and attribute to the docstring below it, as one line."""
    found = {}
    extra = external_config, fleet_config, kv_store_config, listen_config, operator_config, split_config, token_config
    modules = config, adapter_config, config_places, *extra
    for section in (part for module in modules for part in ast.parse(inspect.getsource(module)).body):
        if not isinstance(section, ast.ClassDef):
            continue
        for one, after in zip(section.body, section.body[1:], strict=False):
            match one, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[section.name, name] = " ".join(text.split())
    return found
