"""Space on disks, from the folder to the level of a metric."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.control import DiskState, decode, encode
from appliance.gateway.telemetry import names
from appliance.gateway.watch.disks import Disks
from appliance.supervisor.disks import space, watched


def config(folder: Path) -> ApplianceConfig:
    """A configuration whose run directory and digest cache lie in a folder."""
    return ApplianceConfig(
        models=(ModelConfig(name="m", path=folder),),
        policy=folder,
        credentials=folder,
        pepper=folder,
        run_dir=folder,
        digest_cache=folder / "digests",
    )


def test_the_disk_of_each_folder_is_told(tmp_path: Path) -> None:
    """What the kernel says of the folder's file system comes out as two levels for each named place; places that the
    configuration does not name, and folders that are not there, have none."""
    folders = watched(config(tmp_path))
    assert folders == {"cache": tmp_path, "run": tmp_path}
    disks = Disks()
    assert list(disks.levels()) == []
    told = decode(encode(DiskState(space({**folders, "audit": tmp_path / "absent"}))))
    disks.take(told)
    seen = os.statvfs(tmp_path)
    sizes = {one.labels["place"]: one.value for one in disks.levels() if one.name == names.DISK_SIZE}
    assert sizes == dict.fromkeys(("cache", "run"), seen.f_blocks * seen.f_frsize)
    free = [one.value for one in disks.levels() if one.name == names.DISK_FREE]
    assert all(0 < one < seen.f_blocks * seen.f_frsize for one in free)


@pytest.mark.parametrize("places", [{"moon": [1, 2]}, {"audit": [1]}, {"audit": [-1, 2]}])
def test_what_is_no_disk_is_refused(places: dict[str, list[int]]) -> None:
    """Unknown places, and figures that are none."""
    with pytest.raises(ValueError, match="disk"):
        Disks().take(DiskState(places))
