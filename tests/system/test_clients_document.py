"""docs/clients.md and docs/tools.md: each block is run, as it stands there, against a real appliance; those of agent
frameworks are by ``test_clients.py``."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.clients.programs import CLIENTS
from tests.system.commands import python
from tests.system.conftest import Appliance

pytestmark = pytest.mark.runsc

SETTINGS = ("environment",)


def blocks(root: Path, page: str) -> dict[str, tuple[str, str]]:
    """Language and text of a page's blocks, by name; those without one are named by their place."""
    found = re.findall(r"^```(\w+) ?(\w*)\n(.*?)^```$", (root / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    return {name or str(place): (language, text) for place, (language, name, text) in enumerate(found)}


def run(language: str, text: str, environment: dict[str, str]) -> str:
    """What a block prints."""
    if language == "python":
        return python(text, environment)
    done = subprocess.run(
        ["bash", "-euc", text],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout


def environment(root: Path, appliance: Appliance) -> dict[str, str]:
    """The variables of the page's own block, at the appliance's address."""
    _, text = blocks(root, "clients.md")["environment"]
    text = text.replace("http://127.0.0.1:8080", appliance.ready["http"])
    shown = run("sh", text + "env", {"ATHANOR_KEY": appliance.key("alpha")})
    return dict(line.split("=", 1) for line in shown.splitlines() if line.startswith(("OPENAI_", "ANTHROPIC_")))


CURL = ("curl", "curl_stream", "curl_structured", "curl_tools")
NAMES = (*CURL, "chat", "structured", "responses", "messages", "typed_message")


def test_the_names_are_those_of_the_page(root: Path) -> None:
    """No block is left out."""
    assert set(blocks(root, "clients.md")) == {*NAMES, *SETTINGS, *CLIENTS}


EVERY_RUN = (*CURL, "chat", "messages")
"""Blocks that every run has: curl, and each of the two official clients once; what the others ask for, the HTTP tests
of the gateway have."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.full) for name in NAMES]
)
def test_a_client_is_answered(root: Path, appliance: Appliance, name: str) -> None:
    """With the variables of the page alone; each shows an answer."""
    language, text = blocks(root, "clients.md")[name]
    said = run(language, text, environment(root, appliance))
    expected = {
        "curl": ('"finish_reason":"stop"',),
        "curl_stream": ('"delta":{"content":"', "\ndata: [DONE]\n"),
        "curl_structured": ('{\\"allowed\\":',),
        "curl_tools": ('"name":"weather"', '"finish_reason":"tool_calls"', '"finish_reason":"stop"'),
        "structured": ("allowed=",),
        "typed_message": ("allowed=",),
    }.get(name, (" ",))
    assert all(one in said for one in expected) and len(said) > 10, said
