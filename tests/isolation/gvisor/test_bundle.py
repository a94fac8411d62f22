"""The OCI configuration as a golden file, and the bundle directory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from isolation.errors import SandboxStartError
from isolation.gvisor.bundle import Bundle, Profile, oci_config
from isolation.gvisor.spec import Limits, Mount, Rootfs, SandboxSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "config.json"


def spec(tmp_path: Path = Path("/host")) -> SandboxSpec:
    """A spec with a mount of each kind."""
    rootfs = Rootfs(
        python="/opt/python/bin/python3.11",
        python_path=("/opt/athanor", "/opt/packages"),
        mounts=(Mount(tmp_path / "python", "/opt/python"), Mount(tmp_path / "ld.so", "/lib64/ld.so")),
        masks=("/opt/python/site-packages",),
    )
    return SandboxSpec(
        name="engine-0",
        argv=rootfs.argv("engine"),
        env=(("OMP_NUM_THREADS", "1"), ("HOME", "/tmp")),
        rootfs=rootfs,
        mounts=(Mount(tmp_path / "ipc", "/ipc"),),
        limits=Limits(memory_bytes=2 << 30, cpu_quota_cores=1.5),
        tmpfs_bytes=32 << 20,
    )


def make_sources(tmp_path: Path) -> None:
    """The host side of the mounts of ``spec``."""
    (tmp_path / "python").mkdir()
    (tmp_path / "ipc").mkdir()
    (tmp_path / "ld.so").touch()


def test_config_is_the_golden_file():
    """Every word of the configuration is reviewed: a change shows in the golden file."""
    assert oci_config(spec(), Profile.ROOT) == json.loads(GOLDEN.read_text())


def test_profile_changes_only_its_own_mark():
    """Both profiles give the same walls; what differs are runsc's flags."""
    root, userns = oci_config(spec(), Profile.ROOT), oci_config(spec(), Profile.USERNS)
    assert root.pop("annotations") != userns.pop("annotations")
    assert root == userns


def test_bundle_makes_each_mount_point_and_goes_away(tmp_path):
    """The skeleton has a place of the right kind for each mount; after the deletion nothing is left."""
    make_sources(tmp_path)
    parent = tmp_path / "bundles"
    parent.mkdir()
    bundle = Bundle.create(parent, spec(tmp_path), Profile.ROOT)
    rootfs = bundle.path / "rootfs"
    assert (rootfs / "opt/python").is_dir()
    assert (rootfs / "lib64/ld.so").is_file()
    assert (rootfs / "ipc").is_dir()
    assert (rootfs / "opt").stat().st_mode & 0o777 == 0o755
    assert bundle.path.stat().st_mode & 0o777 == 0o700
    assert json.loads((bundle.path / "config.json").read_text())["hostname"] == "sandbox"
    bundle.delete()
    assert list(parent.iterdir()) == []
    bundle.delete()


def test_a_folder_has_what_is_mounted_below_it_and_is_there_without(tmp_path):
    """It is mounted before its content, from an empty place of the bundle with a mount point for each file; a file
    elsewhere has its own in the skeleton. Without content the configuration names no file, and the folder stays."""
    make_sources(tmp_path)
    (tmp_path / "weights").touch()
    plain, file = spec(tmp_path), tmp_path / "weights"
    inside = tuple(Mount(file, target) for target in ("/model/a/weights", "/model/weights", "/models"))
    full = replace(plain, folders=("/model", "/adapters"), mounts=(*plain.mounts, *inside))
    bundle = Bundle.create(tmp_path, full, Profile.ROOT)
    found = sorted(str(path.relative_to(bundle.path / "folders")) for path in (bundle.path / "folders").rglob("*"))
    assert found == ["adapters", "model", "model/a", "model/a/weights", "model/weights"]
    assert (bundle.path / "folders/model/weights").stat().st_size == 0
    assert sorted(path.name for path in (bundle.path / "rootfs/model").iterdir()) == []
    assert (bundle.path / "rootfs/models").is_file()
    targets = [one["destination"] for one in oci_config(full, Profile.ROOT)["mounts"]]
    assert targets.index("/model") < targets.index("/model/weights")
    empty = full.without_content()
    assert {one.target for one in empty.mounts} == {"/ipc", "/models"}
    assert "/model/" not in json.dumps(oci_config(empty, Profile.ROOT))
    assert oci_config(empty, Profile.ROOT) == oci_config(replace(full, mounts=empty.mounts), Profile.ROOT)
    assert "/model" in [one["destination"] for one in oci_config(empty, Profile.ROOT)["mounts"]]


def test_delete_survives_an_interrupted_delete(tmp_path):
    """What a delete that was cut short has left is removed by the next one."""
    make_sources(tmp_path)
    for name in ("engine-0", ".deleted-engine-0/rootfs"):
        (tmp_path / "b" / name).mkdir(parents=True)
    Bundle(tmp_path / "b" / "engine-0").delete()
    assert list((tmp_path / "b").iterdir()) == []


def test_a_name_that_is_taken_stays_as_it_is(tmp_path):
    """The second bundle of a name fails and does not touch the first."""
    make_sources(tmp_path)
    first = Bundle.create(tmp_path, spec(tmp_path), Profile.ROOT)
    with pytest.raises(SandboxStartError, match="exists already"):
        Bundle.create(tmp_path, spec(tmp_path), Profile.ROOT)
    assert (first.path / "config.json").exists()


def test_missing_source_is_named_and_leaves_nothing(tmp_path):
    """A mount of something that is not there fails before runsc is asked."""
    make_sources(tmp_path)
    (tmp_path / "ipc").rmdir()
    with pytest.raises(SandboxStartError, match="to be mounted at /ipc, does not exist"):
        Bundle.create(tmp_path, spec(tmp_path), Profile.ROOT)
    assert not (tmp_path / "engine-0").exists()


def test_mount_point_inside_another_mount_must_exist(tmp_path):
    """A read-only mount cannot grow a mount point; the message names the place."""
    make_sources(tmp_path)
    rootfs = Rootfs("/opt/python/bin/python3", (), (Mount(tmp_path / "python", "/opt/python"),))
    inner = SandboxSpec(
        "x", rootfs.argv("engine"), (), rootfs, (Mount(tmp_path / "ipc", "/opt/python/ipc"),), Limits(1 << 30)
    )
    with pytest.raises(SandboxStartError, match="mount point /opt/python/ipc does not exist"):
        Bundle.create(tmp_path, inner, Profile.ROOT)
    (tmp_path / "python/ipc").mkdir()
    Bundle.create(tmp_path, inner, Profile.ROOT)
