"""Policy path to sources for the loader; the only module of this package that reads files."""

from __future__ import annotations

import os
from pathlib import Path

from policy.errors import PolicySyntaxError, Problem
from policy.loader import Source
from policy.positions import MAX_TEXT_BYTES
from policy.schema import MAX_PUBLIC_BYTES

MAX_FILES = 256
"""Largest number of drop-in files in one directory."""

NOT_A_FILE = "neither a regular file nor a link to one"
"""Problem text for a drop-in that could block its reader."""

PUBLIC_FOLDER = "public"
"""Folder beside a policy that holds the texts of public prefixes."""

PUBLIC_SUFFIXES = (".txt", ".json")
"""Endings of the files that are read there."""

MAX_PUBLIC_FILES = 256
"""Largest number of files read from that folder: more than a policy may have public prefixes."""


def drop_ins(path: Path) -> Path:
    """Return the folder of drop-ins of a policy: itself, or ``policy.d`` beside ``policy.yaml``, if it exists."""
    if path.is_dir():
        return path
    return path.with_suffix(".d") if path.suffix != ".d" else path.with_name(f"{path.name}.d")


def read_sources(path: Path) -> list[Source]:
    """Read the file at ``path`` and every drop-in of it: ``*.yaml`` directly in the folder beside it (``drop_ins``), or
    in ``path`` when that is a directory; hidden files are left out.

    Sources are named by the path as given, so that a problem can be clicked on. A directory without a policy file is an
    error: an empty policy must be written explicitly. Beside a file no drop-ins are needed.

    Raises:
        OSError: something cannot be read; a folder that cannot be listed is an error, since tenants would be missing.
        PolicySyntaxError: a file is too large or not UTF-8, or there are none, or too many, or one in a directory is no
            regular file, such as a pipe that would block the reader.
    """
    folder = drop_ins(path)
    files = [name for name in _listed(folder) if name.endswith(".yaml")]
    if len(files) > MAX_FILES or (folder == path and not files):
        expected = f"expected {'1' if folder == path else '0'} to {MAX_FILES}"
        message = f"the directory holds {len(files)} files named *.yaml; {expected}"
        raise PolicySyntaxError([Problem(str(folder), 1, 1, "", message)])
    if odd := [folder / name for name in files if not (folder / name).is_file()]:
        raise PolicySyntaxError([Problem(str(file), 1, 1, "", NOT_A_FILE) for file in odd])
    first = [] if folder == path else [_read(path, _beside(path.parent))]
    beside = _beside(folder)
    return [*first, *(_read(folder / name, beside) for name in files)]


def shadow_file(path: Path) -> Path:
    """Return where the shadow of a policy is looked for: ``policy.shadow.yaml`` beside ``policy.yaml``, and a folder
    ``policy.shadow.d`` beside a folder."""
    return path.with_name(f"{path.stem}.shadow{path.suffix}")


def read_shadow(path: Path) -> list[Source] | None:
    """Read the shadow of the policy at ``path``, None where there is none. A file takes the place of the policy's file,
    and its drop-ins stay; a folder takes the place of the whole folder.

    Raises:
        OSError, PolicySyntaxError: as ``read_sources``.
    """
    shadow = shadow_file(path)
    if not shadow.exists():
        return None
    if path.is_dir() or shadow.is_dir():
        return read_sources(shadow)
    return [_read(shadow, _beside(shadow.parent)), *read_sources(path)[1:]]


def overlooked(path: Path) -> list[str]:
    """Return a line for each entry in a policy's folder of drop-ins that is no part of the policy, such as
    ``10-a.yml``. Hidden files are editors' own and are not told.

    Raises:
        OSError: the folder cannot be listed.
    """
    folder = drop_ins(path)
    names = [name for name in _listed(folder) if not name.endswith(".yaml") and name != PUBLIC_FOLDER]
    return [f"{folder / name}: not read: no part of the policy unless its name ends in .yaml" for name in names]


def _listed(folder: Path) -> list[str]:
    """Names in a folder, in order, without hidden ones; none where there is no such folder. In contrast to
    ``Path.glob`` a folder that is closed to us is an error."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except FileNotFoundError:
        return []


def _beside(folder: Path) -> dict[str, str]:
    """Read the texts in the folder ``public`` of a policy's folder, by name. A file that is not UTF-8, too large or
    unreadable is left out: the error is reported at the prefix that names it."""
    texts: dict[str, str] = {}
    found = (file for file in (folder / PUBLIC_FOLDER).glob("*") if file.suffix in PUBLIC_SUFFIXES)
    names = sorted(file for file in found if file.is_file())
    for file in names[:MAX_PUBLIC_FILES]:
        try:
            with file.open("rb") as stream:
                data = stream.read(MAX_PUBLIC_BYTES + 1)
            texts[file.name] = data.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
    return texts


def _read(file: Path, beside: dict[str, str]) -> Source:
    with file.open("rb") as stream:
        data = stream.read(MAX_TEXT_BYTES + 1)
    try:
        return Source(str(file), data.decode("utf-8"), beside)
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = len(before.rpartition(b"\n")[2].decode("utf-8")) + 1
        raise PolicySyntaxError([Problem(str(file), line, column, "", "not UTF-8")]) from error
