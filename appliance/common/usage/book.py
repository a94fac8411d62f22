"""The usage book: tokens and costs by hour, tenant and model, and the reservations of requests that run. Blocks.

The audit log comes first: the supervisor writes a request's entry there, then here, and the book knows the number of
the first entry that it does not have. After a crash it takes what is missing from the log (``replay``), so no request
is missed and none counted twice; a book that is lost or damaged is made again from the log alone.

A tenant whose spend is limited has the largest cost of each running request reserved here before its first token. The
request's entry releases the reservation. One whose entry never comes, because a process was killed, stays until its
month ends: it counts against the tenant's limits of its day and its month, and is on no bill. Where the machine has
booted since, its request has certainly ended, and the operator may release it (``release``).

SQLite in WAL mode; every commit is forced to disk (``synchronous=FULL``), at most one a second for entries and one for
each group of reservations that came together.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.common.audit.entry import Entry
from appliance.common.errors import UsageError
from appliance.common.usage import runs, users
from appliance.common.usage.periods import HOURS_PER_DAY, MOST, MS_PER_HOUR, first_day, period_of

NAME = "usage.db"
"""Name of the book's file, in the folder ``FOLDER`` of the audit log."""

FOLDER = "usage"

SCHEMA = 3
"""Form of the tables; a book of a newer form is refused."""

FOLDER_MODE = 0o750
BUSY_S = 10.0
"""Seconds that a write waits for a reader's lock; readers hold none in WAL mode, a backup does for a moment."""

MAX_CHECKED_BYTES = 64 << 20
"""Largest book that is read whole at a start, to find damage: a tenth of a second."""

TABLES = """
CREATE TABLE IF NOT EXISTS position (log TEXT NOT NULL, next INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS used (
    hour INTEGER NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, requests INTEGER NOT NULL,
    input INTEGER NOT NULL, cached INTEGER NOT NULL, output INTEGER NOT NULL, cost INTEGER NOT NULL,
    reasoning INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (hour, tenant, model)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (
    tenant TEXT NOT NULL, day INTEGER NOT NULL, cost INTEGER NOT NULL, PRIMARY KEY (tenant, day)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reserved (
    request TEXT PRIMARY KEY, tenant TEXT NOT NULL, day INTEGER NOT NULL, cost INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS boot (id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS ended_with_boot (request TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS used_by_user (
    day INTEGER NOT NULL, tenant TEXT NOT NULL, user TEXT NOT NULL, requests INTEGER NOT NULL,
    input INTEGER NOT NULL, cached INTEGER NOT NULL, output INTEGER NOT NULL, cost INTEGER NOT NULL,
    reasoning INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (day, tenant, user)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS user_keys (tenant TEXT PRIMARY KEY, key BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS runs (began INTEGER PRIMARY KEY, last INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS reserved_by_tenant ON reserved (tenant);
"""

ADD_USED = f"""
INSERT INTO used VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?) ON CONFLICT (hour, tenant, model) DO UPDATE SET
    requests = requests + 1, input = MIN(input + excluded.input, {MOST}),
    cached = MIN(cached + excluded.cached, {MOST}), output = MIN(output + excluded.output, {MOST}),
    cost = MIN(cost + excluded.cost, {MOST}), reasoning = MIN(reasoning + excluded.reasoning, {MOST})
"""  # noqa: S608 - a constant

ADD_SPENT = f"""
INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT (tenant, day) DO UPDATE SET
    cost = MAX(MIN(cost + excluded.cost, {MOST}), -{MOST})
"""  # noqa: S608 - a constant

LENT = "lent"
"""What an entry ``lease`` says of a budget that went to another host; of one that came it says ``borrowed``."""

MAX_RELEASED = 8_192
"""Requests remembered whose entries were counted, a megabyte: a reservation that comes behind its entry is not
recorded. It is behind by a second at most, for both wait for one lock."""


SPENT = "SELECT day, cost FROM spent WHERE tenant = ? AND day >= ?"
RESERVED = "SELECT day, cost FROM reserved WHERE tenant = ? AND day >= ?"

RELEASE_BATCH = "DELETE FROM reserved WHERE request >= ? AND request < ?"

END_WITH_BOOT = "INSERT OR IGNORE INTO ended_with_boot SELECT request FROM reserved WHERE request GLOB 'req_*'"
"""Notes that plain requests have ended. Lines of batches run again after a boot, and loans go on."""

RELEASE_ENDED = """
DELETE FROM reserved WHERE tenant = ? AND request IN (SELECT request FROM ended_with_boot) RETURNING cost
"""


RENAME_USED = f"""
INSERT INTO used SELECT hour, ?, model, requests, input, cached, output, cost, reasoning FROM used WHERE tenant = ?
    ON CONFLICT (hour, tenant, model) DO UPDATE SET
    requests = requests + excluded.requests, input = MIN(input + excluded.input, {MOST}),
    cached = MIN(cached + excluded.cached, {MOST}), output = MIN(output + excluded.output, {MOST}),
    cost = MIN(cost + excluded.cost, {MOST}), reasoning = MIN(reasoning + excluded.reasoning, {MOST})
"""  # noqa: S608 - a constant

WITH_REASONING = ("used", "used_by_user")
"""Tables to which the form 3 has added a column; both have it last."""


class UsageAccessError(Exception):
    """The book cannot be read or written now; it is as it was."""


@dataclass(frozen=True, slots=True)
class SpentNow:
    """What a tenant has spent, in billionths of the currency's unit."""

    day: int
    month: int
    reserved: int
    """Reserved today for requests without an entry: they run, or never ended."""
    reserved_before: int = 0
    """Reserved likewise on earlier days of the month; it counts against the month alone."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """The largest cost of one request, in billionths of the currency's unit."""

    request: str
    tenant: str
    cost: int


@dataclass(frozen=True, slots=True)
class Released:
    """Reservations that the operator has released."""

    requests: int
    cost: int
    """What they had reserved in all, in billionths of the currency's unit."""


class UsageBook:
    """One open book. All methods may be called from any thread; one call at a time has it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Use ``open_book``."""
        self._connection = connection
        self._lock = threading.Lock()
        self._released: dict[str, None] = {}
        """Requests whose entries were counted lately, in their order."""

    def position(self, log: str) -> int:
        """Return the number of the first entry of this log that the book does not have.

        Raises:
            UsageAccessError: the book cannot be read.
        """
        with self._access() as connection:
            row = connection.execute("SELECT log, next FROM position").fetchone()
        return int(row[1]) if row is not None and row[0] == log else 0

    def apply(self, log: str, first: int, batch: Sequence[tuple[int, Entry]]) -> None:
        """Count entries of the audit log with their times in milliseconds; ``first`` is the number of the first one,
        which must be ``position``.

        Raises:
            UsageAccessError: the disk does not take it.
        """
        destroyed = False
        with self._change() as connection:
            for time_ms, one in batch:
                if one.kind == "request":
                    _count(connection, time_ms, one)
                    self._released[str(one.fields["request"])] = None
                elif one.kind == "lease":
                    _move(connection, time_ms, one)
                    self._released[str(one.fields["lease"])] = None
                elif one.kind == "batch" and not one.fields["principal"]:
                    # The batch is over, and the entries of its lines came before: a line that was cancelled between two
                    # attempts has none. Ids of its requests begin with the batch's, and "." is the sign after "-".
                    connection.execute(RELEASE_BATCH, (f"{one.fields['batch']}-", f"{one.fields['batch']}."))
                elif one.kind == "order":
                    destroyed |= users.carry_out(connection, one)
            runs.follow(connection, batch)
            connection.execute("DELETE FROM position")
            connection.execute("INSERT INTO position VALUES (?, ?)", (log, first + len(batch)))
        if destroyed:
            self._overwrite()
        while len(self._released) > MAX_RELEASED:
            del self._released[next(iter(self._released))]

    def reserve(self, now_s: float, reservations: Sequence[Reserved]) -> None:
        """Record what requests may cost, before their first tokens.

        Raises:
            UsageAccessError: the disk does not take it.
        """
        day = period_of(now_s).day
        with self._change() as connection:
            rows = [
                (one.request, one.tenant, day, one.cost) for one in reservations if one.request not in self._released
            ]
            connection.executemany("INSERT OR REPLACE INTO reserved VALUES (?, ?, ?, ?)", rows)
            # One that is reserved for anew runs.
            connection.executemany("DELETE FROM ended_with_boot WHERE request = ?", [(row[0],) for row in rows])

    def begin_boot(self, boot: str) -> int:
        """Note under which boot of the machine the book is used, by its id. Where it is another than before, the plain
        requests that have reservations ended with the earlier one: they count on until ``release``, or until their
        months end. Returns how many such reservations there are.

        Raises:
            UsageAccessError: the disk does not take it.
        """
        with self._change() as connection:
            row = connection.execute("SELECT id FROM boot").fetchone()
            if row is not None and row[0] != boot:
                connection.execute(END_WITH_BOOT)
            connection.execute("DELETE FROM boot")
            connection.execute("INSERT INTO boot VALUES (?)", (boot,))
            connection.execute("DELETE FROM ended_with_boot WHERE request NOT IN (SELECT request FROM reserved)")
            return int(connection.execute("SELECT COUNT(*) FROM ended_with_boot").fetchone()[0])

    def release(self, tenant: str) -> Released:
        """Remove a tenant's reservations of requests that ended with an earlier boot of the machine: they count against
        no limit any more. Nothing is charged for them.

        Raises:
            UsageAccessError: the disk does not take it.
        """
        with self._change() as connection:
            costs = [int(row[0]) for row in connection.execute(RELEASE_ENDED, (tenant,)).fetchall()]
            connection.execute("DELETE FROM ended_with_boot WHERE request NOT IN (SELECT request FROM reserved)")
        return Released(len(costs), min(sum(costs), MOST))

    def forget_reservations(self, now_s: float) -> None:
        """Remove the reservations of earlier months.

        Raises:
            UsageAccessError: the disk does not take it.
        """
        with self._change() as connection:
            connection.execute("DELETE FROM reserved WHERE day < ?", (first_day(period_of(now_s).month),))

    def spent(self, now_s: float, tenants: Sequence[str]) -> dict[str, SpentNow]:
        """Return what each tenant has spent in the current day and month, and has reserved today and before; tenants
        that have spent and reserved nothing are left out.

        Raises:
            UsageAccessError: the book cannot be read.
        """
        period = period_of(now_s)
        found: dict[str, SpentNow] = {}
        with self._access() as connection:
            for tenant in tenants:
                days, reserved = (
                    connection.execute(query, (tenant, first_day(period.month))).fetchall()
                    for query in (SPENT, RESERVED)
                )
                if days or reserved:
                    today, month = _on(days, period.day), sum(cost for _, cost in days)
                    held = _on(reserved, period.day)
                    before = sum(cost for _, cost in reserved) - held
                    found[tenant] = SpentNow(*(min(amount, MOST) for amount in (today, month, held, before)))
        return found

    def user_key(self, tenant: str) -> bytes:
        """Return the key of the pseudonyms of a tenant's end users, drawn at first need.

        Raises:
            UsageAccessError: the book cannot be read, or the disk does not take it.
        """
        with self._change() as connection:
            return users.key_of(connection, tenant)

    def forget_users(self, tenant: str) -> None:
        """Destroy what a tenant's end users used, and the key of their pseudonyms.

        Raises:
            UsageAccessError: the disk does not take it.
        """
        with self._change() as connection:
            users.forget(connection, tenant)
        self._overwrite()

    def rename(self, now_s: float, tenant: str, pseudonym: str) -> None:
        """Put what a tenant used under a pseudonym, and forget what its end users used, with the key of their
        pseudonyms. What it spent stays for the month that runs, whose limit needs it. Removed rows are overwritten in
        the file.

        Raises:
            UsageAccessError: the disk does not take it.
        """
        month = first_day(period_of(now_s).month)
        with self._change() as connection:
            connection.execute(RENAME_USED, (pseudonym, tenant))
            connection.execute("DELETE FROM used WHERE tenant = ?", (tenant,))
            connection.execute("DELETE FROM spent WHERE tenant = ? AND day < ?", (tenant, month))
            users.forget(connection, tenant)
        self._overwrite()

    def close(self) -> None:
        """Close the book."""
        with self._access() as connection:
            connection.close()

    def _overwrite(self) -> None:
        """Take what was removed out of the write-ahead log as well."""
        with self._access() as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def _access(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise UsageAccessError(f"the usage book cannot be read or written: {error}") from error

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._access() as connection, connection:
            yield connection


def _on(costs: Sequence[tuple[int, int]], wanted: int) -> int:
    """Return the sum of the costs, each with its day, that are of this day."""
    return sum(cost for day, cost in costs if day == wanted)


def _count(connection: sqlite3.Connection, time_ms: int, one: Entry) -> None:
    """Add one request to its hour and its day, and release what was reserved for it."""
    fields = one.fields
    hour, tenant, price = time_ms // MS_PER_HOUR, str(fields["tenant"]), min(int(fields.get("cost", 0)), MOST)
    row = connection.execute("DELETE FROM reserved WHERE request = ? RETURNING cost", (fields["request"],)).fetchone()
    if row is not None:
        # Nobody pays more than what was reserved, whatever a gateway reports.
        price = min(price, int(row[0]))
    numbers = (int(fields.get(name, 0)) for name in ("input_tokens", "cached_tokens", "output_tokens"))
    reasoning = int(fields.get("reasoning_tokens", 0))
    connection.execute(ADD_USED, (hour, tenant, fields["model"], *numbers, price, reasoning))
    if fields.get("end_user"):
        users.count(connection, hour // HOURS_PER_DAY, one, price)
    if price:
        connection.execute(ADD_SPENT, (tenant, hour // HOURS_PER_DAY, price))


def _move(connection: sqlite3.Connection, time_ms: int, one: Entry) -> None:
    """Count what was lent as spent, in place of its reservation, and what was borrowed as not spent; no bill has it.
    No loan is of a day behind that of its entry: such a loan would spend the budgets of months to come."""
    fields, cost = one.fields, min(int(one.fields["cost"]), MOST)
    day = min(int(fields["day"]), time_ms // MS_PER_HOUR // HOURS_PER_DAY)
    connection.execute("DELETE FROM reserved WHERE request = ?", (fields["lease"],))
    connection.execute(ADD_SPENT, (fields["tenant"], day, cost if fields["what"] == LENT else -cost))


def open_book(folder: Path) -> tuple[UsageBook, bool]:
    """Open the book of an audit folder, or begin one; returns it, and whether a damaged one was moved aside.

    Raises:
        UsageError: the folder cannot be used, or the book is of a newer version.
    """
    path = folder / FOLDER / NAME
    try:
        path.parent.mkdir(exist_ok=True, mode=FOLDER_MODE)
    except OSError as error:
        raise UsageError(f"cannot use {path.parent}: {error.strerror or error}") from error
    try:
        return UsageBook(_connect(path)), False
    except sqlite3.OperationalError as error:
        raise UsageError(f"cannot open the usage book {path}: {error}") from error
    except sqlite3.DatabaseError:
        # Damaged. The log has everything that was in it, as far as the log was kept.
        for suffix in ("", "-wal", "-shm"):
            beside = path.with_name(path.name + suffix)
            if beside.exists():
                beside.replace(beside.with_name(f"damaged-{beside.name}"))
        return UsageBook(_connect(path)), True


def _connect(path: Path) -> sqlite3.Connection:
    """Open the file and bring its tables into being.

    Raises:
        sqlite3.Error: the file is damaged, or cannot be opened.
        UsageError: it is of a newer version.
    """
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA:
            raise UsageError(
                f"the usage book {path} has the form {version}, and this version knows {SCHEMA}. Install the newer "
                "version again, or move the file away: the book is then made again from the audit log"
            )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")  # keys of pseudonyms, and what a shred takes, are overwritten
        if path.stat().st_size <= MAX_CHECKED_BYTES:
            problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
        connection.executescript(TABLES)
        _add_reasoning(connection)
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
    except (sqlite3.Error, UsageError):
        connection.close()
        raise
    return connection


def _add_reasoning(connection: sqlite3.Connection) -> None:
    """Give the tables of a book of an earlier form the column of reasoning tokens; what was counted before had none
    told, so they are 0. Ended half-way, the next start goes on."""
    for table in WITH_REASONING:
        if "reasoning" not in {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN reasoning INTEGER NOT NULL DEFAULT 0")
