"""policy.files: a file or a directory of drop-ins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from policy.errors import PolicySyntaxError
from policy.files import MAX_FILES, NOT_A_FILE, read_sources
from policy.loader import load_policy
from policy.positions import MAX_TEXT_BYTES

TENANT = "version: 1\ntenants: {{{0}: {{credentials: ['key:{0}'], models: [m]}}}}\n"


def test_one_file(tmp_path: Path) -> None:
    """A file is one source, named as it was given."""
    file = tmp_path / "policy.yaml"
    file.write_text(TENANT.format("a"))
    [source] = read_sources(file)
    assert source.name == str(file)
    assert list(load_policy([source]).tenants) == ["a"]


def test_a_directory(tmp_path: Path) -> None:
    """Only visible files named *.yaml count, in lexical order."""
    for name in ("20-b", "10-a"):
        (tmp_path / f"{name}.yaml").write_text(TENANT.format(name[-1]))
    (tmp_path / ".hidden.yaml").write_text("nonsense")
    (tmp_path / "notes.txt").write_text("nonsense")
    sources = read_sources(tmp_path)
    assert [Path(source.name).name for source in sources] == ["10-a.yaml", "20-b.yaml"]
    assert list(load_policy(sources).tenants) == ["a", "b"]


def test_an_empty_directory_is_an_error(tmp_path: Path) -> None:
    """No file is not the same as a policy that allows nothing."""
    with pytest.raises(PolicySyntaxError, match=r"holds 0 files named \*.yaml"):
        read_sources(tmp_path)


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    """A pipe or a dead link among the drop-ins is named at once; one beside the public prefixes is left out."""
    (tmp_path / "a.yaml").write_text(TENANT.format("a"))
    os.mkfifo(tmp_path / "b.yaml")
    (tmp_path / "c.yaml").symlink_to("nowhere")
    with pytest.raises(PolicySyntaxError) as caught:
        read_sources(tmp_path)
    assert [problem.message for problem in caught.value.problems] == [NOT_A_FILE] * 2
    for name in ("b.yaml", "c.yaml"):
        (tmp_path / name).unlink()
    (tmp_path / "public").mkdir()
    os.mkfifo(tmp_path / "public" / "pipe.txt")
    (tmp_path / "public" / "help.txt").write_text("hello")
    [source] = read_sources(tmp_path)
    assert source.files == {"help.txt": "hello"}


def test_too_many_files(tmp_path: Path) -> None:
    """The number of drop-ins is bounded."""
    for index in range(MAX_FILES + 1):
        (tmp_path / f"{index}.yaml").touch()
    with pytest.raises(PolicySyntaxError, match="holds 257 files"):
        read_sources(tmp_path)


def test_bytes_that_are_no_utf8_are_placed(tmp_path: Path) -> None:
    """The first wrong byte is named by line and column in characters."""
    file = tmp_path / "p.yaml"
    file.write_bytes("version: 1\n# \u00e4\u00f6 ".encode() + b"\xff\n")
    with pytest.raises(PolicySyntaxError) as caught:
        read_sources(file)
    assert str(caught.value) == f"{file}:2:6: not UTF-8"


def test_a_huge_file_is_read_up_to_the_bound_only(tmp_path: Path) -> None:
    """One byte more than the bound is read, which the loader then refuses."""
    file = tmp_path / "p.yaml"
    file.write_bytes(b"#" * (MAX_TEXT_BYTES + 100))
    [source] = read_sources(file)
    assert len(source.text) == MAX_TEXT_BYTES + 1
    with pytest.raises(PolicySyntaxError, match="larger than"):
        load_policy([source])


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    """The caller sees the operating system's own error."""
    with pytest.raises(FileNotFoundError):
        read_sources(tmp_path / "none.yaml")
