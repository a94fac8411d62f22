"""Scratch folders: a dead command's is swept with all that it names, and nothing else is."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from isolation.host import leftovers, scratch
from isolation.host.rundir import RunDirectory
from isolation.host.scratch import LOCK, OUTSIDE, Outside, Scratch, sweep


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own directory for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def dead(place: Path) -> Path:
    """A scratch folder with a file, whose command has ended."""
    made = Scratch.make()
    (made.path / "folder").mkdir()
    (made.path / "folder" / "file").write_text("left")
    os.close(made.lock_fd)
    return made.path


def test_a_dead_commands_folder_is_swept(place: Path, dead: Path) -> None:
    """The kernel released its lock: the folder goes, with what is in it."""
    assert sweep(place) == [str(dead)]
    assert not dead.exists()


def test_a_living_commands_folder_stays(place: Path) -> None:
    """Its lock is held, here by another process as in life."""
    program = "import time; from isolation.host.scratch import Scratch; print(Scratch.make().path, flush=True); "
    argv = (sys.executable, "-c", program + "time.sleep(60)")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(place)}) as living:
        assert living.stdout is not None
        folder = Path(living.stdout.readline().decode().strip())
        assert sweep(place) == []
        assert folder.exists()
        living.kill()
    assert sweep(place) == [str(folder)], "the control: the same folder, once its command is dead"


def test_other_folders_stay(place: Path, dead: Path) -> None:
    """Folders without a lock, links to a dead folder, links in place of a lock, and folders that others may write."""
    bare = place / f"{scratch.PREFIX}bare"
    bare.mkdir()
    (bare / "file").touch()
    (place / f"{scratch.PREFIX}link").symlink_to(dead)
    linked = place / f"{scratch.PREFIX}linked"
    linked.mkdir()
    (linked / LOCK).symlink_to(dead / LOCK)
    loose = place / f"{scratch.PREFIX}loose"
    loose.mkdir()
    (loose / LOCK).touch()
    loose.chmod(0o777)
    assert sweep(place) == [str(dead)]
    left = {path.name.removeprefix(scratch.PREFIX) for path in place.iterdir()}
    assert left == {"bare", "link", "linked", "loose"}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_another_users_folder_stays(place: Path, dead: Path) -> None:
    """Root sweeps its own alone."""
    os.chown(dead, 65_534, 65_534)
    assert sweep(place) == []
    os.chown(dead, 0, 0)
    assert sweep(place) == [str(dead)]


def test_a_folder_that_was_never_locked_goes_when_it_is_old_and_empty(place: Path) -> None:
    """A command that was killed between two calls; a young one may still be locked."""
    bare = place / f"{scratch.PREFIX}bare"
    bare.mkdir()
    sweep(place)
    assert bare.exists()
    os.utime(bare, (time.time() - 3_600,) * 2)
    sweep(place)
    assert not bare.exists()


def test_no_link_in_a_folder_is_followed(place: Path, dead: Path) -> None:
    """What a link leads to stays."""
    kept = place / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (dead / "link").symlink_to(kept)
    (dead / "folder" / "bundles").symlink_to(kept)
    assert sweep(place) == [str(dead)]
    assert (kept / "file").exists()


def test_programs_of_a_dead_command_end_and_others_live(place: Path, dead: Path) -> None:
    """A program that names the folder, or works in it, is killed; one that names another folder, and a pager, not."""
    sleeps = (sys.executable, "-c", "import time; time.sleep(60)")
    ours = [subprocess.Popen((*sleeps, str(dead / "folder"))), subprocess.Popen(sleeps, cwd=dead)]
    others = [subprocess.Popen((*sleeps, f"{dead}x")), subprocess.Popen(("tail", "-f", str(dead / "folder" / "file")))]
    try:
        time.sleep(0.5)  # until each has become its program
        assert sweep(place) == [str(dead)]
        assert [one.wait(10) for one in ours] == [-9, -9]
        assert [one.poll() for one in others] == [None, None]
    finally:
        for one in (*ours, *others):
            one.kill()
            one.wait()


def test_what_lies_elsewhere_goes_too(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A file, a queue, a segment and a run directory that were written down; a line that was cut is skipped."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    made = Scratch.make()
    (elsewhere / "file").touch()
    (elsewhere / "run").mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(0x5EED1, 4096, 0o1000 | 0o2000 | 0o600)
    queue = libc.syscall(leftovers.MQ_UNLINK - 1, b"athanor-test", os.O_CREAT | os.O_RDWR, 0o600, None)
    assert min(segment, queue) >= 0
    os.close(queue)
    nested = made.path / "folder"
    nested.mkdir()
    made.note(Outside("file", str(elsewhere / "file")))
    made.note(Outside("run directory", str(elsewhere / "run")))
    scratch.note(nested, Outside("segment", str(0x5EED1)))
    scratch.note(nested, Outside("queue", "athanor-test"))
    with (made.path / OUTSIDE).open("a") as file:
        file.write('{"kind": "file", "na')
    os.close(made.lock_fd)
    assert sweep(place) == [str(made.path)]
    assert list(elsewhere.iterdir()) == []
    assert libc.shmget(0x5EED1, 0, 0) == -1
    assert libc.syscall(leftovers.MQ_UNLINK, b"athanor-test") == -1


def test_a_living_appliances_run_directory_stays(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It was written down by a dead command, and another appliance holds its lock by now."""
    run = tmp_path_factory.mktemp("elsewhere") / "run"
    run.mkdir()
    made = Scratch.make()
    made.note(Outside("run directory", str(run)))
    os.close(made.lock_fd)
    with (run / leftovers.LAUNCHER_LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sweep(place) == [str(made.path)]
        assert run.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk and makes cgroups")
def test_mounts_and_cgroups_go(place: Path, dead: Path) -> None:
    """A disk below the folder, and the groups of sandboxes whose run directory lies there."""
    point = dead / "disk with blank"
    point.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "tmpfs", str(point)), check=True)
    directory = RunDirectory.open(dead / "folder" / "run")
    directory.close()
    groups = [Path("/sys/fs/cgroup", name, directory.label) for name in ("", "pids", "memory")]
    for group in groups:
        if (group.parent / "cgroup.procs").exists() and os.access(group.parent, os.W_OK):
            (group / "sandbox").mkdir(parents=True)
    there = [group for group in groups if group.exists()]
    assert there, "the control"
    assert sweep(place) == [str(dead)]
    assert str(dead) not in Path("/proc/self/mountinfo").read_text()
    assert [group for group in there if group.exists()] == []


@pytest.mark.parametrize(
    ("word", "named"),
    [("/t/a", True), ("/t/a/b", True), ("--root=/t/a/b", True), ("/t/ab", False), ("x/t/a", False), ("--log=/", False)],
)
def test_words_that_name_a_folder(word: str, named: bool) -> None:
    """The folder itself, what is below it, and an option's value; no other folder with the same beginning."""
    assert leftovers.names(word, Path("/t/a")) is named
