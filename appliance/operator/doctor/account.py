"""The account: whether audit log and usage book are whole, and the book has what the log has. Reads only."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.witnessing import read_states
from appliance.common.config_places import AuditConfig
from appliance.common.errors import reason_of
from appliance.common.figures import counted
from appliance.common.usage.book import BUSY_S, FOLDER, NAME, SCHEMA
from appliance.common.witness_problem import witness_problem
from appliance.operator.doctor.facts import KeptAccount
from appliance.operator.doctor.finding import Area, Finding, Subject

DAMAGED = "damaged-"
"""Beginning of the names of what was found damaged and moved aside."""

MOST_BEHIND = 20_000
"""Entries that a book may lack without a warning: those of the last second, or of the last moment of an appliance that
was killed, which it counts at its next start."""


def look_at_account(folder: Path) -> KeptAccount:
    """Gather the facts about an audit folder."""
    where = str(folder)
    try:
        paths = files.segment_paths(folder)
        damaged = (*folder.glob(f"{DAMAGED}*"), *(folder / FOLDER).glob(f"{DAMAGED}*.db"))
        names = tuple(sorted(str(path.relative_to(folder)) for path in damaged))
        if not paths:
            return KeptAccount(folder=where, empty=True, damaged=names)
        newest = files.read_segment(paths[-1])
        position = _position(folder / FOLDER / NAME, newest.name)
    except FileNotFoundError:
        return KeptAccount(folder=where, empty=True)
    except PermissionError:
        return KeptAccount(folder=where, unseen=True)
    except OSError as error:
        return KeptAccount(folder=where, problem=f"{error.filename or where}: {reason_of(error)}")
    except files.LogFormatError as error:
        return KeptAccount(folder=where, problem=f"the audit log is damaged: {error}")
    except sqlite3.Error as error:
        return KeptAccount(folder=where, problem=f"the usage book cannot be read: {error}", damaged=names)
    return KeptAccount(folder=where, entries=newest.start + len(newest.lines), counted=position, damaged=names)


def with_witnesses(account: KeptAccount, config: AuditConfig) -> KeptAccount:
    """Add what is known of the witnesses."""
    problem = witness_problem(config, time.time())
    return replace(account, witnesses=len(config.witnesses), unwitnessed=problem, witnessed_at=_witnessed_at(config))


def _witnessed_at(config: AuditConfig) -> int:
    """Unix time at which the last of the witnesses had cosigned; 0 where one has not, or nothing is known."""
    try:
        states = read_states(config.tiles) if config.tiles is not None else {}
    except OSError:
        return 0
    return min((states[one.name].time if one.name in states else 0 for one in config.witnesses), default=0)


def _position(path: Path, log: str) -> int:
    """Number of entries of this log that the book has; 0 where there is no book."""
    if not path.exists():
        return 0
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA:
            raise sqlite3.DatabaseError(f"its form is {version}, and this version knows {SCHEMA}")
        row = connection.execute("SELECT log, next FROM position").fetchone()
    finally:
        connection.close()
    return int(row[1]) if row is not None and row[0] == log else 0


def check_account(account: KeptAccount) -> list[Finding]:
    """Return what is to be said of an audit folder. Pure."""
    subject = Subject(Area.SERVICE, "account")
    if account.unseen:
        return [subject.note(f"{account.folder} is closed to this user", "not looked at", "sudo athanor doctor")]
    if account.problem:
        means = "bills and limits of spend depend on it; the supervisor moves what is damaged aside at its start"
        return [subject.problem(account.problem, means, "athanor audit verify")]
    found = []
    if account.unwitnessed:
        means = "nothing outside confirms the log; a refusal may be a sign that it was changed"
        mend = "athanor audit witness    # under systemd: systemctl enable --now athanor-witness.timer"
        found.append(subject.warning(account.unwitnessed, means, mend))
    elif account.witnesses:
        at = datetime.fromtimestamp(account.witnessed_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        who = counted(account.witnesses, "witness", "witnesses")
        found.append(subject.ok(f"{who} cosigned the audit log in time, all by {at}"))
    if account.damaged:
        means = "it was found damaged; the log began anew, and a book was made again from the log that was left"
        mend = f"athanor audit verify --from {account.folder}/{account.damaged[0]}    # then keep it elsewhere"
        found.append(subject.warning(f"there is {', '.join(account.damaged)}", means, mend))
    if account.empty:
        return [*found, subject.note(f"{account.folder} has no audit log yet; it begins at the first start")]
    behind = account.entries - account.counted
    entries = counted(account.entries, "entry", "entries")
    if behind > MOST_BEHIND:
        said = f"the usage book lacks {counted(behind, 'entry', 'entries')} of the audit log's"
        return [*found, subject.warning(said, "bills lack them until they are counted", "athanor logs --level warning")]
    waiting = "all counted" if behind <= 0 else f"{behind} not yet counted"
    return [*found, subject.ok(f"{entries} in the audit log, {waiting} in the usage book")]
