"""The programs through which tests look at an appliance, as ``requirements/observers.py`` gets them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest


def observer(name: str) -> str:
    """The path of ``prometheus``, ``promtool``, ``rotel-agent`` or ``phoenix``; the test is skipped without it."""
    beside = Path(sys.executable).parent
    places = (str(beside), str(beside.parent / "phoenix/bin"), os.environ.get("PATH", ""))
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        pytest.skip(f"no {name} here: `make setup-dev` gets it from Debian or PyPI, `make phoenix` gets Phoenix")
    return found
