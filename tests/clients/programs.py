"""Clients and agent frameworks of the HTTP APIs, each in the environment that ``make clients`` made for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / ".clients"
HERE = Path(__file__).resolve().parent
PATIENCE_S = 300.0
"""Longest run of one client: some take ten seconds to be imported."""

QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
"""Settings with which nobody but the appliance is asked for anything."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client, and where it is installed."""

    name: str
    folder: str
    """Of its environment, below ``PACKAGES``; empty where it is a program of the machine's."""

    @property
    def node(self) -> bool:
        """Whether it is a program of Node's."""
        return self.folder == "node"

    def run_file(self, environment: dict[str, str], scratch: Path) -> Any:
        """What its program in this folder found; the test is skipped where the client is not installed."""
        path = HERE / "node" / f"use_{self.name}.mjs" if self.node else HERE / f"use_{self.name}.py"
        return json.loads(self.run(path.read_text(), environment, scratch).splitlines()[-1])

    def run(self, text: str, environment: dict[str, str], scratch: Path) -> str:
        """What a program prints; the test is skipped where the client is not installed."""
        missing = f"no {self.name} here: `make clients` gets it from PyPI or npm"
        if not self.folder:
            interpreter, program = sys.executable, scratch / f"a_{self.name}_program.py"
            if shutil.which(self.name) is None:
                pytest.skip(f"no {self.name} on the path")
        elif self.node:
            packages, interpreter = PACKAGES / "node/node_modules", shutil.which("node")
            if interpreter is None or not packages.is_dir():
                pytest.skip(missing)
            # Modules are looked for beside the program.
            if not (scratch / "node_modules").is_symlink():
                (scratch / "node_modules").symlink_to(packages)
            program = scratch / f"{self.name}.mjs"
        else:
            interpreter = str(PACKAGES / self.folder / "bin/python")
            if not Path(interpreter).exists():
                pytest.skip(missing)
            program = scratch / f"a_{self.name}_program.py"
        program.write_text(text)
        given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [interpreter, str(program)],
            cwd=scratch,
            env={**given, **QUIET, **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3_000:]
        return done.stdout


CLIENTS = {
    one.name: one
    for one in (
        Client("langchain", "agents"),
        Client("litellm", "agents"),
        Client("pydantic_ai", "agents"),
        Client("openai_agents", "agents"),
        Client("instructor", "instructor"),
        Client("llama_index", "llama-index"),
        Client("ai_sdk", "node"),
    )
}
"""By name, which is that of its program and of its block in docs/clients.md."""

PROGRAMS = {**CLIENTS, "curl": Client("curl", "")}
"""By name: those and curl, whose blocks in docs/clients.md are commands."""
