"""Support archive without secrets.

Three fences keep secrets out. Files that are secret (pepper, key table, private keys) are never opened for their
content. Every text is blotted of what looks like a credential. Last, the finished members are searched for the secrets
of this very appliance (pepper, digests of keys, private key), and a member that holds one is left out.
Prompts and answers are in none of the sources: logs, traces and metrics have no field for them.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from appliance.common.config import ApplianceConfig
from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.keys import parse_records
from appliance.common.log import redact
from appliance.common.model_entries import entries_folder
from appliance.operator import journal
from isolation.host.atomic_file import write_whole

MAX_MEMBER_BYTES = 16 << 20
"""Bytes of one member; the end of a longer one is kept, where the news is."""

MIN_SECRET_BYTES = 8
"""Shorter texts are no secrets: they would be found everywhere."""

LOG_LINES = 5_000
MODE = 0o600
"""Only its owner may read the archive: it describes the machine closely."""

_WIDTH = 64
"""Characters of a line of a PEM file."""


@dataclass(frozen=True, slots=True)
class Member:
    """One file of the archive."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """What was written, and what was not."""

    path: Path
    members: tuple[str, ...]
    left_out: tuple[str, ...]
    """Why something is missing, a sentence each."""
    size: int


@dataclass(slots=True)
class MemberCollector:
    """Gathers members; a source that fails leaves a sentence instead."""

    members: list[Member] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, name: str, make: Callable[[], str]) -> None:
        """Add what ``make`` gives, blotted and bounded."""
        try:
            text = make()
        except (ConfigError, OSError, ValueError) as error:
            self.left_out.append(f"{name}: {error}")
            return
        self.members.append(Member(name, redact(text[-MAX_MEMBER_BYTES:])))

    def add_json(self, name: str, value: object) -> None:
        """Add a document."""
        self.add(name, lambda: json.dumps(value, indent=2) + "\n")


def add_configuration(into: MemberCollector, path: Path, config: ApplianceConfig | None) -> None:
    """The configuration and the policy as they stand; neither holds secrets, and both are blotted all the same."""
    if path.is_file():
        into.add("athanor.yaml", path.read_text)
        for entries in sorted(entries_folder(path).glob("*.yaml")):
            into.add(f"models.d/{entries.name}", entries.read_text)
    if config is None:
        return
    policies = sorted(config.policy.glob("*.yaml")) if config.policy.is_dir() else [config.policy]
    for policy in policies:
        into.add(f"policy/{policy.name}", policy.read_text)


def add_journal(into: MemberCollector) -> None:
    """The last lines of both services."""

    def read() -> str:
        with journal.open_journal(LOG_LINES, follow=False) as lines:
            return "".join(lines)

    into.add("journal.log", read)


def secrets_of(config: ApplianceConfig | None, pepper: Path | None) -> tuple[bytes, ...]:
    """Every secret that this user may read, in each form in which it could have been written down."""
    if config is None:
        return ()
    found: list[bytes] = []
    for path in (pepper, config.listen.tls.key if config.listen.tls else None):
        data = _bytes_of(path)
        if len(data) >= MIN_SECRET_BYTES:
            found += [data, data.strip(), binascii.hexlify(data), base64.b64encode(data)]
            found += [line for line in data.splitlines() if len(line) == _WIDTH]
    try:
        records = parse_records(_bytes_of(config.credentials).decode("utf-8", "replace"))
    except ConfigError:
        return tuple(found)
    for record in records.values():
        found += [record.digest, binascii.hexlify(record.digest), base64.b64encode(record.digest)]
    return tuple(found)


def _bytes_of(path: Path | None) -> bytes:
    try:
        return b"" if path is None else path.read_bytes()
    except OSError:
        return b""


def without_secrets(members: Iterable[Member], secrets: tuple[bytes, ...]) -> Iterator[tuple[Member, bool]]:
    """Each member, and whether it is clean."""
    for member in members:
        data = member.text.encode("utf-8", "surrogateescape")
        yield member, not any(secret in data for secret in secrets)


def write_bundle(path: Path, into: MemberCollector, secrets: tuple[bytes, ...], now: float) -> Bundle:
    """Write the archive, for its owner alone.

    Raises:
        ConfigError: it cannot be written.
    """
    folder = path.name.partition(".")[0]
    left_out, kept = list(into.left_out), []
    for member, clean in without_secrets(into.members, secrets):
        if clean:
            kept.append(member)
        else:
            left_out.append(f"{member.name}: it holds a secret of this appliance")
    about = "".join(f"{line}\n" for line in (*left_out, "")) if left_out else "nothing\n"
    kept.append(Member("left-out.txt", about))
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for member in kept:
            data = member.text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{folder}/{member.name}")
            entry.size, entry.mtime, entry.mode = len(data), int(now), MODE
            archive.addfile(entry, io.BytesIO(data))
    with os_errors_as(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, stream.getvalue(), MODE)
    return Bundle(path, tuple(member.name for member in kept), tuple(left_out), len(stream.getvalue()))
