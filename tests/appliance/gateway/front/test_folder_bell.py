"""A sleep that ends early when a watched folder changes, and only then."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from pathlib import Path

import pytest

from appliance.gateway.front.folder_bell import EVENT, OVERFLOWN, SETTLE_S, FolderBell

PERIOD_S = 0.5
"""A short period; the sleep of an undisturbed bell takes at least a tenth of it."""


async def rung(bell: FolderBell, folder: Path, change: str, patience_s: float = 2 * SETTLE_S) -> bool:
    """Whether a change of the folder ends a sleep of a minute within the patience."""
    sleep = asyncio.create_task(bell.sleep(60.0))
    await asyncio.sleep(0)
    file = folder / "keys"
    if change == "written":
        file.write_text("b")
    elif change == "replaced":
        (folder.parent / "new").write_text("b")
        (folder.parent / "new").rename(file)
    elif change == "removed":
        file.unlink()
    else:
        file.read_text()
    done, _ = await asyncio.wait((sleep,), timeout=patience_s)
    sleep.cancel()
    return bool(done)


@pytest.mark.parametrize("change", ["written", "replaced", "removed", "read"])
async def test_a_change_of_a_watched_folder_ends_the_sleep(tmp_path: Path, change: str) -> None:
    """Written in place, replaced or removed; reading the file ends no sleep, and neither does another folder."""
    watched, other = tmp_path / "watched", tmp_path / "other"
    for folder in (watched, other):
        folder.mkdir()
        (folder / "keys").write_text("a")
    with FolderBell() as bell:
        bell.watch([watched])
        if change == "read":
            assert not await rung(bell, watched, change)
        else:
            assert await rung(bell, watched, change, 10)
        assert not await rung(bell, other, change)


async def test_changes_without_end_have_a_bound(tmp_path: Path) -> None:
    """Three hundred changes end one sleep, and the next one lasts."""
    with FolderBell() as bell:
        bell.watch([tmp_path])
        for number in range(300):
            (tmp_path / str(number)).touch()
        began = time.monotonic()
        await bell.sleep(60.0)
        assert SETTLE_S <= time.monotonic() - began < 10
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bell.sleep(60.0), 2 * SETTLE_S)


async def test_folders_come_and_go(tmp_path: Path) -> None:
    """A folder that is made later is watched by the next call, also after it was removed; one that is left out is not
    watched any more."""
    late, first = tmp_path / "late", tmp_path / "first"
    first.mkdir()
    with FolderBell() as bell:
        for _ in range(2):
            bell.watch([first, late])
            late.mkdir()
            bell.watch([first, late])
            assert await rung(bell, late, "written", 10)
            (late / "keys").unlink()
            late.rmdir()
            await bell.sleep(PERIOD_S)
        bell.watch([late])
        await bell.sleep(PERIOD_S)  # The end of a watch rings once.
        assert not await rung(bell, first, "written")


async def test_a_folder_that_was_replaced_is_watched_under_its_name(tmp_path: Path) -> None:
    """A rename of another folder over its name: changes of the new one end a sleep, those of the old one do not."""
    watched, following, old = tmp_path / "watched", tmp_path / "following", tmp_path / "old"
    watched.mkdir()
    following.mkdir()
    with FolderBell() as bell:
        bell.watch([watched])
        watched.rename(old)
        following.rename(watched)
        await asyncio.wait_for(bell.sleep(60.0), 10)
        bell.watch([watched])
        await bell.sleep(PERIOD_S)  # The end of a watch rings once.
        assert not await rung(bell, old, "written")
        assert await rung(bell, watched, "written", 10)


async def test_folders_are_watched_anew_after_events_were_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel has dropped the event that tells of a folder's removal: the next one of its name is watched still."""
    folder, read = tmp_path / "folder", os.read

    def lossy(fd: int, count: int) -> bytes:
        read(fd, count)
        return EVENT.pack(-1, OVERFLOWN, 0, 0)

    folder.mkdir()
    with FolderBell() as bell:
        bell.watch([folder])
        folder.rmdir()
        with monkeypatch.context() as patched:
            patched.setattr(os, "read", lossy)
            await asyncio.wait_for(bell.sleep(60.0), 10)
        folder.mkdir()
        bell.watch([folder])
        assert await rung(bell, folder, "written", 10)


async def test_without_a_watch_the_period_remains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the kernel gives no watch, nothing fails and a sleep takes its period."""

    class Refusing:
        """A C library whose kernel has no watches left."""

        def inotify_init1(self, _flags: int) -> int:
            """Refuse."""
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing())
    with FolderBell() as bell:
        bell.watch([tmp_path])
        began = time.monotonic()
        await bell.sleep(PERIOD_S)
        assert PERIOD_S / 20 < time.monotonic() - began < 10
