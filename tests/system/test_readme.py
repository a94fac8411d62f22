"""The README's commands, run as they stand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.engine.convert.write_gguf import Kind, write_embedded
from tests.system.commands import python
from tests.system.conftest import ATHANOR, Appliance

pytestmark = pytest.mark.runsc


COMPILES = "kernels build"
"""The one command that takes a processor half a minute."""


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_commands_work(battered: Appliance, root: Path, tmp_path: Path, compiles: bool) -> None:
    """Each `athanor` line of the README ends with status 0 against a running demo, and leaves nothing in the tree; the
    one that compiles, at the full count."""
    lines = re.findall(r"^    \.venv/bin/athanor (.*?)(?:  +#.*)?$", (root / "README.md").read_text(), re.MULTILINE)
    commands = [line for line in lines if not line.startswith("demo")]
    assert len(commands) >= 5
    commands = [line for line in commands if line.startswith(COMPILES) == compiles]
    assert commands
    write_embedded(tmp_path / "origin", tmp_path / "SRC.gguf", Kind.Q8_0)
    for number, command in enumerate(commands):
        words = command.replace(".athanor/", f"{battered.state}/").replace(" DIR", f" {tmp_path}/{number}").split()
        if words[0] in ("status", "traces", "reload", "top", "console"):
            words += ["--admin", battered.ready["admin"]]
        done = subprocess.run([ATHANOR, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


def test_the_python_snippet_prints_an_answer(appliance: Appliance, root: Path) -> None:
    """The official client's lines, with this demo's address and key in place of the printed ones."""
    (code,) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    code = code.replace("http://127.0.0.1:8080", appliance.ready["http"]).replace(
        "ath_alpha-1_...", appliance.key("alpha")
    )
    assert "policy.yaml" in python(code)
