"""Version of the machine's state, and migrations: forward automatically, back by restoring a backup.

State is what outlives a version: ``/etc/athanor`` and what lies below ``/var/lib``. ``schema.json`` says its form. A
version of the appliance knows one, brings older ones forward when it is installed, and refuses newer ones.

A migration changes files of ``/etc/athanor`` only. The audit log and the keyring are never migrated and never in a
backup: a log that was restored would have lost its end, and a keyring keys that had been destroyed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from appliance.common import backup
from appliance.common.backup import Backup, version_words
from appliance.common.errors import ConfigError, os_errors_as, reason_of
from appliance.common.version import VERSION
from isolation.host.atomic_file import write_whole

STATE = Path("var/lib/athanor")
"""Folder of the schema's file and the backups, below the root; root owns it."""

NAME = "schema.json"
MODE = 0o644
MAX_BYTES = 4 << 10


@dataclass(frozen=True, slots=True)
class Migration:
    """One step forward."""

    summary: str
    apply: Callable[[Path], None]
    """Changes the files of the folder that it is given, ``/etc/athanor``; raises ``OSError`` or ``ConfigError``, and
    then everything is as before."""


FIRST = 1
"""The form of every version that wrote no ``schema.json``."""

MIGRATIONS: tuple[Migration, ...] = ()
"""The step from ``FIRST`` to the next form, and so on. Append only."""


def known() -> int:
    """The form that this version knows."""
    return FIRST + len(MIGRATIONS)


@dataclass(frozen=True, slots=True)
class Schema:
    """What ``schema.json`` says."""

    number: int
    written_by: str
    """Version that wrote the state in this form; empty where nothing says it."""
    migrating: bool = False
    """A migration has begun and not ended: the files are those of neither form, the backup is whole."""


@dataclass(frozen=True, slots=True)
class StatePlan:
    """What an installation does to the state."""

    found: Schema
    steps: tuple[Migration, ...] = ()
    unmarked: bool = False
    """Nothing says the form yet."""

    @property
    def idle(self) -> bool:
        """Nothing would change."""
        return not self.steps and not self.unmarked and not self.found.migrating


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did."""

    put: Backup
    """The backup that is in place again."""
    kept: Backup | None
    """Where what was there went; None where it was of the same form, or of none."""


def read_schema(state: Path) -> Schema | None:
    """The form of the state in a folder, or None where nothing says it.

    Raises:
        ConfigError: unreadable or malformed.
    """
    path = state / NAME
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(MAX_BYTES))
        number, writer = values["schema"], values["written_by"]
        if type(number) is not int or number < FIRST or not isinstance(writer, str):
            raise ValueError
        return Schema(number, writer[:64], values.get("migrating") is True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} does not say which form the state has; restore it from a backup") from error


def check(state: Path) -> None:
    """Refuse to serve from state that this version does not know.

    Raises:
        ConfigError: it is newer, older, or half migrated.
    """
    found = read_schema(state)
    if found is None:
        return
    _refuse_newer(found, state)
    if found.number < known() or found.migrating:
        raise ConfigError(
            f"the state in {state} has the form {found.number}, athanor {VERSION} needs {known()}; "
            "`athanor install --systemd` brings it forward"
        )


def plan(root: Path) -> StatePlan:
    """What installing this version would do to the state.

    Raises:
        ConfigError: the state is newer than this version knows, or cannot be read.
    """
    found = read_schema(root / STATE)
    if found is None and not (root / backup.FILES / "athanor.yaml").exists():
        return StatePlan(Schema(known(), VERSION), unmarked=True)
    unmarked, found = found is None, found or Schema(FIRST, "")
    _refuse_newer(found, root / STATE)
    return StatePlan(found, MIGRATIONS[found.number - FIRST :], unmarked)


def migrate(root: Path, wanted: StatePlan) -> None:
    """Bring the state forward. Before the first step everything that may change is backed up; a step that fails, or a
    power cut, leaves what was there before, and the next run begins anew.

    Raises:
        ConfigError: a step failed; the state is as it was.
    """
    found, state = wanted.found, root / STATE
    if found.migrating:
        backup.restore(root, found.number)
    if wanted.steps:
        if not found.migrating:
            backup.take(root, found.number, found.written_by)
        _write(state, Schema(found.number, found.written_by, migrating=True))
        for step in wanted.steps:
            _step(root, found, step)
    if not wanted.idle:
        _write(state, Schema(known(), VERSION))


def _step(root: Path, found: Schema, step: Migration) -> None:
    try:
        step.apply(root / backup.FILES)
    except (OSError, ConfigError) as error:
        backup.restore(root, found.number)
        _write(root / STATE, found)
        raise ConfigError(f"the state was not brought forward ({step.summary}): {error}; it is as it was") from error


def restore(root: Path, number: int | None = None) -> Restored:
    """Put the newest backup of an older form in place of what is there, which is backed up itself.

    Raises:
        ConfigError: there is no backup, or it cannot be put in place.
    """
    current = read_schema(root / STATE) or Schema(FIRST, "")
    older = [one for one in backup.numbers(root) if one < current.number]
    chosen = number if number is not None else max(older, default=None)
    if chosen is None or chosen not in backup.numbers(root):
        raise ConfigError(f"there is no backup of an older form in {root / backup.BACKUPS}")
    put = backup.find(root, chosen)
    kept = None
    if not current.migrating and chosen != current.number:
        kept = backup.take(root, current.number, current.written_by)
    _write(root / STATE, Schema(chosen, current.written_by, migrating=True))
    backup.restore(root, chosen)
    _write(root / STATE, Schema(chosen, put.state_of))
    return Restored(put, kept)


def _refuse_newer(found: Schema, state: Path) -> None:
    if found.number > known():
        raise ConfigError(
            f"the state in {state} has the form {found.number}, written by {version_words(found.written_by)}; this is "
            f"athanor {VERSION}, which knows {known()} and would lose what it does not know; install the other one, or "
            "go back to the backup of before: `athanor state restore`"
        )


def _write(state: Path, schema: Schema) -> None:
    values = {"schema": schema.number, "written_by": schema.written_by, "migrating": schema.migrating}
    with os_errors_as(f"cannot write {state / NAME}"):
        state.mkdir(parents=True, exist_ok=True, mode=0o755)
        write_whole(state / NAME, (json.dumps(values) + "\n").encode(), MODE)
