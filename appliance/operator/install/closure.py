"""Files of the installed distributions that a program requires, directly or by way of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from appliance.common.errors import ConfigError


def requirement_closure(name: str, extras: Iterable[str] = ()) -> tuple[Distribution, ...]:
    """All distributions that ``name`` needs to run, without itself; what this machine does not need is left out, and so
    are extras that are not asked for.

    Raises:
        ConfigError: it is not installed here, has no such extra, or not all of an extra is installed.
    """
    try:
        own = distribution(name)
    except PackageNotFoundError:
        raise ConfigError(f"{name} is not installed in this Python; run `make setup` first") from None
    wanted = [*_needed(own)]
    for extra in extras:
        more = [*_needed(own, extra)]
        if not more:
            raise ConfigError(f"{name} has no extra {extra}; it has {', '.join(_extras(own))}")
        for one in more:
            if not _is_here(one):
                raise ConfigError(f"{one} is not installed here; run: pip install '{name}[{extra}]'")
        wanted += more
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


def _needed(dist: Distribution, extra: str = "") -> Iterator[str]:
    """Names of what a distribution requires on this machine and this Python: without extras, or for one alone."""
    for requirement in map(Requirement, dist.requires or ()):
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        for_extra = marker is not None and not always and marker.evaluate({"extra": extra})
        if for_extra if extra else always:
            yield requirement.name


def _extras(dist: Distribution) -> list[str]:
    return sorted(dist.metadata.get_all("Provides-Extra") or ())


def _is_here(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def package_files(dist: Distribution) -> Iterator[tuple[Path, Path]]:
    """(where it lies, where it belongs below site-packages) of a distribution's files; scripts and compiled
    modules of this machine's Python left out."""
    for file in dist.files or ():
        if ".." in file.parts or "__pycache__" in file.parts or file.is_absolute():
            continue
        source = Path(str(dist.locate_file(file)))
        if source.is_file():
            yield source, Path(str(file))
