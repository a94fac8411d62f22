"""Quantises a model folder: ``athanor model convert DIR DIR --quantise int8 | int4``.

Each weight file, ``config.json`` and the index go through a child each (``engine.convert.quantise``), locked down
before it reads the first byte; the other files that sandboxes get are copied as they are. The result appears under its
name at once or not at all. Equal sources give equal results.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.common.catalog import SAFETENSORS, find_files
from appliance.common.errors import ConfigError
from appliance.operator import kernels
from appliance.operator.conversion_child import Progress, new_folder, run_converter, without_a_word
from appliance.operator.weight_files import MAX_CLASSES, copy_files, rewrite

PROGRAM = "engine.convert.quantise"

FORMS = ("int8", "int4")
"""Forms of the result, as the program calls them."""

REWRITTEN = ("config.json", "model.safetensors.index.json")
"""Files beside the weights that say how these are packed."""


@dataclass(frozen=True, slots=True)
class QuantisedClass:
    """One class of tensors, before and in the result."""

    name: str
    tensors: int
    before: int
    after: int
    error: float
    """Square mean of what rounding changed, relative to that of the numbers; 0 of tensors that are as they were. Of
    several files the largest."""


@dataclass(frozen=True, slots=True)
class QuantisedFolder:
    """What came of it."""

    folder: Path
    form: str
    files: int
    """Weight files."""
    tensors: int
    packed: int
    """Tensors that are packed in the result."""
    before: int
    """Bytes of the weights as plain tensors."""
    after: int
    """Bytes of the weights in the result."""
    classes: tuple[QuantisedClass, ...]


def quantise(source: Path, folder: Path, *, form: str, progress: Progress) -> QuantisedFolder:
    """Write a model folder with packed weights into a folder that does not exist yet, or is empty.

    Args:
        source: a model folder, its weights plain or compressed.
        folder: of the result.
        form: of ``FORMS``.
        progress: called with bytes done and bytes in all.

    Raises:
        ConfigError: the source is no model folder, is packed already or malformed, has no matrix that is packed, or the
            folder cannot be made; the message says why.
    """
    if form not in FORMS:
        raise ConfigError(f"--quantise takes one of: {', '.join(FORMS)}")
    engine, text = find_files(source.resolve().name, source)
    weights = tuple((name, path) for name, path in engine if name.endswith(SAFETENSORS))
    described = [(name, path) for name, path in engine if name in REWRITTEN]
    others = [
        (name, path) for name, path in (*engine, *text) if not name.endswith(SAFETENSORS) and name not in REWRITTEN
    ]
    options = form, str(kernels.installed() or "")
    with new_folder(folder) as made:
        # First, since they say at once that a model is packed already.
        for name, path in described:
            run_converter(PROGRAM, [str(path), str(made / name), *options], lambda *_: None)
        copy_files(others, made)
        result = _sum([_parsed(one, folder, form) for one in rewrite(PROGRAM, weights, made, options, progress)])
        if not result.packed:
            raise ConfigError(f"{source} has no matrix that is packed: none is named as a projection is")
    return result


def _parsed(value: Any, folder: Path, form: str) -> QuantisedFolder:
    try:
        classes = tuple(
            QuantisedClass(str(name)[:32], int(tensors), int(before), int(after), float(error))
            for name, (tensors, before, after, error) in list(value["classes"].items())[:MAX_CLASSES]
        )
        numbers = {name: int(value[name]) for name in ("tensors", "packed", "before", "after")}
        return QuantisedFolder(folder, form, 1, **numbers, classes=classes)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise without_a_word() from error


def _sum(reports: list[QuantisedFolder]) -> QuantisedFolder:
    """The reports of all files as one."""
    classes: dict[str, QuantisedClass] = {}
    for one in (one for report in reports for one in report.classes):
        had = classes.get(one.name, QuantisedClass(one.name, 0, 0, 0, 0.0))
        tensors, before, after = had.tensors + one.tensors, had.before + one.before, had.after + one.after
        classes[one.name] = QuantisedClass(one.name, tensors, before, after, max(had.error, one.error))
    return QuantisedFolder(
        reports[0].folder,
        reports[0].form,
        len(reports),
        tensors=sum(one.tensors for one in reports),
        packed=sum(one.packed for one in reports),
        before=sum(one.before for one in reports),
        after=sum(one.after for one in reports),
        classes=tuple(sorted(classes.values(), key=lambda one: -one.before)),
    )
