"""policy.files: a file with its drop-ins, or a directory of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from policy.errors import PolicySchemaError, PolicySyntaxError
from policy.files import MAX_FILES, NOT_A_FILE, overlooked, read_sources
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


def test_a_file_and_its_drop_ins(tmp_path: Path) -> None:
    """``policy.d`` belongs to ``policy.yaml`` beside it and to no other file; its files follow in the order of their
    names. Control: without the folder the file is all."""
    file = tmp_path / "policy.yaml"
    file.write_text(TENANT.format("a"))
    alone = load_policy(read_sources(file))
    (tmp_path / "policy.d").mkdir()
    assert load_policy(read_sources(file)).digest == alone.digest
    for name in ("20-c", "10-b"):
        (tmp_path / "policy.d" / f"{name}.yaml").write_text(TENANT.format(name[-1]))
    sources = read_sources(file)
    assert [Path(source.name).name for source in sources] == ["policy.yaml", "10-b.yaml", "20-c.yaml"]
    whole = load_policy(sources)
    assert sorted(whole.tenants) == ["a", "b", "c"]
    assert whole.digest != alone.digest
    other = tmp_path / "other.yaml"
    other.write_text(TENANT.format("z"))
    assert list(load_policy(read_sources(other)).tenants) == ["z"]


def test_a_drop_in_that_repeats_is_told_with_both_files(tmp_path: Path) -> None:
    """A tenant, a credential, a group or a public prefix in two files is a problem that names both."""
    two = (
        "version: 1\ntenants:\n  a: {credentials: ['key:a'], models: [m]}\n  b: {credentials: ['key:b'], models: [m]}\n"
    )
    more = "sharing_groups: {g: {tenants: [a, b]}}\npublic_prefixes: {p: {model: m, text: hello, tenants: [a]}}\n"
    (tmp_path / "policy.yaml").write_text(two + more)
    (tmp_path / "policy.d").mkdir()
    drop_in = tmp_path / "policy.d" / "10.yaml"
    drop_in.write_text(two + more)
    with pytest.raises(PolicySchemaError) as caught:
        load_policy(read_sources(tmp_path / "policy.yaml"))
    told = {problem.path: str(problem) for problem in caught.value.problems}
    for path in ("tenants.a", "sharing_groups.g", "public_prefixes.p"):
        assert all(name in told[path] for name in ("policy.yaml", "policy.d/10.yaml")), told
    drop_in.write_text(TENANT.format("c").replace("key:c", "key:a"))
    with pytest.raises(
        PolicySchemaError, match=r"policy\.yaml:.* belongs to tenant 'c' in .*policy\.d/10\.yaml already"
    ):
        load_policy(read_sources(tmp_path / "policy.yaml"))


def test_files_that_are_no_drop_ins_are_told(tmp_path: Path) -> None:
    """Another suffix, a backup and a folder are named; hidden files, the texts of public prefixes and real drop-ins are
    not."""
    (tmp_path / "policy.yaml").write_text(TENANT.format("a"))
    assert overlooked(tmp_path / "policy.yaml") == []
    folder = tmp_path / "policy.d"
    (folder / "public").mkdir(parents=True)
    (folder / "more").mkdir()
    for name in ("10.yaml", "20.yml", "30.yaml.bak", ".10.yaml.swp"):
        (folder / name).write_text(TENANT.format("b"))
    told = overlooked(tmp_path / "policy.yaml")
    assert [Path(line.partition(":")[0]).name for line in told] == ["20.yml", "30.yaml.bak", "more"]
    assert overlooked(folder) == told


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
def test_drop_ins_that_cannot_be_listed_are_an_error(tmp_path: Path) -> None:
    """A folder that is closed to the service does not make a policy without its tenants. Control: root reads it."""
    (tmp_path / "policy.yaml").write_text(TENANT.format("a"))
    (tmp_path / "policy.d").mkdir(mode=0o700)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder.parts[:2] == ("/", "tmp") and len(folder.parts) > 2:
            folder.chmod(folder.stat().st_mode | 0o055)
    assert len(read_sources(tmp_path / "policy.yaml")) == 1
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError, match=r"policy\.d"):
            read_sources(tmp_path / "policy.yaml")
    finally:
        os.seteuid(0)


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
