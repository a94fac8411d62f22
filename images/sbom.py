"""Bill of materials of an image in CycloneDX 1.6 (ECMA-424): Python packages, and shared libraries with their origin.

It is independent of when and where it was made: no times, no serial number, no path of the build machine.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

from appliance.common.version import VERSION
from isolation.errors import ProcessError
from isolation.host.process import run
from isolation.image.elf import system_library_dirs
from isolation.image.python_rootfs import OURS_DIR, PACKAGES_DIR, PYTHON_DIR, ROLE_PACKAGES, PythonInstall

Component = dict[str, Any]

DPKG_TIMEOUT_S = 60

LOCKS = Path(__file__).resolve().parents[1] / "requirements"

_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def bill_of(image: Path, install: PythonInstall) -> dict[str, Any]:
    """Build the bill of the trees below ``image``, each component once, with the roles that contain it."""
    found: dict[str, Component] = {}
    for role in sorted(ROLE_PACKAGES):
        for one in _components(image / role, install):
            kept = found.setdefault(one["bom-ref"], one)
            kept["properties"].append(_property("role", role))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {"type": "container", "bom-ref": "image", "name": "athanor-sandbox-image", "version": VERSION}
        },
        "components": [found[ref] for ref in sorted(found)],
    }


def encode_bill(bill: dict[str, Any]) -> bytes:
    """Encode a bill in its only valid form."""
    return (json.dumps(bill, indent=1, sort_keys=True) + "\n").encode()


def _components(tree: Path, install: PythonInstall) -> Iterator[Component]:
    python = tree / PYTHON_DIR[1:] / "bin" / install.version
    version = platform.python_version()
    yield {
        "type": "platform",
        "bom-ref": "cpython",
        "name": "cpython",
        "version": version,
        "hashes": [_hash(python)],
        "purl": f"pkg:generic/cpython@{version}",
        "properties": [],
    }
    assert (tree / OURS_DIR[1:]).is_dir(), "our own packages are in every tree"
    yield {
        "type": "library",
        "bom-ref": "athanor",
        "name": "athanor",
        "version": VERSION,
        "purl": f"pkg:generic/athanor@{VERSION}",
        "properties": [],
    }
    packages = tree / PACKAGES_DIR[1:]
    tops = {path.name.partition(".")[0] for path in packages.iterdir()}
    # Several packages may share one folder, as a dozen CUDA libraries share ``nvidia``: each of them is listed.
    owners = {dist.name: dist for dist in distributions(path=list(install.path)) if _top_level(dist) & tops}
    for name in sorted(owners):
        yield _package(owners[name])
    yield from _libraries(tree, packages)


def _top_level(dist: Distribution) -> set[str]:
    return {file.parts[0].partition(".")[0] for file in dist.files or () if file.parts[0] not in ("..", "__pycache__")}


def _package(dist: Distribution) -> Component:
    name = re.sub(r"[-_.]+", "-", dist.name).lower()
    version, _, local = dist.version.partition("+")
    hashes = _locked().get((name, version), ())
    ref = f"pkg:pypi/{name}@{_purl_part(dist.version)}"
    properties = [_property("locked-sha256", one) for one in hashes]
    if local:
        properties.append(_property("local-version", local))
    return {
        "type": "library",
        "bom-ref": ref,
        "name": name,
        "version": dist.version,
        "purl": ref,
        "properties": properties,
    }


@functools.cache
def _locked() -> dict[tuple[str, str], tuple[str, ...]]:
    """Map (package, version) to the hashes of its archives, any of which may have been installed."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted(LOCKS.glob("*.lock")):
        if path.stem in ("run", "cpu", "cuda"):
            for match in _PINNED.finditer(path.read_text()):
                key = re.sub(r"[-_.]+", "-", match[1]).lower(), match[2].partition("+")[0]
                found.setdefault(key, set()).update(re.findall(r"sha256:([0-9a-f]{64})", match[3]))
    return {key: tuple(sorted(hashes)) for key, hashes in found.items()}


def _libraries(tree: Path, packages: Path) -> Iterator[Component]:
    """Collect libraries of the build machine and those included in packages, without extension modules."""
    own = [path for top in ("lib", "lib64", "usr") for path in sorted((tree / top).rglob("*")) if path.is_file()]
    debian = _debian({path.name: _hash(path)["content"] for path in own})
    for path in own:
        origin = debian.get(path.name)
        component = _library(path, path.name, "machine")
        if origin is not None:
            package, version, architecture = origin
            component["version"] = version
            component["purl"] = f"pkg:deb/debian/{_purl_part(package)}@{_purl_part(version)}?arch={architecture}"
        yield component
    for path in sorted(packages.rglob("*.so*")):
        inside = path.relative_to(packages)
        if path.is_file() and (inside.parts[0].endswith(".libs") or "lib" in inside.parts[:-1]):
            yield _library(path, path.name, inside.parts[0])


def _library(path: Path, name: str, origin: str) -> Component:
    digest = _hash(path)
    return {
        "type": "library",
        "bom-ref": f"{origin}/{name}@{digest['content'][:16]}",
        "name": name,
        "hashes": [digest],
        "properties": [_property("brought-by", origin)],
    }


def _debian(digests: dict[str, str]) -> dict[str, tuple[str, str, str]]:
    """Map each library to the (package, version, architecture) whose dpkg files equal it byte by byte; an interpreter
    of another origin may bring a different library with this name."""
    places = [(Path(folder, name), name) for folder in system_library_dirs() for name in digests]
    real = {
        str(path.resolve()): name for path, name in places if path.is_file() and _hash(path)["content"] == digests[name]
    }
    asked = {**real, **{place.removeprefix("/usr"): name for place, name in real.items()}}
    try:
        said = run(["dpkg-query", "--search", *sorted(asked)], timeout_s=DPKG_TIMEOUT_S, check=False).stdout
        owner = {}
        for line in said.splitlines():
            package, _, place = line.rpartition(": ")
            if place in asked and "," not in package:
                owner[asked[place]] = package
        shown = "${binary:Package}\t${Version}\t${Architecture}\n"
        argv = ["dpkg-query", "--show", f"--showformat={shown}", *sorted(set(owner.values()))]
        rows = run(argv, timeout_s=DPKG_TIMEOUT_S).stdout.splitlines() if owner else []
    except ProcessError:
        return {}
    versions = {row.split("\t")[0]: row.split("\t") for row in rows}
    versions |= {name.partition(":")[0]: row for name, row in versions.items()}
    return {
        name: (package.partition(":")[0], versions[package][1], versions[package][2])
        for name, package in owner.items()
        if package in versions
    }


def _purl_part(text: str) -> str:
    """Encode a name or a version for a package URL (ECMA-427)."""
    return quote(text, safe=":")


def _hash(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        return {"alg": "SHA-256", "content": hashlib.file_digest(file, "sha256").hexdigest()}


def _property(name: str, value: str) -> dict[str, str]:
    return {"name": f"athanor:{name}", "value": value}
