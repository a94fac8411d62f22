"""What an installation brings to read: documents, examples, dashboards, alert rules, manual pages and completions.

A package puts them below ``/usr/share``, ``athanor install`` below ``/usr/local/share``, where the same programs look
for them. They are copies of this version's files: an edited one is replaced by the next installation.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import typer

import appliance
from appliance.common.errors import os_errors_as
from appliance.common.figures import counted
from appliance.operator.install import pages
from appliance.operator.install.changes import MODE, Kind
from isolation.host.atomic_file import write_whole

PACKAGE_SHARE, ADMIN_SHARE = PurePosixPath("usr/share"), PurePosixPath("usr/local/share")
"""Where a package puts them, and where an administrator's installation does (hier(7)); below the root."""

DOCUMENTS, DATA = PurePosixPath("doc/athanor"), PurePosixPath("athanor")
"""Folders below the share that hold nothing else."""

MONITORING = DATA / "monitoring"
"""Dashboards, alert rules, and configurations of the programs that read them."""

RUNBOOKS = Path(appliance.__path__[0]) / "gateway/console/runbooks.html"
"""The page of the alerts, which the gateway serves too."""

RENAMED = {"CHANGELOG.md": "changelog.gz", "LICENSE": "copyright"}
"""Names that Debian's policy manual (12.5, 12.7) gives to files."""

PATTERNS = (
    "README.md",
    "ARCHITECTURE.md",
    "SECURITY.md",
    *RENAMED,
    "docs/*.md",
    "docs/reference/*.md",
    "examples/*",
    "deploy/*/*",
    "deploy/*/*/*",
    "deploy/*/*/*/*",
    "bench/*.md",
    "bench/results/*.md",
    "bench/results/*/*.svg",
    "bench/machines/*.json",
)
"""Documents, by the paths that they keep, so that their links lead where they lead in the sources."""

MONITORED = ("docs/monitoring/*.json", "docs/monitoring/*.y*ml")

COPYRIGHT = """\
Athanor is distributed under the licence below. Programs and libraries that a package holds beside it have licences of
their own, in the folders *.dist-info of /usr/lib/athanor and, for gVisor, at https://gvisor.dev.

"""

Files = Mapping[PurePosixPath, bytes]
"""Path below the root to content."""


def share_files(base: Path, app: typer.Typer, share: PurePosixPath) -> Files:
    """Every file, for a machine on which they lie below ``share``.

    Args:
        base: folder of the sources (``sources.document_folder``).
        app: the command line, which manual pages and completions are generated from.
        share: ``PACKAGE_SHARE`` or ``ADMIN_SHARE``.

    Raises:
        ConfigError: a file cannot be read.
    """
    found: dict[PurePosixPath, bytes] = {}
    with os_errors_as(f"cannot read the documents in {base}"):
        for path in _matching(base, PATTERNS):
            name = path.relative_to(base).as_posix()
            found[share / DOCUMENTS / RENAMED.get(name, name)] = _document(name, path.read_bytes())
        found[share / DOCUMENTS / RUNBOOKS.name] = RUNBOOKS.read_bytes()
        for path in _matching(base, MONITORED):
            found[share / MONITORING / path.name] = path.read_bytes()
    found |= pages.pages(app, share) | pages.completions(app, share)
    if share == PACKAGE_SHARE:
        return found
    return {path: data if path.suffix == ".gz" else _moved(data, share) for path, data in found.items()}


def _matching(base: Path, patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(path for path in base.glob(pattern) if path.is_file())


def _document(name: str, data: bytes) -> bytes:
    if RENAMED.get(name) == "changelog.gz":
        return gzip.compress(data, 9, mtime=0)
    return COPYRIGHT.encode() + data if name == "LICENSE" else data


def _moved(data: bytes, share: PurePosixPath) -> bytes:
    """A file that names the others where this installation has them."""
    for place in (DOCUMENTS, DATA):
        data = data.replace(f"/{PACKAGE_SHARE / place}".encode(), f"/{share / place}".encode())
    return data


PLACES = {
    DOCUMENTS: "documents and examples",
    DATA: "dashboards and alert rules",
    PurePosixPath("man"): "manual pages",
    PurePosixPath(): "completions of shells",
}
"""Folders below the share, with what is in them; a file belongs to the first that holds it."""


@dataclass(frozen=True, slots=True)
class ShareChange:
    """Files of one of ``PLACES``, before and after."""

    place: PurePosixPath
    """Folder below the root; it may have files of other programs too."""
    about: str
    kind: Kind
    written: Files
    """Files that are new or differ."""
    removed: tuple[PurePosixPath, ...]
    """Files of this program that are there and shall not be."""

    @property
    def note(self) -> str:
        """What changes, and how many files of it."""
        count = len(self.written) + len(self.removed)
        return f"{self.about}: {counted(count, 'file')}" if count else self.about


def find_share_changes(root: Path, share: PurePosixPath, files: Files) -> tuple[ShareChange, ...]:
    """What writing ``files`` would change below a root; with no files, what removing all of them would.

    Raises:
        ConfigError: a file that is there cannot be read.
    """
    with os_errors_as(f"cannot read {root / share}"):
        before = {path: (root / path).read_bytes() for path in _present(root, share)}
    changes = []
    for place, about in PLACES.items():
        old, new = _within(before, share, place), _within(files, share, place)
        written = {path: data for path, data in new.items() if old.get(path) != data}
        removed = tuple(sorted(old.keys() - new.keys()))
        if old or new:
            kind = Kind.REMOVED if not new else Kind.NEW if not old else Kind.CHANGED
            kind = kind if written or removed else Kind.SAME
            changes.append(ShareChange(share / place, about, kind, written, removed))
    return tuple(changes)


def _within(files: Files, share: PurePosixPath, wanted: PurePosixPath) -> Files:
    """Those of the files that belong to one of ``PLACES``."""
    return {
        path: data
        for path, data in files.items()
        if next(place for place in PLACES if path.is_relative_to(share / place)) == wanted
    }


def _present(root: Path, share: PurePosixPath) -> Iterator[PurePosixPath]:
    """Files that some version of this program wrote below the share: the folders that are its own, and names of its own
    in the folders of manual pages and completions."""
    below = root / share
    for folder in (below / DOCUMENTS, below / DATA):
        yield from (PurePosixPath(path.relative_to(root)) for path in folder.rglob("*") if not path.is_dir())
    for pattern in ("man/man*/athanor.*", "man/man*/athanor-*"):
        yield from (PurePosixPath(path.relative_to(root)) for path in below.glob(pattern))
    for name in pages.completion_paths(share).values():
        if (root / name).exists():
            yield name


def apply_share(root: Path, changes: Iterable[ShareChange]) -> None:
    """Write and remove files; folders that are empty then, and are the program's own, go too.

    Raises:
        ConfigError: a file cannot be written or removed.
    """
    for change in changes:
        with os_errors_as(f"cannot change {root / change.place}"):
            for path, data in change.written.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True, mode=0o755)
                write_whole(root / path, data, MODE)
            for path in change.removed:
                (root / path).unlink(missing_ok=True)
            if change.place.name == DATA.name and (root / change.place).is_dir():
                _prune(root / change.place)


def _prune(folder: Path) -> None:
    """Remove empty folders at and below this one."""
    for path in sorted((path for path in (folder, *folder.rglob("*")) if path.is_dir()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
