"""``athanor audit export``: entries as lines of JSON for other programs, once each."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.common.figures import printable
from appliance.operator.cli import exits
from appliance.operator.cli.audit import (
    DEFAULT_FOLDER,
    From,
    Kinds,
    Models,
    Names,
    Since,
    Tenants,
    Until,
    config_errors_fail,
    entry_filter,
)
from appliance.operator.cli.terminal import errors, fail

if TYPE_CHECKING:
    from appliance.operator.audit_entries import LoggedEntry

EXAMPLES = """
athanor audit export --since yesterday --until today | a day, for a security tool
athanor audit export --form entries --kind request --tenant alpha | the entries as they are in the log
athanor audit export --resume /var/lib/shipper/position | what came since the last call, for a timer
athanor audit export --form entries --after athanor.audit/967329b57dff7ec4:412 | for a reader with a position of its own
"""

_ENTRY = re.compile(r"([!-~]{1,64}):(0|[1-9][0-9]{0,17})")

POSITION_MODE = 0o644
"""Mode of the file with the position, which has nothing that a shipper may not read."""

_POSITION = re.compile(r"([!-~]{1,64}) (0|[1-9][0-9]{0,17})\n")


class Form(StrEnum):
    """``--form`` of exported entries."""

    OCSF = "ocsf"
    ENTRIES = "entries"


def export(  # noqa: PLR0913 - a parameter is an option
    directory: From = DEFAULT_FOLDER,
    form: Annotated[
        Form, typer.Option("--form", metavar="FORM", help="ocsf: events of OCSF 1.6.0; entries: as the log has them.")
    ] = Form.OCSF,
    kind: Kinds = None,
    tenant: Tenants = None,
    model: Models = None,
    since: Since = None,
    until: Until = None,
    names: Names = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume", metavar="FILE", help="Begin behind the entry that FILE names, and write the last one into it."
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="LOG:N", help="Begin behind this entry, the last that the reader has."),
    ] = None,
) -> None:
    """Print entries of the audit log for other programs, one JSON object a line, the oldest first.

    With --resume each call goes on where the last one ended. The position is written after the
    lines: after a crash in between, lines come twice, and none is missing. Each event has a
    metadata.uid that is the same both times. Entries that no checkpoint covers yet come with a later
    call, and entries that the folder does not have any more are told on standard error. What a pipe
    has taken counts as written: a reader that must lose nothing when it is killed keeps its own
    position and names it with --after. Verifies nothing: see athanor audit verify.
    """
    from appliance.operator.audit_entries import in_order, log_name
    from appliance.operator.ocsf import ocsf_event

    if resume is not None and after is not None:
        fail(exits.USAGE, "--resume and --after both say where to begin", "the reader's own position is --after")
    chosen = entry_filter(since, until, kind, tenant, model)
    with config_errors_fail():
        name = log_name(directory)
        first = _position(resume, name) if resume is not None else _behind(after, name)
        following = first
        _end_torn_line()
        for one in in_order(directory, first, names, signed_of=name):
            if one.number > following and (following or resume is not None or after is not None):
                _tell_missing(following, one.number)
            following = one.number + 1
            if chosen.takes(one):
                value: dict[str, Any] = ocsf_event(one, name) if form is Form.OCSF else _values(one, name)
                sys.stdout.write(json.dumps(value, separators=(",", ":")) + "\n")
    sys.stdout.flush()
    if resume is not None and following > first:
        _on_disk()
        _keep(resume, name, following)


def _tell_missing(first: int, following: int) -> None:
    """Say that entries are not there, which moved away segments have, or nobody."""
    which = f"entry {first} is" if following == first + 1 else f"entries {first} to {following - 1} are"
    _note(f"{which} not in this folder, and not exported: export them from where older segments were moved to")


def _note(text: str) -> None:
    """Say something beside the lines; the export goes on."""
    errors().print(printable(f"note: {text}"), soft_wrap=True, markup=False, highlight=False)


def _number_in(log: str, number: int, name: str) -> int:
    """Number to begin at in the log that is there, by a number in the log that a position names. One that was begun
    anew is exported from its begin."""
    if log == name:
        return number
    _note(
        f"the position is of the log {log}, and here is {name or 'none yet'}, which is exported from its begin; what "
        "was not exported of the other is where that was moved to, as damaged-* in this folder"
    )
    return 0


def _values(one: LoggedEntry, log: str) -> dict[str, Any]:
    return {"log": log, **one.values()}


def _end_torn_line() -> None:
    """Where the lines go to a file that ends in half a line, as a call that was killed or a full disk left it, begin a
    line: the half line's entry comes again, and behind it nobody would read it."""
    with suppress(OSError, io.UnsupportedOperation):
        if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
            # The shell opens such a file for writing alone.
            with open(f"/proc/self/fd/{sys.stdout.fileno()}", "rb") as file:
                if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                    sys.stdout.write("\n")


def _on_disk() -> None:
    """Have the lines on the disk before the position, where they go to a file: else a machine that loses power may keep
    the position alone."""
    try:
        if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
            os.fsync(sys.stdout.fileno())
    except io.UnsupportedOperation:  # a stream without a descriptor
        return
    except OSError as error:
        fail(exits.REFUSED, f"cannot write the lines: {error.strerror}", "they come again with the next call")


def _behind(after: str | None, name: str) -> int:
    """Number of the first entry behind the one that a reader has."""
    if after is None:
        return 0
    found = _ENTRY.fullmatch(after)
    if found is None:
        fail(exits.USAGE, f"{after} names no entry", "LOG:N, as the lines have `log` and `n`")
    return _number_in(found[1], int(found[2]) + 1, name)


def _position(path: Path, name: str) -> int:
    """Number of the first entry that was not exported."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    except (OSError, UnicodeDecodeError) as error:
        fail(exits.REFUSED, f"cannot read {path}: {error}")
    found = _POSITION.fullmatch(text)
    if found is None:
        hint = "name a file that is not there yet, and the export begins at the first entry"
        fail(exits.REFUSED, f"{path} is no position of an export", hint)
    return _number_in(found[1], int(found[2]), name)


def _keep(path: Path, name: str, following: int) -> None:
    """Write the position in one step; it is on the disk behind this, since an empty one would end all later calls."""
    from isolation.host.atomic_file import write_whole

    try:
        write_whole(path, f"{name} {following}\n".encode(), POSITION_MODE)
    except OSError as error:
        fail(exits.REFUSED, f"cannot write {path}: {error.strerror}", "the lines above come again with the next call")
