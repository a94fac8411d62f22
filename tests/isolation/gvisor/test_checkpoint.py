"""The store of saved sandboxes: whole or not there, verified, bounded, nobody else's."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from isolation.errors import CheckpointError
from isolation.gvisor import checkpoint as checkpoint_module
from isolation.gvisor.checkpoint import ACCOUNT, SETTLED_NS, CheckpointStore, Label, ListedFolders, contents, open_store
from isolation.gvisor.spec import Limits, Mount, Rootfs, SandboxSpec

OTHER = "f" * 64
KEY = "a" * 64


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """An empty store."""
    return open_store(tmp_path / "store")


def save(store: CheckpointStore, key: str = KEY, content: bytes = b"pages" * 100) -> None:
    """Put a checkpoint of two files into it."""
    with store.draft() as draft:
        (draft / "pages.img").write_bytes(content)
        (draft / "checkpoint.img").write_bytes(b"state")
        store.keep(draft, key, 2.5)


def names(store: CheckpointStore) -> list[str]:
    """What lies in it."""
    return sorted(os.listdir(store.root))


def test_what_was_kept_is_found_and_whole(store: CheckpointStore) -> None:
    """A kept checkpoint has its files, its sizes and how long a cold start took; a key that nobody kept has none."""
    assert store.find(KEY) is None
    save(store)
    found = store.find(KEY)
    assert found is not None
    assert (found.cold_s, found.size) == (2.5, 505)
    found.verify()
    assert names(store) == [KEY]


@pytest.mark.parametrize("harm", ["flip", "cut", "grow", "remove"])
def test_damage_is_found(store: CheckpointStore, harm: str) -> None:
    """One changed bit, a byte fewer or more, or a file that is gone: each is an error before anything is used."""
    save(store)
    found = store.find(KEY)
    assert found is not None
    path = found.folder / "pages.img"
    data = path.read_bytes()
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes({"flip": bytes([data[0] ^ 1]) + data[1:], "cut": data[:-1], "grow": data + b"x"}[harm])
    with pytest.raises(CheckpointError, match=r"damaged|cannot be read"):
        found.verify()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"format":9}',
        '{"format":1,"key":"other","files":[],"cold_s":1}',
        f'{{"format":1,"key":"{KEY}","files":[["../x",1,"00"]],"cold_s":1}}',
        f'{{"format":1,"key":"{KEY}","files":[],"cold_s":1,"label":[]}}',
        f'{{"format":1,"key":"{KEY}","files":[],"cold_s":1,"label":{{"made_at":NaN}}}}',
        f'{{"format":1,"key":"{KEY}","files":[],"cold_s":1,"label":{{"made_with":["x"]}}}}',
    ],
)
def test_an_account_that_is_none_is_no_checkpoint(store: CheckpointStore, text: str) -> None:
    """A damaged account, one of another key, or one that names files elsewhere: the checkpoint is gone."""
    save(store)
    (store.root / KEY / ACCOUNT).write_text(text)
    assert store.find(KEY) is None
    assert names(store) == []


def test_what_is_told_of_them_is_kept(store: CheckpointStore, tmp_path: Path) -> None:
    """A label is found again, also where one lists all of them; an account without a label, as earlier releases wrote
    them, is a checkpoint too. Links, files and damaged accounts are not listed, and stay where they are."""
    label = Label("engine", "", "/run/x", 1_800_000_000.5, (("runsc", "20240729"),))
    with store.draft() as draft:
        (draft / "pages.img").write_bytes(b"pages")
        store.keep(draft, KEY, 2.5, label)
    save(store, OTHER)
    account = json.loads((store.root / OTHER / ACCOUNT).read_text())
    del account["label"]
    (store.root / OTHER / ACCOUNT).write_text(json.dumps(account))
    (store.root / "file").write_text("no folder")
    (store.root / "damaged").mkdir()
    (store.root / "damaged" / ACCOUNT).write_text("{")
    (store.root / "link").symlink_to(store.root / KEY)
    used = (store.root / KEY).stat().st_mtime_ns
    assert {one.key: one.label for one in store.kept()} == {KEY: label, OTHER: Label()}
    assert (store.root / KEY).stat().st_mtime_ns == used, "to be listed is no use"
    found = store.find(KEY)
    assert found is not None and found.label == label
    assert set(names(store)) == {KEY, OTHER, "file", "damaged", "link"}


def test_a_list_is_read_again_when_the_directory_has_changed(store: CheckpointStore) -> None:
    """Accounts are read once as long as no checkpoint comes or goes; a directory that changed a moment ago is read each
    time, since its time may not show the next change. The list is right all the time."""
    save(store, KEY)
    account = store.root / KEY / ACCOUNT
    assert [one.key for one in store.kept()] == [KEY]
    kept = account.read_bytes()
    account.write_text("{")
    assert store.kept() == (), "the control: it is read"
    account.write_bytes(kept)
    os.utime(store.root, ns=(0, time.time_ns() - 2 * SETTLED_NS))
    assert [one.key for one in store.kept()] == [KEY]
    account.write_text("{")
    assert [one.key for one in store.kept()] == [KEY]
    account.write_bytes(kept)
    save(store, OTHER)
    assert {one.key for one in store.kept()} == {KEY, OTHER}
    store.drop(KEY)
    assert [one.key for one in store.kept()] == [OTHER]


def test_who_may_remove_one_that_nobody_uses() -> None:
    """Its maker may, and everybody what no label says anything of; a base where its role is known. Nobody else may."""
    here = Path("/run/here")
    cases = {
        Label(): True,
        Label("engine", "m", "/run/here"): True,
        Label("engine", "m", "/run/other"): False,
        Label("engine", "", "/run/here"): True,
        Label("text", "", "/run/here"): False,
    }
    assert {label: label.is_of(here, {"engine"}) for label in cases} == cases


def test_a_draft_that_fails_leaves_nothing(store: CheckpointStore) -> None:
    """Half of a checkpoint is never seen, and gone with the block that wrote it."""
    with pytest.raises(OSError, match="full"), store.draft() as draft:
        (draft / "pages.img").write_bytes(b"half")
        assert store.find(KEY) is None
        raise OSError("the disk is full")
    assert names(store) == []


def test_an_empty_draft_is_not_kept(store: CheckpointStore) -> None:
    """Nothing saved is no checkpoint."""
    with pytest.raises(CheckpointError, match="0 bytes"), store.draft() as draft:
        store.keep(draft, KEY, 1.0)
    assert names(store) == []


def test_a_full_disk_takes_no_checkpoint(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too little room nothing is begun."""
    monkeypatch.setattr(checkpoint_module, "LEAST_FREE_BYTES", 1 << 60)
    with pytest.raises(CheckpointError, match="are free"), store.draft():
        pass
    assert names(store) == []


def test_room_is_made_before_a_checkpoint_is_saved(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are told beforehand must be free beside the least, with what is evicted for them, and nothing is
    evicted where that is too little; it is gone before anything is written. Control: a small one that fits evicts
    none."""
    free = 2_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))
    monkeypatch.setattr(checkpoint_module, "LEAST_FREE_BYTES", 1_000)
    monkeypatch.setattr(checkpoint_module, "MAX_BYTES", 2_250)
    monkeypatch.setattr(checkpoint_module, "FREE_SHARE", 0.0)
    for count, key in enumerate(("1" * 64, "2" * 64)):
        save(store, key)
        os.utime(store.root / key, (count, count))
    with store.draft(400) as draft:
        assert names(store) == [draft.name, "1" * 64, "2" * 64]
    free = 500
    with pytest.raises(CheckpointError, match="are free"), store.draft(1_400):
        pass
    assert names(store) == ["1" * 64, "2" * 64]
    free = 1_800
    with store.draft(1_200) as draft:
        assert names(store) == [draft.name, "2" * 64], "1 is gone before anything is written"
    with pytest.raises(CheckpointError, match="are free"), store.draft(1_900):
        pass


def test_drafts_of_the_dead_are_cleared_and_of_the_living_not(store: CheckpointStore) -> None:
    """A supervisor that opens the store removes what a killed one was writing, and not what another one writes."""
    (store.root / ".draft-dead").mkdir()
    (store.root / ".trash-dead").mkdir()
    with store.draft() as draft:
        open_store(store.root)
        assert names(store) == [draft.name]


def test_old_ones_make_room(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number and by bytes the one used longest ago goes first."""
    monkeypatch.setattr(checkpoint_module, "MAX_KEPT", 2)
    for count, key in enumerate(("1" * 64, "2" * 64)):
        save(store, key)
        os.utime(store.root / key, (count, count))
    assert store.find("1" * 64) is not None  # used: now the younger
    save(store, "3" * 64)
    assert names(store) == ["1" * 64, "3" * 64]
    monkeypatch.setattr(checkpoint_module, "MAX_BYTES", 900)
    monkeypatch.setattr(checkpoint_module, "FREE_SHARE", 0.0)
    save(store, "4" * 64)
    assert names(store) == ["4" * 64]
    with pytest.raises(CheckpointError, match="is not kept"):
        save(store, "5" * 64, b"x" * 1_000)
    assert names(store) == ["4" * 64]


def test_a_disk_with_room_keeps_more_but_nothing_stale(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bytes that may be had in any case, half of the disk's room is for checkpoints that are used; one that
    was not used for long goes first. Control: below those bytes it stays."""
    monkeypatch.setattr(checkpoint_module, "MAX_BYTES", 2_000)
    monkeypatch.setattr(checkpoint_module, "LEAST_FREE_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=8_000))
    save(store, "1" * 64, b"x" * 900)
    os.utime(store.root / ("1" * 64), (0, 0))
    save(store, "2" * 64, b"x" * 700)
    assert names(store) == ["1" * 64, "2" * 64]
    save(store, "3" * 64, b"x" * 1_500)
    assert names(store) == ["2" * 64, "3" * 64]
    save(store, "4" * 64, b"x" * 1_500)
    assert names(store) == ["2" * 64, "3" * 64, "4" * 64]
    save(store, "5" * 64, b"x" * 1_900)
    assert names(store) == ["3" * 64, "4" * 64, "5" * 64]


def test_a_bound_that_was_told_holds_whatever_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk with much room those used longest ago go beyond the bytes told, and a checkpoint that alone has more is
    not begun, or not kept, with both figures in the message; nothing is evicted for it. Control: without a bound all
    are kept, up to the most that is taken unasked."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 40))
    for most, kept in ((2 << 20, ["2" * 64, "3" * 64]), (0, ["1" * 64, "2" * 64, "3" * 64])):
        store = open_store(tmp_path / f"store-{most}", most)
        for number in "123":
            save(store, number * 64, bytes(900 << 10))
        assert names(store) == kept
        if most:
            with pytest.raises(CheckpointError, match=r"of 3 MiB is not saved.*may have 2 MiB"), store.draft(3 << 20):
                pass
            with pytest.raises(CheckpointError, match=r"of 3 MiB is not saved.*may have 2 MiB"):
                save(store, "4" * 64, bytes((2 << 20) + 1))
            assert names(store) == kept
        assert store.bound() == (most or checkpoint_module.MOST_BYTES)


def test_a_bound_that_was_lowered_holds_from_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that opens with less than it has removes what was used longest ago, without a new checkpoint. Control:
    opened with the bound of before, or with none, it keeps all."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 40))
    store = open_store(tmp_path / "store", 3 << 20)
    for number in "123":
        save(store, number * 64, bytes(900 << 10))
    for most, kept in ((3 << 20, "123"), (0, "123"), (2 << 20, "23")):
        assert names(open_store(store.root, most)) == [number * 64 for number in kept]


def test_what_was_found_whole_is_known_until_it_changes_or_the_machine_starts(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note is of one state of the files and of one start of the machine: rewritten content, with its size and the
    time of content set back, is unknown, and so is everything after a start. Without a note nothing is known
    (control)."""
    save(store)
    found = store.find(KEY)
    assert found is not None
    stamp = found.stamp()
    assert stamp is not None
    assert not found.known_whole(stamp)
    found.note_whole(stamp)
    again = open_store(store.root).find(KEY)
    assert again is not None and again == found and again.known_whole(stamp)
    path = found.folder / "pages.img"
    before = path.stat()
    path.write_bytes(b"pagez" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = found.stamp()
    assert changed is not None and changed != stamp and not found.known_whole(changed)
    path.unlink()
    assert found.stamp() is None
    monkeypatch.setattr(checkpoint_module, "BOOT_ID", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text("another start\n")
    assert not found.known_whole(stamp)


def test_two_that_keep_the_same_keep_one(store: CheckpointStore) -> None:
    """Supervisors that share a store and make the same checkpoint at once do each other no harm."""
    with store.draft() as first, store.draft() as second:
        for draft in (first, second):
            (draft / "pages.img").write_bytes(b"x")
            store.keep(draft, KEY, 1.0)
    assert names(store) == [KEY]
    found = store.find(KEY)
    assert found is not None
    found.verify()
    store.drop(KEY)
    store.drop(KEY)
    assert names(store) == []


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """Who may write there would choose what sandboxes run; neither is a link followed."""
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o755)
    with pytest.raises(CheckpointError, match="not a private directory"):
        open_store(open_folder)
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match="not a private directory"):
        open_store(tmp_path / "link")


def test_contents_follow_every_file_but_byte_code_and_masks(tmp_path: Path) -> None:
    """A changed, new or replaced file changes the digest; compiled modules and what is hidden do not."""
    code = tmp_path / "code"
    (code / "__pycache__").mkdir(parents=True)
    (code / "hidden").mkdir()
    (code / "a.py").write_text("1")
    single = tmp_path / "b.so"
    single.write_text("x")
    rootfs = Rootfs("/opt/python", ("/code",), (Mount(code, "/code"), Mount(single, "/lib/b.so")), ("/code/hidden",))
    spec = SandboxSpec("x", ("/opt/python",), (), rootfs, (), Limits(1 << 30))
    seen = [contents(spec)]
    (code / "__pycache__" / "a.pyc").write_text("compiled")
    (code / "hidden" / "b.py").write_text("hidden")
    assert contents(spec) == seen[0]
    changes = [
        lambda: (code / "a.py").write_text("22"),
        lambda: (code / "new.py").write_text(""),
        lambda: os.utime(single, (1, 1)),
        lambda: (code / "a.py").chmod(0o600),
        lambda: (code / "new.py").rename(code / "renamed.py"),
    ]
    for change in changes:
        change()
        seen.append(contents(spec))
    assert len(set(seen)) == len(seen)
    single.unlink()
    with pytest.raises(FileNotFoundError):
        contents(replace(spec, name="y"))


def test_listed_folders_are_listed_again_when_one_below_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are added, removed, replaced by rename or put into a new folder below change the lines, as does each
    change of a single file; while nothing changes, no folder is listed (the control: the first time it is). What is
    written in place in a folder is noticed by another ``ListedFolders``."""
    code, below, single = tmp_path / "code", tmp_path / "code" / "below", tmp_path / "b.so"
    below.mkdir(parents=True)
    for path in (code / "a.py", below / "b.py", single):
        path.write_text("1")
    mounts = (Mount(code, "/code"), Mount(single, "/lib/b.so"))
    spec = SandboxSpec("x", ("/opt/python",), (), Rootfs("/opt/python", ("/code",), mounts, ()), (), Limits(1 << 30))
    looks: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (looks.append(path), scandir(path))[1])
    listed = ListedFolders()
    seen = [contents(spec, listed)]
    assert len(looks) == 2, "the control"
    assert contents(spec, listed) == seen[0] == contents(spec)
    assert len(looks) == 4, "two of them without what is listed"
    (tmp_path / "other").write_text("2")
    changes = [
        lambda: (below / "new.py").write_text(""),
        lambda: (below / "new.py").unlink(),
        lambda: (tmp_path / "other").rename(below / "b.py"),
        lambda: (below / "deeper").mkdir(),
        lambda: (below / "deeper" / "c.py").write_text("3"),
        lambda: os.utime(single, (1, 1)),
    ]
    for change in changes:
        change()
        seen.append(contents(spec, listed))
        assert seen[-1] == contents(spec)
    assert len(set(seen)) == len(seen) - 2, "what was added and removed, and an empty folder, leave nothing"
    (code / "a.py").write_text("22")
    assert contents(spec, listed) == seen[-1] != contents(spec, ListedFolders())


def test_what_is_no_checkpoint_is_left_alone(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator who names a folder with other things in it loses none of them when room is made, however large or old
    they are, and they count for nothing; control: the older checkpoint goes."""
    monkeypatch.setattr(checkpoint_module, "MAX_KEPT", 1)
    for name in ("audit", "keys"):
        (store.root / name).mkdir()
        (store.root / name / "file").write_bytes(bytes(1_000))
        os.utime(store.root / name, (0, 0))
    monkeypatch.setattr(checkpoint_module, "MAX_BYTES", 1_600)
    for key in (KEY, "b" * 64):
        save(store, key)
    assert names(store) == ["audit", "b" * 64, "keys"]
