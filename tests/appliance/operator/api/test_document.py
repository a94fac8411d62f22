"""The programs of docs/admin-api.md, run as they stand against a real server; only the socket is another."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.common.operator_roles import NEEDED
from appliance.operator.api.front import METHODS
from isolation.host.process import Completed, run
from tests.appliance.admin_server import FakeAppliance, serve_admin
from tests.appliance.operator.api.place import NEW, Place, a_place, calling
from tests.grpc_clients import programs

TEXT = (Path(__file__).parents[4] / "docs" / "admin-api.md").read_text(encoding="utf-8")
SOCKET = "/run/athanor-operator/api.sock"
"""The socket as the page has it."""


@pytest.fixture
def place() -> Iterator[Place]:
    """A configuration, and an appliance on paper that answers."""
    with serve_admin(FakeAppliance()) as url, a_place(url) as found:
        yield found


def block(title: str, place: Place) -> str:
    """A program or commands of the page, with the server's own socket."""
    (found,) = re.findall(rf"^```\w+ {re.escape(title)}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert SOCKET in found
    return str(found).replace(SOCKET, str(place.socket))


async def ran(*words: str) -> Completed:
    """A program that has ended well."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return await asyncio.to_thread(run, words, timeout_s=60, env={"PATH": path, "HOME": "/tmp"})


async def test_the_python_program_puts_a_policy_in_force(place: Place) -> None:
    """It tells what changes, and the policy is there; for a bad policy it tells the place and changes nothing."""
    program, new, bad = (place.folder / name for name in ("apply.py", "new.yaml", "bad.yaml"))
    program.write_text(block("apply.py", place))
    new.write_text(NEW)
    bad.write_text("version: 7\n")
    async with calling(place):
        refused = await asyncio.to_thread(run, [sys.executable, str(program), str(bad)], timeout_s=60, check=False)
        before = place.policy.read_text()
        told = await ran(sys.executable, str(program), str(new))
    assert refused.returncode == 1 and "policy.yaml:1" in refused.stdout and before != NEW
    assert f"in force: {place.digest[:12]}" in told.stdout and "alpha" in told.stdout
    assert place.policy.read_text() == NEW


@pytest.mark.parametrize(("title", "program"), [("server info", programs.grpcurl), ("with buf", programs.buf)])
async def test_the_commands_answer(place: Place, title: str, program: object) -> None:
    """Each with a document that names the model; skipped where the program is not here."""
    assert callable(program)
    folder = Path(program()).parent
    async with calling(place):
        told = await ran("bash", "-euc", f'PATH="{folder}:$PATH"\n{block(title, place)}')
    assert "athanor-mini" in told.stdout


def test_every_method_is_in_the_table_of_roles() -> None:
    """Once, in the row of its role; the table names no others."""
    rows = _rows("role")
    told = {role: set(re.findall(r"`(\w+)`", row)) for role, row in rows.items()}
    for path, method in METHODS.items():
        name = path.rpartition("/")[2]
        assert [role for role, names in told.items() if name in names] == [NEEDED[path].value], name
    assert sum(map(len, told.values())) == len(METHODS)


def test_every_route_is_in_the_table_of_roles() -> None:
    """Once, in the row of its role; the table names no others."""
    told = {role: re.findall(r"`([A-Z]+ [^`]+)`", row) for role, row in _rows("role for a route").items()}
    wanted = {name: role.value for name, role in NEEDED.items() if not name.startswith("/")}
    assert {name: role for role, names in told.items() for name in names} == wanted
    assert sum(map(len, told.values())) == len(wanted)


def _rows(heading: str) -> dict[str, str]:
    """The rows of the table whose first column is called so."""
    (table,) = re.findall(rf"^\| {heading} \|.*\n\|---.*\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    return dict(re.findall(r"^\| `(viewer|operator|security)` \| (.*) \|$", table, re.MULTILINE))
