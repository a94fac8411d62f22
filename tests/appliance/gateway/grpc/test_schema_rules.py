"""The proto files keep buf's rules, and what clients of the last release rely on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from appliance.gateway.grpc import generate_code
from appliance.gateway.grpc.generate_code import SCHEMAS, Schemas
from tests.appliance.gateway.grpc.breaking import broken
from tests.grpc_clients import programs

RULES = "version: v2\nlint:\n  use: [STANDARD, COMMENTS]\nbreaking:\n  use: [FILE]\n"


@pytest.fixture(params=SCHEMAS, ids=lambda one: one.names[0])
def schemas(request: pytest.FixtureRequest) -> Schemas:
    """Those of tenants, and those of the operator."""
    found: Schemas = request.param
    return found


def buf(schemas: Schemas, folder: Path, *words: str, root: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of buf over proto files."""
    (folder / "buf.yaml").write_text(RULES)
    argv = [programs.buf(), *words, "--config", str(folder / "buf.yaml"), str(root or schemas.root)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)


def test_buf_finds_nothing(schemas: Schemas, tmp_path: Path) -> None:
    """``buf lint`` with STANDARD and COMMENTS is silent, and names a service without a comment (control)."""
    found = buf(schemas, tmp_path, "lint")
    assert (found.returncode, found.stdout) == (0, ""), found.stdout
    bad = tmp_path / "bad" / "athanor" / "bad" / "v1"
    bad.mkdir(parents=True)
    (bad / "bad.proto").write_text('syntax = "proto3";\npackage athanor.bad.v1;\nservice Bad {}\n')
    assert (
        'Service "Bad" should have a non-empty comment' in buf(schemas, tmp_path, "lint", root=tmp_path / "bad").stdout
    )


def test_buf_finds_no_break(schemas: Schemas, tmp_path: Path) -> None:
    """``buf breaking`` against the last release is silent."""
    found = buf(schemas, tmp_path, "breaking", "--against", str(schemas.released))
    assert (found.returncode, found.stdout) == (0, ""), found.stdout


def test_nothing_of_the_release_is_broken(schemas: Schemas) -> None:
    """Each method, message, field and enum value of the last release is what it was."""
    before = FileDescriptorSet.FromString(schemas.released.read_bytes())
    assert broken(before, FileDescriptorSet.FromString(generate_code.descriptors(schemas))) == []


def test_the_release_has_every_service(schemas: Schemas, tmp_path: Path) -> None:
    """Each proto file is in the set of the last release, so that a break of any is found; a set from which one was
    taken gets it back, and no other file of it is made anew (control)."""
    released = FileDescriptorSet.FromString(schemas.released.read_bytes())
    names = [str(path.relative_to(schemas.root)) for path in sorted(schemas.root.rglob("*.proto"))]
    assert set(names) <= {file.name for file in released.file}
    assert sorted(map(str, schemas.protos)) == [str(schemas.root / name) for name in names], "a file of no schema"
    copy = replace(schemas, folder=tmp_path)
    shutil.copytree(schemas.root, copy.root)
    kept = [file for file in released.file if file.name != names[0]]
    if kept:  # Hosts have one file.
        kept[-1].message_type[0].name = "Earlier"
    copy.released.write_bytes(FileDescriptorSet(file=kept).SerializeToString())
    again = {file.name: file for file in FileDescriptorSet.FromString(generate_code.with_added(copy)).file}
    assert {*again} == {file.name for file in released.file}
    assert [again[file.name] for file in kept] == kept


def _rename_field(files: FileDescriptorSet) -> None:
    files.file[-1].message_type[0].field[0].name = "other"


def _renumber_field(files: FileDescriptorSet) -> None:
    files.file[-1].message_type[0].field[0].number = 99


def _remove_method(files: FileDescriptorSet) -> None:
    del files.file[-1].service[0].method[0]


def _renumber_value(files: FileDescriptorSet) -> None:
    files.file[-1].enum_type[0].value[1].number = 77


@pytest.mark.parametrize("change", [_rename_field, _renumber_field, _remove_method, _renumber_value])
def test_each_break_is_found(change: Callable[[FileDescriptorSet], None]) -> None:
    """Control: fields that have another name or number, a method that is gone, a value with another number; while what
    is new breaks nothing."""
    before = FileDescriptorSet.FromString(generate_code.OPERATOR.released.read_bytes())
    after = FileDescriptorSet.FromString(generate_code.OPERATOR.released.read_bytes())
    after.file[-1].message_type.add(name="New")
    assert broken(before, after) == []
    change(after)
    assert len(broken(before, after)) == 1
