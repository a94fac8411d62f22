"""Put programs and folders in place in one step, so that a set-up that is cut off leaves none of them in part."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def move(source: Path, folder: Path) -> None:
    """Put a folder there in one step, whatever file system it comes from."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.copytree(source, new, symlinks=True)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def place(source: Path, target: Path, mode: int = 0o755) -> None:
    """Put a program there in one step, or another file with its own mode."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, new)
    new.chmod(mode)
    os.replace(new, target)


def point(target: Path, program: Path) -> None:
    """Link to a program of the machine in one step, also where a link to one that is gone was left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(program)
    os.replace(new, target)
