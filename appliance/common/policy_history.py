"""Texts of the policies that were in force, with the time of each. Blocks; the supervisor writes, commands read.

A version is one file, ``NUMBER-DIGEST.json`` in the folder ``policies`` of the audit log, whose entries of kind
``policy`` have the same digests. Files are named as they lie in the folder of the configured policy, so that a version
can be put back after the policy was moved. The newest ``MAX_VERSIONS`` are kept, of ``MAX_FOLDER_BYTES`` at most. One
whose files were replaced before the supervisor had read them, or are larger than a version, is
``NUMBER-DIGEST-unread.json``, without texts: of these the newest ``MAX_UNREAD`` are kept besides, so that a gateway
that was taken over pushes no texts out by what it reports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from appliance.common.errors import ConfigError, os_errors_as
from isolation.host.atomic_file import write_whole
from policy.loader import Source

FOLDER = "policies"
FOLDER_MODE, FILE_MODE = 0o750, 0o640

MAX_VERSIONS = 100
"""Versions with texts that are kept: one a day for a season."""

MAX_UNREAD = 20
"""Versions without texts that are kept besides."""

MAX_BYTES = 64 << 20
"""Most bytes of a version's file. Of a larger policy nothing but the digest is kept: what is written is read back."""

MAX_FOLDER_BYTES = 1 << 30
"""Most bytes of all versions, unless the newest ``ALWAYS_KEPT`` have more."""

ALWAYS_KEPT = 2
"""Versions with texts that are kept whatever they take: the one in force, and the one to go back to."""

FORM = 1
"""Form of a version's file."""

_UNREAD = "-unread"

POLICY_DIGEST = re.compile(r"[0-9a-f]{64}")
"""Digest of a policy: what else a gateway reports is none, and no part of a file's name."""

_NAME = re.compile(r"([0-9]{6,18})-([0-9a-f]{12})(-unread)?\.json")
"""Numbers may have more digits than they are filled up to: a gateway that was taken over gets to a million in hours."""


@dataclass(frozen=True, slots=True)
class Version:
    """One policy that was in force."""

    number: int
    digest: str
    since_ms: int
    """Time at which it came into force, in milliseconds of the Unix epoch."""
    files: dict[str, str]
    """Texts by name below the folder of the configured policy, those of public prefixes included."""
    named: tuple[str, ...]
    """Names of those that are policy files, in their order; none where its texts were not read in time."""
    by: str = ""
    """Who put it in force, as the audit log has it; empty where that is not known."""

    @property
    def unread(self) -> bool:
        """Whether nothing but its digest is kept: its files were replaced before they were read, or too large."""
        return not self.named

    def sources(self) -> list[Source]:
        """Return what the policy's loader takes."""
        found = []
        for name in self.named:
            beside = PurePosixPath(name).parent / "public"
            texts = {
                PurePosixPath(one).name: text for one, text in self.files.items() if PurePosixPath(one).parent == beside
            }
            found.append(Source(name, self.files[name], texts))
        return found


def sources_of(files: dict[str, str], named: Sequence[str]) -> list[Source]:
    """Return what the policy's loader takes, from texts by name (``relative``)."""
    found = []
    for name in named:
        beside = PurePosixPath(name).parent / "public"
        public = {PurePosixPath(one): text for one, text in files.items()}
        texts = {path.name: text for path, text in public.items() if path.parent == beside}
        found.append(Source(name, files[name], texts))
    return found


def relative(sources: Sequence[Source], policy: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the texts of a policy by name below its folder, and the names of the policy files among them. ``policy``
    is the configured path, as the sources were read from it."""
    files: dict[str, str] = {}
    named = []
    for source in sources:
        path = Path(source.name).relative_to(policy.parent)
        named.append(path.as_posix())
        files[path.as_posix()] = source.text
        files |= {(path.parent / "public" / name).as_posix(): text for name, text in source.files.items()}
    return files, tuple(named)


class PolicyHistory:
    """Versions in one audit folder."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is the audit log's."""
        self._folder = folder / FOLDER

    def numbers(self) -> list[int]:
        """Return the numbers of all versions, the newest first; none where nothing was kept.

        Raises:
            ConfigError: the folder cannot be listed.
        """
        return sorted(self._paths(), reverse=True)

    def read(self, number: int) -> Version:
        """Return one version.

        Raises:
            ConfigError: there is none of this number, or its file cannot be used.
        """
        path = self._paths().get(number)
        if path is None:
            raise ConfigError(f"there is no version {number} of the policy in {self._folder}")
        with os_errors_as(f"cannot read {path}"), path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        try:
            values = json.loads(data)
            files, named = dict(values["files"]), tuple(values["named"])
            whole = values["form"] == FORM and set(named) <= set(files) and all(map(_is_below, files))
            if not whole or not all(isinstance(text, str) for text in files.values()):
                raise ValueError
            digest, since_ms, by = str(values["digest"]), int(values["since_ms"]), str(values.get("by", ""))
            return Version(number, digest, since_ms, files, named, by)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is no version of a policy that this version of athanor knows") from error

    def record(self, digest: str, files: dict[str, str], named: tuple[str, ...], now_ms: int, by: str = "") -> bool:
        """Keep a policy that has come into force, unless it is the newest version already; returns whether it was kept.
        ``by`` says who put it in force. Of one that is larger than a version its digest is kept.

        Raises:
            ConfigError: it cannot be written.
        """
        if len(_encoded(_values(digest, files, named, now_ms, by))) > MAX_BYTES:
            return self.record_unread(digest, now_ms, by)
        numbers = self.numbers()
        if numbers:
            try:
                last = self.read(numbers[0])
            except ConfigError:
                last = None  # a damaged one is no reason not to keep the next
            if last is not None and (last.digest, last.files) == (digest, files):
                return False
            if last is not None and last.unread and last.digest == digest:  # They could be read after all.
                since_ms, by = last.since_ms, last.by or by
                self._write(_values(digest, files, named, since_ms, by), last.number)
                with os_errors_as(f"cannot keep the policy in {self._folder}"):
                    self._folder.joinpath(_file_name(last.number, digest, unread=True)).unlink(missing_ok=True)
                return True
        self._write(_values(digest, files, named, now_ms, by), (numbers[0] if numbers else 0) + 1)
        return True

    def record_unread(self, digest: str, now_ms: int, by: str = "") -> bool:
        """Keep that a policy has come into force whose files could not be read in time, unless it is the newest version
        already; returns whether that was kept.

        Raises:
            ConfigError: it cannot be written, or no policy has such a digest: its file would not be found again.
        """
        if not POLICY_DIGEST.fullmatch(digest):
            raise ConfigError(f"{digest!r} is the digest of no policy, and a gateway has reported it as in force")
        numbers = self.numbers()
        with suppress(ConfigError):
            if numbers and self.read(numbers[0]).digest == digest:
                return False
        self._write(_values(digest, {}, (), now_ms, by), (numbers[0] if numbers else 0) + 1)
        return True

    def _write(self, values: dict[str, Any], number: int) -> None:
        with os_errors_as(f"cannot keep the policy in {self._folder}"):
            self._folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            path = self._folder / _file_name(number, values["digest"], unread=not values["named"])
            write_whole(path, _encoded(values), FILE_MODE)
            paths = self._paths()
            for unread, most in ((False, MAX_VERSIONS), (True, MAX_UNREAD)):
                size, kept = 0, [one for one, file in paths.items() if file.stem.endswith(_UNREAD) is unread]
                for place, old in enumerate(sorted(kept, reverse=True)):
                    size += paths[old].stat().st_size
                    if place >= most or (place >= ALWAYS_KEPT and size > MAX_FOLDER_BYTES):
                        paths[old].unlink(missing_ok=True)

    def _paths(self) -> dict[int, Path]:
        with os_errors_as(f"cannot read {self._folder}"):
            names = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        # Of two for one number, after a crash, the one with texts is behind the other.
        return {int(found[1]): self._folder / name for name in sorted(names) if (found := _NAME.fullmatch(name))}


def _values(digest: str, files: dict[str, str], named: tuple[str, ...], since_ms: int, by: str) -> dict[str, Any]:
    return {"form": FORM, "digest": digest, "since_ms": since_ms, "named": named, "files": files, "by": by}


def _encoded(values: dict[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode()


def _file_name(number: int, digest: str, *, unread: bool) -> str:
    return f"{number:06d}-{digest[:12]}{_UNREAD if unread else ''}.json"


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and name != "."
