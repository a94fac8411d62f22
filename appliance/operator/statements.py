"""Statements of the audit log on disk: make one of a tenant, and compare one with the log. Blocks."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.checkpoint import Checkpoint, CheckpointError, Verifier
from appliance.common.audit.entry import Value
from appliance.common.audit.names import PSEUDONYM
from appliance.common.audit.statement import Head, Statement, differences, sign_statement, stated
from appliance.common.audit.verify import Report, read_verifier, verify
from appliance.common.errors import ConfigError, os_errors_as
from appliance.operator.audit_entries import EntryFilter, LoggedEntry, in_order
from isolation.host.atomic_file import write_whole
from isolation.keys.signing import SigningKey, SigningKeyError, load

STATEMENT_MODE = 0o640
"""Mode of a statement's file: its owner's and group's."""

MAX_REQUESTS = 1_000_000
"""Most requests of one statement: four hundred megabytes of text."""


@dataclass(frozen=True, slots=True)
class Made:
    """Files of statements of several tenants."""

    new: tuple[Path, ...]
    there: tuple[Path, ...]
    """Files that an earlier run had made."""


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
    last = _verified(directory, verifier, wanted.since_ms)
    requests: list[Mapping[str, Value]] = []
    for one in _requests(directory, wanted, last.size):
        requests.append(one)
        _check_count(len(requests), wanted.tenant)
    root = base64.b64encode(last.root).decode()
    head = Head(verifier.name, root, wanted.tenant, wanted.since_ms, wanted.until_ms)
    return sign_statement(head, requests, key)


def make_statements(directory: Path, signing_key: Path, since_ms: int, until_ms: int, folder: Path) -> Made:
    """Make a statement of each tenant that has requests in a time, a file each below ``folder``, from a log that is
    whole.

    A file is whole or not there. Those that are there already are left as they are, so that a second run, or one after
    a kill, makes what is missing. The log is verified once, and read once for each ``MAX_REQUESTS`` requests.

    Raises:
        ConfigError: as ``make_statement``; or the folder cannot be written.
    """
    verifier = _log_verifier(directory)
    key = _key_of(signing_key, verifier)
    last = _verified(directory, verifier, since_ms)
    root = base64.b64encode(last.root).decode()
    counts = Counter(one.entry.fields["tenant"] for one in _chosen(directory, since_ms, until_ms, last.size))
    paths = {str(tenant): folder / statement_name(str(tenant), since_ms, until_ms) for tenant in counts}
    there = [path for path in paths.values() if path.exists()]
    missing = {tenant: counts[tenant] for tenant in sorted(paths) if not paths[tenant].exists()}
    for tenant, count in missing.items():
        _check_count(count, tenant)
    for tenants in _shares(missing):
        requests: dict[str, list[Mapping[str, Value]]] = {tenant: [] for tenant in tenants}
        for one in _chosen(directory, since_ms, until_ms, last.size, tenants):
            requests[str(one.entry.fields["tenant"])].append(stated(one.entry, one.time_ms))
        for tenant, stated_of_it in requests.items():
            head = Head(verifier.name, root, tenant, since_ms, until_ms)
            path, text = paths[tenant], sign_statement(head, stated_of_it, key)
            with os_errors_as(f"cannot write {path}"):
                write_whole(path, text.encode(), STATEMENT_MODE)
    return Made(tuple(paths[tenant] for tenant in missing), tuple(there))


def statement_name(tenant: str, since_ms: int, until_ms: int) -> str:
    """Return the name of a statement's file: the tenant and the month, or both ends of another time. Pure."""
    since, until = (datetime.fromtimestamp(ms / 1_000, UTC) for ms in (since_ms, until_ms))
    months = since.year * 12 + since.month, until.year * 12 + until.month
    begins = {(one.day, one.hour, one.minute, one.second) == (1, 0, 0, 0) for one in (since, until)}
    if begins == {True} and months[1] - months[0] == 1:
        return f"{tenant}-{since:%Y-%m}.statement"
    return f"{tenant}-{since:%Y%m%dT%H%M%SZ}-{until:%Y%m%dT%H%M%SZ}.statement"


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
    _verified(directory, verifier, wanted.since_ms)
    size = _size_of(directory, verifier, head.root)
    unlinked = _unlinked(directory, statement, size)
    logged = list(_chosen(directory, wanted.since_ms, wanted.until_ms, size, (wanted.tenant, *unlinked)))
    return differences(statement, _renamed(statement, logged, unlinked))


def _unlinked(directory: Path, statement: Statement, size: int) -> frozenset[str]:
    """Return the pseudonyms, without a key, under which the log has requests that are stated."""
    stated_ids = {one["request"] for one in statement.requests}
    head = statement.head
    return frozenset(
        str(one.entry.fields["tenant"])
        for one in _chosen(directory, head.since, head.until, size)
        if one.entry.fields["request"] in stated_ids and PSEUDONYM.fullmatch(str(one.entry.fields["tenant"]))
    )


def _renamed(
    statement: Statement, logged: Sequence[LoggedEntry], unlinked: frozenset[str]
) -> Iterator[Mapping[str, Value]]:
    """Return logged requests as a statement has them. Those of an unlinked tenant have its name, and in place of each
    pseudonym of a credential the one credential that is stated for it."""
    names = {one["request"]: str(one["principal"]) for one in statement.requests}
    credentials: dict[tuple[str, str], str] = {}
    taken: set[tuple[str, str]] = set()
    for one in logged:
        values = stated(one.entry, one.time_ms)
        tenant = str(one.entry.fields["tenant"])
        if tenant in unlinked:
            place, name = (tenant, str(values["principal"])), names.get(values["request"], "")
            if place not in credentials and name and (tenant, name) not in taken:
                credentials[place] = name
                taken.add((tenant, name))
            values["principal"] = credentials.get(place, values["principal"])
            values["rule"] = str(values["rule"]).replace(f"tenants.{tenant}", f"tenants.{statement.head.tenant}", 1)
        yield values


def _requests(directory: Path, wanted: Stated, size: int) -> Iterator[Mapping[str, Value]]:
    for one in _chosen(directory, wanted.since_ms, wanted.until_ms, size, (wanted.tenant,)):
        yield stated(one.entry, one.time_ms)


def _chosen(
    directory: Path, since_ms: int, until_ms: int, size: int, tenants: Sequence[str] = ()
) -> Iterator[LoggedEntry]:
    """Read the requests of a time, of these tenants or of all, that the first ``size`` entries have."""
    chosen = EntryFilter(since_ms, until_ms, kinds=("request",), tenants=tuple(tenants))
    for one in in_order(directory):
        if one.number >= size:
            return
        if chosen.takes(one):
            yield one


def _check_count(count: int, tenant: str) -> None:
    if count > MAX_REQUESTS:
        raise ConfigError(f"{tenant} has more than {MAX_REQUESTS:,} requests: make statements of shorter times")


def _shares(counts: Mapping[str, int]) -> Iterator[list[str]]:
    """Part tenants so that each part has at most ``MAX_REQUESTS`` requests, which are in memory together."""
    share: list[str] = []
    held = 0
    for tenant, count in counts.items():
        if share and held + count > MAX_REQUESTS:
            yield share
            share, held = [], 0
        share.append(tenant)
        held += count
    if share:
        yield share


def _verified(directory: Path, verifier: Verifier, since_ms: int) -> Checkpoint:
    """Return the last checkpoint of a log that is whole and has the time."""
    report = Report()
    with os_errors_as(f"cannot read the audit log in {directory}"):
        report = verify(directory, verifier, archived=True)
    if not report.sound or report.last is None:
        problem = report.problems[0] if report.problems else "it has no checkpoint"
        raise ConfigError(f"the audit log in {directory} is not whole: {problem}")
    first = next(in_order(directory), None)
    if report.first and (first is None or first.time_ms > since_ms):
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
