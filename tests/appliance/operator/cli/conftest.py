"""Fixtures of the command line's tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from typer.testing import CliRunner, Result

from appliance.operator.cli.app import for_line
from tests.appliance.admin_server import FakeAppliance, serve_admin

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``athanor`` in this process, as on an 80-column terminal without colour in UTC."""
    monkeypatch.setenv("TZ", "UTC")
    for name in ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*args: str, columns: int = 80, typed: str | None = None) -> Result:
        environment = {"COLUMNS": str(columns), "TERM": "dumb"}
        return CliRunner().invoke(for_line(args), args, env=environment, input=typed, prog_name="athanor")

    return invoke


def without_digests(text: str) -> str:
    """The text with the digits of policies' digests replaced: they change with every field that a policy gets."""
    return re.sub(r"\b[0-9a-f]{12}\b", "0" * 12, text)


@pytest.fixture(scope="module")
def appliance() -> Iterator[FakeAppliance]:
    """A running admin listener on loopback."""
    fake = FakeAppliance()
    with serve_admin(fake):
        yield fake


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    """Each test begins with a healthy appliance."""
    if "appliance" in request.fixturenames:
        request.getfixturevalue("appliance").reset()
