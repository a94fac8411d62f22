"""Whether GPU kernels are interpreted in this run, or run on this machine's GPU: `pytest --native`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

OPTION = "--native"


def _arguments() -> list[str]:
    """Arguments of pytest. A worker of several has those of the process that started it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return sys.argv
    return Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")


ON_CARD = OPTION in _arguments()
"""Kernels run on the GPU. Triton decides that at its import, which is before pytest knows its options."""
