"""Sums of the usage book, for people and bills. Reads only; the supervisor may write meanwhile. Blocks."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from appliance.common.errors import ConfigError
from appliance.common.usage.book import BUSY_S, FOLDER, NAME, SCHEMA
from appliance.common.usage.periods import EPOCH, HOURS_PER_DAY, MS_PER_HOUR
from appliance.common.usage.runs import awake_ms
from appliance.common.usage.users import pseudonyms

SECONDS_PER_HOUR = MS_PER_HOUR // 1_000


class By(StrEnum):
    """What usage is summed by."""

    TENANT = "tenant"
    MODEL = "model"
    MONTH = "month"
    DAY = "day"
    HOUR = "hour"
    USER = "user"
    """End user, by pseudonym; in days, and not beside model or hour."""


COLUMNS = {
    By.TENANT: "tenant",
    By.MODEL: "model",
    By.MONTH: "strftime('%Y-%m', hour * 3600, 'unixepoch')",
    By.DAY: "strftime('%Y-%m-%d', hour * 3600, 'unixepoch')",
    By.HOUR: "strftime('%Y-%m-%dT%H:00Z', hour * 3600, 'unixepoch')",
}
"""SQL of what is summed by; all times are UTC."""

GROUPS = {By.HOUR: "hour", By.DAY: f"hour / {HOURS_PER_DAY}"}
"""SQL of what rows are grouped by, where it is another one: whole numbers take half the time of texts."""

COLUMNS_OF_USERS = {
    By.TENANT: "tenant",
    By.USER: "user",
    By.MONTH: "strftime('%Y-%m', day * 86400, 'unixepoch')",
    By.DAY: "strftime('%Y-%m-%d', day * 86400, 'unixepoch')",
}
"""SQL of what usage of end users is summed by."""

FIRST_WITH_USERS = 2
"""First form of the book that has end users and runs."""

FIRST_WITH_REASONING = 3
"""First form of the book that tells reasoning tokens apart; of an earlier one they are 0."""

STEPS_BETWEEN_LOOKS = 100_000
"""Instructions of SQLite between two looks at the clock: about a millisecond."""

TIMES = (By.MONTH, By.DAY, By.HOUR)
"""Sums by time are in the order of time, all others by cost and tokens, the most first."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Usage of one row."""

    keys: tuple[str, ...]
    """Values of what was summed by, in its order."""
    requests: int
    input: int
    cached: int
    output: int
    cost: int
    """Billionths of the currency's unit."""
    reasoning: int = 0
    """Output tokens that are reasoning, a part of ``output``."""

    @property
    def tokens(self) -> int:
        """Prompt and output tokens together."""
        return self.input + self.output


@dataclass(frozen=True, slots=True)
class Filter:
    """What of the book is summed; times are whole hours, and empty sequences leave nothing out."""

    since: datetime
    until: datetime
    tenants: Sequence[str] = ()
    models: Sequence[str] = ()
    users: Sequence[str] = ()
    """Names of end users, as requests name them."""

    @property
    def days(self) -> tuple[int, int]:
        """The whole days that hold the time: the first one, and the one after the last."""
        first, behind = _hour(self.since) // HOURS_PER_DAY, -(-_hour(self.until) // HOURS_PER_DAY)
        return first, behind


def sums(folder: Path, by: Sequence[By], chosen: Filter, within_s: float | None = None) -> list[Sum]:
    """Return the sums of the book in the audit folder.

    Raises:
        ConfigError: there is no book, it is of a newer version, it cannot be read, it is not summed so, or reading took
            longer than ``within_s``.
    """
    of_users = By.USER in by or chosen.users
    if of_users and (chosen.models or not {*by} <= COLUMNS_OF_USERS.keys()):
        raise ConfigError("end users are summed by tenant, day and month, and not by model or hour")
    if not of_users:
        return sums_together(folder, (by,), chosen, within_s)[0]
    with open_to_read(folder, within_s) as book:
        if book.execute("PRAGMA user_version").fetchone()[0] < FIRST_WITH_USERS:
            raise ConfigError("the usage book has no end users yet; the supervisor of this version adds them")
        return _sums_of_users(book, by, chosen)


def sums_together(
    folder: Path, groups: Sequence[Sequence[By]], chosen: Filter, within_s: float | None = None
) -> list[list[Sum]]:
    """Return the sums of one state of the book in the audit folder by several groups, none of them by end user.

    Raises:
        ConfigError: there is no book, it is of a newer version, it cannot be read, or reading took longer than
            ``within_s``.
    """
    with open_to_read(folder, within_s) as book:
        book.execute("BEGIN")  # Until the connection is closed it sees what the first sum sees.
        return [_sums(book, by, chosen) for by in groups]


def hours_awake(folder: Path, chosen: Filter, now: datetime | None) -> float:
    """Return the hours of the time in which the appliance ran; ``now`` where it runs now, None where it does not.

    Raises:
        ConfigError: there is no book, it is of another version, or it cannot be read.
    """
    since, until = (round(one.timestamp() * 1_000) for one in (chosen.since, chosen.until))
    today = None if now is None else round(now.timestamp() * 1_000)
    with open_to_read(folder) as book:
        if book.execute("PRAGMA user_version").fetchone()[0] < FIRST_WITH_USERS:
            raise ConfigError("the usage book has no hours yet; the supervisor of this version adds them")
        return awake_ms(book, since, until, today) / MS_PER_HOUR


@contextmanager
def open_to_read(folder: Path, within_s: float | None = None) -> Iterator[sqlite3.Connection]:
    """Open the book in the audit folder for reading, and close it at the end.

    Raises:
        ConfigError: there is no book, it is of a newer version, it cannot be read, or reading took longer than
            ``within_s``.
    """
    path = folder / FOLDER / NAME
    if not path.exists():
        raise ConfigError(f"there is no usage book in {path.parent}; the supervisor begins one at its start")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA:
                raise ConfigError(f"the usage book {path} has the form {version}; this version knows {SCHEMA}")
            if within_s is not None:
                deadline = time.monotonic() + within_s
                connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS_BETWEEN_LOOKS)
            yield connection
    except sqlite3.Error as error:
        if within_s is not None and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise ConfigError(f"reading the usage book took more than {within_s:g} s") from error
        raise ConfigError(f"cannot read the usage book {path}: {error}") from error


def total(sums: Iterable[Sum], *keys: str) -> Sum:
    """Return the sum of all rows, under these keys."""
    columns = [(one.requests, one.input, one.cached, one.output, one.cost, one.reasoning) for one in sums]
    return Sum(keys, *map(sum, zip(*columns, strict=True))) if columns else Sum(keys, 0, 0, 0, 0, 0)


def _sums(connection: sqlite3.Connection, by: Sequence[By], chosen: Filter) -> list[Sum]:
    columns = "".join(f"{COLUMNS[one]}, " for one in by)
    places = ", ".join(str(number + 1) for number in range(len(by)))
    groups = ", ".join(GROUPS.get(one, COLUMNS[one]) for one in by)
    where, values = "hour >= ? AND hour < ?", [_hour(chosen.since), _hour(chosen.until)]
    for name, wanted in (("tenant", chosen.tenants), ("model", chosen.models)):
        if wanted:
            where += f" AND {name} IN ({', '.join('?' * len(wanted))})"
            values += wanted  # type: ignore[arg-type]
    times = [str(number + 1) for number, one in enumerate(by) if one in TIMES]
    order = ", ".join([*times, "cost DESC", "input + output DESC", *([places] if by else [])])
    query = (  # Columns and names are constants; values are bound.
        f"SELECT {columns}SUM(requests), SUM(input) AS input, SUM(cached), SUM(output) AS output, SUM(cost) AS cost, "  # noqa: S608
        f"{reasoning(connection)} FROM used WHERE {where}{f' GROUP BY {groups}' if by else ''} "
        f"HAVING SUM(requests) ORDER BY {order}"
    )
    return [Sum(tuple(row[: len(by)]), *row[len(by) :]) for row in connection.execute(query, values)]


def _sums_of_users(connection: sqlite3.Connection, by: Sequence[By], chosen: Filter) -> list[Sum]:
    columns = "".join(f"{COLUMNS_OF_USERS[one]}, " for one in by)
    places = ", ".join(str(number + 1) for number in range(len(by)))
    where, values = "day >= ? AND day < ?", [*chosen.days]
    wanted_users = pseudonyms(connection, chosen.users, chosen.tenants)
    for name, wanted, given in (("tenant", chosen.tenants, chosen.tenants), ("user", wanted_users, chosen.users)):
        if given:
            where += f" AND {name} IN ({', '.join('?' * len(wanted))})"
            values += wanted  # type: ignore[arg-type]
    times = [str(number + 1) for number, one in enumerate(by) if one in TIMES]
    order = ", ".join([*times, "cost DESC", "input + output DESC", places])
    query = (  # Columns and names are constants; values are bound.
        f"SELECT {columns}SUM(requests), SUM(input) AS input, SUM(cached), SUM(output) AS output, SUM(cost) AS cost, "  # noqa: S608
        f"{reasoning(connection)} FROM used_by_user WHERE {where} GROUP BY {places} "
        f"HAVING SUM(requests) ORDER BY {order}"
    )
    return [Sum(tuple(row[: len(by)]), *row[len(by) :]) for row in connection.execute(query, values)]


def reasoning(connection: sqlite3.Connection) -> str:
    """Return the SQL of the sum of reasoning tokens in a book of any known form."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return "SUM(reasoning)" if version >= FIRST_WITH_REASONING else "0"


def _hour(moment: datetime) -> int:
    return int((moment - EPOCH).total_seconds() // SECONDS_PER_HOUR)
