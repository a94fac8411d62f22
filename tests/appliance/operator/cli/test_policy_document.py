"""docs/policy.md: its commands, run with its files, print what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from policy.case_schema import AskSchema, CaseFileSchema, ExpectSchema, UseSchema
from tests.appliance.operator.cli.conftest import Run, without_digests

BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)

IN_FORCE = "## Try it on the requests"


@pytest.fixture
def text(root: Path) -> str:
    """The document."""
    return (root / "docs/policy.md").read_text()


def test_the_commands_print_what_the_document_shows(
    run: Run, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command, on a terminal of 80 columns, prints the block behind it and ends with its status. Those that change
    what is in force are run against a real appliance (tests/system/test_policy_versions.py)."""
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(text.partition(IN_FORCE)[0])
    for kind, name, content in blocks:
        if kind == "yaml":
            (tmp_path / name).write_text(content)
    shown = [block for block in blocks if block[0] != "yaml"]
    commands, outputs = shown[::2], shown[1::2]
    assert len(commands) == len(outputs) >= 4
    for (kind, _, command), (text_kind, status, expected) in zip(commands, outputs, strict=True):
        assert (kind, text_kind) == ("sh", "text")
        program, *words = shlex.split(command)
        assert program == "athanor"
        result = run(*words)
        assert [line.rstrip() for line in without_digests(result.stdout).splitlines()] == without_digests(
            expected
        ).splitlines()
        assert result.exit_code == int(status)


def test_every_key_of_a_file_of_cases_is_named(text: str) -> None:
    """The document names each key that the schema of cases has."""
    section = text.partition("## Cases")[2]
    keys = {*AskSchema.model_fields, *UseSchema.model_fields, *ExpectSchema.model_fields, *CaseFileSchema.model_fields}
    assert {key for key in keys if f"`{key}`" not in section and f"`{key}: |`" not in section} == {"cases"}
