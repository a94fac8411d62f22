"""Rewrites the weight files of a model folder, each in a child of its own, and copies the files beside them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from appliance.common.catalog import POOLING_FILE, NamedFiles
from appliance.operator.conversion_child import Progress, run_converter

MAX_CLASSES = 16
"""Tensor classes of one report."""


def rewrite(program: str, weights: NamedFiles, folder: Path, options: Sequence[str], progress: Progress) -> list[Any]:
    """Have a program rewrite each weight file into a folder; returns what each child reported, which is hostile.

    Args:
        program: module of the child, whose arguments are source, target and ``options``.
        weights: names and paths of the weight files.
        folder: of the result.
        options: further arguments.
        progress: called with bytes done and bytes in all.

    Raises:
        ConfigError: a child failed; the message says why.
    """
    sizes = [path.stat().st_size for _, path in weights]
    reports: list[Any] = []
    for number, (name, path) in enumerate(weights):
        tell = _behind(sum(sizes[:number]), sizes[number], sum(sizes), progress)
        reports.append(run_converter(program, [str(path), str(folder / name), *options], tell))
    return reports


def copy_files(files: Iterable[tuple[str, Path]], folder: Path) -> None:
    """Copy files that a sandbox gets under these names into a model folder, and wait until they are on the drive."""
    for name, path in files:
        target = folder / (POOLING_FILE[0] if name == POOLING_FILE[1] else name)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
        target.chmod(0o644)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def _behind(done: int, size: int, total: int, progress: Progress) -> Progress:
    """Progress in a file of ``size`` bytes behind ``done`` of other files, from a child's share of it."""

    def tell(part: int, whole: int) -> None:
        progress(done + size * min(part, whole) // max(whole, 1), total)

    return tell
