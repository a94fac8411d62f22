"""The engine's lock-down inside a real sandbox: gVisor's kernel takes the filter and enforces it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.sandbox.test_lockdown import check_report

PROBE = Path(__file__).resolve().parents[2] / "engine" / "sandbox" / "lockdown_probe.py"


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.full)])
def test_one_more_call_ends_a_process_in_a_sandbox(runtime, make_spec, few: bool) -> None:
    """Every call beyond the list is the last one in gVisor too and comes back before lock-down; listed ones work. A
    process costs gVisor much more than the host, where tests/engine tries all calls each time."""
    sandbox = runtime.boot(make_spec("lockdown", PROBE.read_text(), *["few"] * few))
    try:
        assert sandbox.wait(60.0) == 0, sandbox.output_tail()
        check_report(json.loads("".join(line for line in sandbox.output_tail() if line.startswith("{"))), few=few)
    finally:
        sandbox.delete()


def test_the_death_is_told_in_words(runtime, make_spec) -> None:
    """A sandbox whose program breaks its lock-down ends with a reason that names it."""
    code = (
        "import socket\n"
        "from engine.sandbox.allowed_calls import Bells, engine_calls\n"
        "from engine.sandbox.lockdown import lock_down\n"
        "socket.socket(socket.AF_UNIX).close()\n"
        "lock_down(engine_calls(Bells(0, 1), threads=1, generates_code=False))\n"
        "socket.socket(socket.AF_UNIX)\n"
    )
    sandbox = runtime.boot(make_spec("breach", code))
    try:
        assert sandbox.wait(60.0) == 128 + 31
        ending = sandbox.ending()
        assert ending is not None
        assert "SIGSYS" in ending.reason
        assert "made a system call beyond its lock-down" in ending.reason
    finally:
        sandbox.delete()
