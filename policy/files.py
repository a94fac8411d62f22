"""Policy path to sources for the loader; the only module of this package that reads files."""

from __future__ import annotations

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

MAX_PUBLIC_FILES = 256
"""Largest number of files read from that folder: more than a policy may have public prefixes."""


def read_sources(path: Path) -> list[Source]:
    """Read the file at ``path``, or every ``*.yaml`` directly in it when it is a directory, except hidden files.

    Sources are named by the path as given, so that a problem can be clicked on. A directory without a policy file is an
    error: an empty policy must be written explicitly.

    Raises:
        OSError: something cannot be read.
        PolicySyntaxError: a file is too large or not UTF-8, or there are none, or too many, or one in a directory is no
            regular file, such as a pipe that would block the reader.
    """
    if not path.is_dir():
        return [_read(path, _beside(path.parent))]
    files = sorted(file for file in path.glob("*.yaml") if not file.name.startswith("."))
    if not 0 < len(files) <= MAX_FILES:
        message = f"the directory holds {len(files)} files named *.yaml; expected 1 to {MAX_FILES}"
        raise PolicySyntaxError([Problem(str(path), 1, 1, "", message)])
    if odd := [file for file in files if not file.is_file()]:
        raise PolicySyntaxError([Problem(str(file), 1, 1, "", NOT_A_FILE) for file in odd])
    beside = _beside(path)
    return [_read(file, beside) for file in files]


def _beside(folder: Path) -> dict[str, str]:
    """Read the texts in the folder ``public`` of a policy's folder, by name. A file that is not UTF-8, too large or
    unreadable is left out: the error is reported at the prefix that names it."""
    texts: dict[str, str] = {}
    found = (file for file in (folder / PUBLIC_FOLDER).glob("*") if file.suffix in (".txt", ".json"))
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
