"""Files of the kernel are read whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from isolation.host.kernel_file import read_kernel_file


def test_a_file_is_read_to_its_end(tmp_path: Path) -> None:
    """One that tells no size, and one of more than a piece, have all their bytes; no descriptor stays open."""
    before = len(os.listdir("/proc/self/fd"))
    assert read_kernel_file("/proc/self/stat").startswith(f"{os.getpid()} (".encode())
    (tmp_path / "large").write_bytes(data := os.urandom(200_001))
    assert read_kernel_file(tmp_path / "large") == data
    (tmp_path / "empty").touch()
    assert read_kernel_file(tmp_path / "empty") == b""
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """Readers of processes that end meanwhile are told so."""
    with pytest.raises(FileNotFoundError):
        read_kernel_file(tmp_path / "none")
