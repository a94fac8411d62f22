"""Which files of installed distributions a command needs: its requirements, theirs, and so on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from appliance.errors import ConfigError

_NAME = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)")


def requirement_closure(name: str) -> tuple[Distribution, ...]:
    """All distributions that ``name`` needs to run, without itself; extras and what this machine does not need left
    out.

    Raises:
        ConfigError: it is not installed here.
    """
    try:
        wanted = [*_needed(distribution(name))]
    except PackageNotFoundError:
        raise ConfigError(f"{name} is not installed in this Python; run `make setup` first") from None
    found: dict[str, Distribution] = {}
    while wanted:
        one = wanted.pop()
        key = re.sub(r"[-_.]+", "-", one).lower()
        if key in found:
            continue
        try:
            found[key] = distribution(one)
        except PackageNotFoundError:
            # A requirement under a marker (another platform, another Python) that does not hold here.
            continue
        wanted += _needed(found[key])
    return tuple(found[key] for key in sorted(found))


def _needed(dist: Distribution) -> Iterator[str]:
    for text in dist.requires or ():
        requirement, _, marker = text.partition(";")
        match = _NAME.match(requirement.strip())
        if match is not None and "extra ==" not in marker:
            yield match[1]


def package_files(dist: Distribution) -> Iterator[tuple[Path, Path]]:
    """(where it lies, where it belongs below site-packages) of a distribution's files; scripts and compiled
    modules of this machine's Python left out."""
    for file in dist.files or ():
        if ".." in file.parts or "__pycache__" in file.parts or file.is_absolute():
            continue
        source = Path(str(dist.locate_file(file)))
        if source.is_file():
            yield source, Path(str(file))
