"""Compresses a model folder without loss, and back: ``athanor model convert DIR DIR --compress | --expand``.

Weight files go through a child each (``engine.convert.compress``), locked down before it reads the first byte; it reads
again what it wrote and compares every bit. The other files that sandboxes get are copied as they are: the index of the
weight files too, since file names and names of tensors stay. The result appears under its name at once or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.common.catalog import SAFETENSORS, find_files
from appliance.common.errors import ConfigError
from appliance.operator import kernels
from appliance.operator.conversion_child import Progress, new_folder, without_a_word
from appliance.operator.weight_files import MAX_CLASSES, copy_files, rewrite

PROGRAM = "engine.convert.compress"

CODED, PLAIN = "coded", "plain"
"""Forms of the result, as the program calls them."""


@dataclass(frozen=True, slots=True)
class SizeByClass:
    """Bytes of one class of tensors, plain and in the result."""

    name: str
    tensors: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class CompressedFolder:
    """What came of it."""

    folder: Path
    files: int
    """Weight files."""
    tensors: int
    coded: int
    """Tensors that are compressed in the result."""
    before: int
    """Bytes of the weights as plain tensors."""
    after: int
    """Bytes of the weights in the result."""
    classes: tuple[SizeByClass, ...]
    codec: str
    """What computed."""


def compress(source: Path, folder: Path, *, form: str, progress: Progress) -> CompressedFolder:
    """Write a model folder in another form into a folder that does not exist yet, or is empty.

    Args:
        source: a model folder.
        folder: of the result.
        form: ``CODED`` or ``PLAIN``.
        progress: called with bytes done and bytes in all.

    Raises:
        ConfigError: the source is no model folder or a file of it is malformed, nothing in it becomes smaller, or the
            folder cannot be made; the message says why.
    """
    engine, text = find_files(source.resolve().name, source)
    weights = tuple((name, path) for name, path in engine if name.endswith(SAFETENSORS))
    options = form, str(kernels.installed() or "")
    with new_folder(folder) as made:
        copy_files(((name, path) for name, path in (*engine, *text) if not name.endswith(SAFETENSORS)), made)
        result = _sum([_parsed(one, folder) for one in rewrite(PROGRAM, weights, made, options, progress)])
        if form == CODED and not result.coded:
            raise ConfigError(f"{source} becomes no smaller: it has no bfloat16 weights that compress")
    return result


def _parsed(value: Any, folder: Path) -> CompressedFolder:
    try:
        classes = tuple(
            SizeByClass(str(name)[:32], *(int(one) for one in value["classes"][name]))
            for name in list(value["classes"])[:MAX_CLASSES]
        )
        numbers = {name: int(value[name]) for name in ("tensors", "coded", "before", "after")}
        return CompressedFolder(folder, 1, **numbers, classes=classes, codec=str(value["codec"])[:64])
    except (ValueError, LookupError, TypeError) as error:
        raise without_a_word() from error


def _sum(reports: list[CompressedFolder]) -> CompressedFolder:
    """The reports of all files as one."""
    classes: dict[str, SizeByClass] = {}
    for one in (one for report in reports for one in report.classes):
        had = classes.get(one.name, SizeByClass(one.name, 0, 0, 0))
        sums = (had.tensors + one.tensors, had.before + one.before, had.after + one.after)
        classes[one.name] = SizeByClass(one.name, *sums)
    return CompressedFolder(
        reports[0].folder,
        len(reports),
        tensors=sum(one.tensors for one in reports),
        coded=sum(one.coded for one in reports),
        before=sum(one.before for one in reports),
        after=sum(one.after for one in reports),
        classes=tuple(sorted(classes.values(), key=lambda one: -one.before)),
        codec=reports[0].codec,
    )
