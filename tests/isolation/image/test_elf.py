"""The reader of dynamic sections against the machine's own loader."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from isolation.errors import RootfsError
from isolation.image.elf import closure, read_elf, system_library_dirs
from isolation.image.python_rootfs import locate_packages, running_python

PYTHON = running_python()


def said_by_ldd(path: Path) -> dict[str, str]:
    """What ldd finds for a file: name to real path; without the kernel's page and the loader."""
    if shutil.which("ldd") is None:
        pytest.skip("no ldd")
    text = subprocess.run(["ldd", os.fspath(path)], capture_output=True, text=True, check=True).stdout
    return {name: os.path.realpath(place) for name, place in re.findall(r"^\s*(\S+) => (/\S+) \(", text, re.MULTILINE)}


def samples() -> list[Path]:
    """The interpreter, an extension module with foreign libraries, and the deepest of torch's."""
    torch = locate_packages("engine", PYTHON)[0]
    names = [*PYTHON.dynload.glob("_ssl.*.so"), *PYTHON.dynload.glob("_ctypes.*.so"), torch / "lib/libtorch_cpu.so"]
    return [PYTHON.executable, *names, *torch.glob("_C.*.so")]


@pytest.mark.parametrize("path", samples(), ids=lambda path: path.name)
def test_closure_is_what_ldd_says(path):
    """Names and files agree with the loader, RUNPATH and $ORIGIN included."""
    found = closure([path])
    expected = said_by_ldd(path)
    expected.pop(os.path.basename(closure([PYTHON.executable]).loader), None)
    ours = {name: os.fspath(place) for name, place in found.libraries}
    ours.pop(os.path.basename(closure([PYTHON.executable]).loader), None)
    assert ours == expected
    assert found.missing == ()


def test_libraries_inside_a_mounted_directory_are_not_listed():
    """A wheel's own libraries come with its directory."""
    torch = locate_packages("engine", PYTHON)[0]
    names = {name for name, _ in closure([torch / "lib/libtorch_cpu.so"], inside=[torch]).libraries}
    assert "libc10.so" not in names
    assert "libc.so.6" in names


def test_loader_and_default_directory():
    """The program names its loader; libc lies in a directory that the loader searches by itself."""
    found = closure([PYTHON.executable])
    assert os.path.exists(found.loader)
    assert found.system_dir in system_library_dirs()


def test_other_files_are_skipped(tmp_path):
    """Text and other kinds of binaries are no ELF files of this machine."""
    for name, data in {"a": b"", "b": b"#!/bin/sh\n", "c": b"\x7fELF\x01\x01" + bytes(100)}.items():
        (tmp_path / name).write_bytes(data)
        assert read_elf(tmp_path / name) is None
    assert closure(tmp_path.iterdir()).libraries == ()


def test_missing_library_is_named(tmp_path):
    """A name that no directory has is reported, not raised: extension modules may be optional."""
    copy = tmp_path / "broken.so"
    copy.write_bytes(PYTHON.executable.read_bytes().replace(b"libc.so.6\0", b"libq.so.6\0"))
    assert closure([copy]).missing == ("libq.so.6",)


@pytest.mark.parametrize("size", [10, 64, 400, 3000])
def test_damaged_file_is_an_error_of_ours(tmp_path, size):
    """A file that is cut anywhere raises our error or reads as having no dynamic section; never anything else."""
    copy = tmp_path / "cut.so"
    copy.write_bytes(Path(os.path.realpath(sys.executable)).read_bytes()[:size])
    try:
        read_elf(copy)
    except RootfsError as error:
        assert "damaged" in str(error)
