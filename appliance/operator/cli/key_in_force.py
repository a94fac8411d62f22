"""Waits until a running appliance has a changed key table in force, and says so."""

from __future__ import annotations

import time
from pathlib import Path

from appliance.operator.cli.admin_client import UnreachableError, read, try_ask
from appliance.operator.cli.terminal import output, tell

PATIENCE_S = 5.0
"""How long a change may take to come into force: it takes a part of a second."""

PAUSE_S = 0.05
"""Between two questions."""


def wait_for(admin: str, credentials: Path, digest: str) -> None:
    """Wait until the table with this digest is in force, where an appliance answers that has it; prints what came of
    it."""
    from appliance.common.figures import duration
    from appliance.common.status import KeysStatus

    began = time.monotonic()
    while True:
        try:
            found = read(KeysStatus, try_ask(admin, "/keys"))
        except UnreachableError:
            output().print("no appliance answers; it is in force from its start on")
            return
        if Path(found.file).resolve() != credentials.resolve():
            output().print(f"the appliance at {admin} has another key table, {found.file}", soft_wrap=True)
            return
        waited = time.monotonic() - began
        if found.digest == digest:
            output().print(f"in force after {duration(waited)}")
            return
        if found.problem or waited > PATIENCE_S:
            tell(f"it is not in force: {found.problem or 'the appliance does not take it'}", "athanor doctor")
            return
        time.sleep(PAUSE_S)
