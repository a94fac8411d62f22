"""Files of the installed distributions that a program requires, directly or by way of others."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from appliance.common.errors import ConfigError


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
        key = canonicalize_name(one)
        if key in found:
            continue
        try:
            found[key] = distribution(one)
        except PackageNotFoundError:
            # A package does not run without what it requires; one that is installed all the same does without.
            continue
        wanted += _needed(found[key])
    return tuple(found[key] for key in sorted(found))


def _needed(dist: Distribution) -> Iterator[str]:
    """Names of what a distribution requires on this machine and this Python, without extras."""
    for requirement in map(Requirement, dist.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def package_files(dist: Distribution) -> Iterator[tuple[Path, Path]]:
    """(where it lies, where it belongs below site-packages) of a distribution's files; scripts and compiled
    modules of this machine's Python left out."""
    for file in dist.files or ():
        if ".." in file.parts or "__pycache__" in file.parts or file.is_absolute():
            continue
        source = Path(str(dist.locate_file(file)))
        if source.is_file():
            yield source, Path(str(file))
