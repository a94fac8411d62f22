"""What the evaluator may import, seen in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EVALUATOR = (
    "evaluate",
    "explain",
    "decision",
    "limits",
    "match",
    "model",
    "request",
    "simulate",
    "changes",
    "change_wording",
    "told",
    "route_wording",
    "outside",
    "replay",
)
FORBIDDEN = {"os", "time", "socket", "random", "logging", "asyncio", "subprocess", "datetime"}


def test_the_evaluator_needs_the_standard_library_only(root: Path) -> None:
    """Importing the evaluator, the explainer, the comparison and the replay loads no pydantic, yaml or sockets."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "import policy.evaluate, policy.explain, policy.replay, policy.simulate\n"
        "print('\\n'.join(set(sys.modules) - before))"
    )
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "policy.evaluate" in loaded
    tops = {name.partition(".")[0] for name in loaded}
    assert tops - {"policy"} <= set(sys.stdlib_module_names)
    assert not tops & {"pydantic", "pydantic_core", "yaml", "socket", "asyncio", "logging"}


@pytest.mark.parametrize("name", EVALUATOR)
def test_no_clock_files_or_sockets_by_name(root: Path, name: str) -> None:
    """No module of the evaluator imports anything that could make it impure."""
    tree = ast.parse((root / "policy" / f"{name}.py").read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported
    assert not imported & FORBIDDEN


def test_the_export_command_prints_the_schema(root: Path) -> None:
    """``python -m policy.export`` writes the published file's content."""
    command = [sys.executable, "-m", "policy.export"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    assert done.stdout == (root / "policy" / "schema.json").read_text()
