"""Statements of the audit log on disk: make one of a tenant, and compare one with the log. Blocks."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.checkpoint import Checkpoint, CheckpointError, Verifier
from appliance.common.audit.entry import Value
from appliance.common.audit.statement import Head, Statement, differences, sign_statement, stated
from appliance.common.audit.verify import Report, read_verifier, verify
from appliance.common.errors import ConfigError, os_errors_as
from appliance.operator.audit_entries import EntryFilter, in_order
from isolation.keys.signing import SigningKey, SigningKeyError, load

MAX_REQUESTS = 1_000_000
"""Most requests of one statement: four hundred megabytes of text."""


@dataclass(frozen=True, slots=True)
class Stated:
    """Whose requests of which time are stated, in milliseconds of the Unix epoch; ``until_ms`` is left out."""

    tenant: str
    since_ms: int
    until_ms: int


def make_statement(directory: Path, signing_key: Path, wanted: Stated) -> str:
    """Make the text of a statement from a log that is whole.

    Raises:
        ConfigError: the log cannot be read or is not whole, part of the time was moved away, the key is not the log's,
            or there are more than ``MAX_REQUESTS``.
    """
    verifier = _log_verifier(directory)
    key = _key_of(signing_key, verifier)
    last = _verified(directory, verifier, wanted)
    requests: list[Mapping[str, Value]] = []
    for one in _requests(directory, wanted, last.size):
        if len(requests) == MAX_REQUESTS:
            raise ConfigError(f"there are more than {MAX_REQUESTS:,} requests: make statements of shorter times")
        requests.append(one)
    root = base64.b64encode(last.root).decode()
    head = Head(verifier.name, root, wanted.tenant, wanted.since_ms, wanted.until_ms)
    return sign_statement(head, requests, key)


def compare(statement: Statement, directory: Path) -> list[str]:
    """Return what differs between a statement and the log, as sentences; none where the log has exactly what is
    stated.

    Raises:
        ConfigError: the log cannot be read or is not whole, part of the time was moved away, or no checkpoint has the
            statement's root.
    """
    verifier = _log_verifier(directory)
    head = statement.head
    wanted = Stated(head.tenant, head.since, head.until)
    _verified(directory, verifier, wanted)
    size = _size_of(directory, verifier, head.root)
    return differences(statement, _requests(directory, wanted, size))


def _requests(directory: Path, wanted: Stated, size: int) -> Iterator[Mapping[str, Value]]:
    chosen = EntryFilter(wanted.since_ms, wanted.until_ms, kinds=("request",), tenants=(wanted.tenant,))
    for one in in_order(directory):
        if one.number >= size:
            return
        if chosen.takes(one):
            yield stated(one.entry, one.time_ms)


def _verified(directory: Path, verifier: Verifier, wanted: Stated) -> Checkpoint:
    """Return the last checkpoint of a log that is whole and has the time."""
    report = Report()
    with os_errors_as(f"cannot read the audit log in {directory}"):
        report = verify(directory, verifier, archived=True)
    if not report.sound or report.last is None:
        problem = report.problems[0] if report.problems else "it has no checkpoint"
        raise ConfigError(f"the audit log in {directory} is not whole: {problem}")
    first = next(in_order(directory), None)
    if report.first and (first is None or first.time_ms > wanted.since_ms):
        message = f"the log begins at entry {report.first}: older segments, with requests of that time, were moved away"
        raise ConfigError(f"{message}; put them into a copy of the folder, and name that with --from")
    return report.last


def _size_of(directory: Path, verifier: Verifier, root: str) -> int:
    from appliance.common.audit.checkpoint import read_checkpoint

    with os_errors_as(f"cannot read the audit log in {directory}"):
        for path in files.segment_paths(directory):
            for note in files.read_segment(path).checkpoints:
                checkpoint = read_checkpoint(note, verifier)
                if base64.b64encode(checkpoint.root).decode() == root:
                    return checkpoint.size
    raise ConfigError("no checkpoint of the log has the statement's root: it was made from another log")


def _log_verifier(directory: Path) -> Verifier:
    path = directory / files.PUBLIC_KEY
    with os_errors_as(f"cannot read {path}"):
        try:
            return read_verifier(path)
        except CheckpointError as error:
            raise ConfigError(f"{path}: {error}") from error


def _key_of(path: Path, verifier: Verifier) -> SigningKey:
    try:
        key = load(path)
    except SigningKeyError as error:
        raise ConfigError(str(error)) from error
    if key.public != verifier.public:
        raise ConfigError(f"{path} is not the key that the log in force is signed with")
    return key
