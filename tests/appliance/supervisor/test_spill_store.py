"""The store of sealed blocks: tiers, bounds, who gives way, and what a disk or an enemy does to files."""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from isolation.keys.errors import KeyringError
from isolation.keys.keyring import Keyring
from isolation.keys.seal import OVERHEAD_BYTES, Binding

SIZE = 1_000
SEALED = SIZE + OVERHEAD_BYTES


@pytest.fixture
def keyring(tmp_path: Path) -> Iterator[Keyring]:
    """A keyring of its own."""
    ring = Keyring(tmp_path / "keys", os.urandom(32))
    yield ring
    ring.close()


def name(tenant: str, number: int, epoch: bytes = b"epoch") -> Binding:
    """A block of a tenant."""
    return Binding(tenant, "00" * 32, number.to_bytes(16, "little"), epoch)


def content(number: int) -> bytes:
    """Bytes that tell which block they are of."""
    return number.to_bytes(4, "little") * (SIZE // 4)


def held(store: SpillStore, tenant: str, count: int) -> list[int]:
    """Which of a tenant's first blocks are there, each with its own content."""
    found = []
    for number in range(count):
        data = store.get(name(tenant, number))
        if data is not None:
            assert data == content(number)
            found.append(number)
    return found


def test_memory_first_then_the_disk_then_nothing(keyring: Keyring, tmp_path: Path) -> None:
    """With room for three in memory and four on a disk, of ten blocks the last seven are there; bytes are counted, and
    what is asked for is used last."""
    store = SpillStore(SpillLimits(3 * SEALED, 4 * SEALED, tmp_path / "spill"), keyring)
    for number in range(10):
        assert store.put(name("alpha", number), content(number))
    assert held(store, "alpha", 10) == [3, 4, 5, 6, 7, 8, 9]
    figures = store.figures
    assert (figures.memory_bytes, figures.disk_bytes) == (3 * SEALED, 4 * SEALED)
    assert (figures.kept, figures.evicted, figures.restored, figures.absent) == (10, 3, 7, 3)
    assert store.get(name("alpha", 3)) is not None
    store.put(name("alpha", 10), content(10))
    assert store.get(name("alpha", 3)) is not None and store.get(name("alpha", 4)) is None
    assert not store.put(name("alpha", 11), bytes(5 * SEALED))
    assert len(list((tmp_path / "spill").iterdir())) == 4
    store.close()
    assert not (tmp_path / "spill").exists()


def test_who_floods_a_tier_evicts_itself(keyring: Keyring, tmp_path: Path) -> None:
    """A tenant that holds less than an equal share of either tier loses nothing to one that writes without end."""
    store = SpillStore(SpillLimits(8 * SEALED, 8 * SEALED, tmp_path / "spill"), keyring)
    for number in range(4):
        store.put(name("victim", number), content(number))
    for number in range(200):
        store.put(name("flood", number), content(number))
    assert held(store, "victim", 4) == [0, 1, 2, 3]
    assert len(held(store, "flood", 200)) == 12
    store.close()


def test_a_name_holds_one_block_and_epochs_and_tenants_go_alone(keyring: Keyring) -> None:
    """A second block under a name takes the place of the first; what goes of an epoch or a tenant is that alone."""
    store = SpillStore(SpillLimits(1 << 20), keyring)
    for binding in (name("alpha", 0), name("alpha", 0, b"later"), name("beta", 0)):
        store.put(binding, content(1))
        store.put(binding, content(0))
    assert store.figures.memory_bytes == 3 * SEALED
    assert store.drop_epoch(b"later") == 1
    assert store.get(name("alpha", 0, b"later")) is None
    assert store.drop_tenant("alpha") == 1
    assert (held(store, "alpha", 1), held(store, "beta", 1)) == ([], [0])


def test_the_end_of_a_tenant_s_retention_looks_at_no_other_s_blocks(keyring: Keyring, tmp_path: Path) -> None:
    """A policy may take the retention of thousands in one reload, each of which is forgotten by itself. Control: the
    end of an engine's life looks at all of them."""

    class Untouched(OrderedDict[object, object]):
        def __iter__(self) -> Iterator[object]:
            raise AssertionError("another tenant's blocks were looked at")

    store = SpillStore(SpillLimits(3 * SEALED, 10 * SEALED, tmp_path / "spill"), keyring)
    for number in range(6):
        store.put(name(("alpha", "beta")[number % 2], number), content(number))
    for tier in (store._memory, store._disk):
        tier.objects["beta"] = Untouched(tier.objects["beta"])  # type: ignore[assignment]
    assert store.drop_tenant("alpha") == 3
    assert store.drop_tenant("gamma") == 0
    with pytest.raises(AssertionError, match="another"):
        store.drop_epoch(b"epoch")


def test_files_that_changed_are_rejected_and_gone(keyring: Keyring, tmp_path: Path) -> None:
    """Flipped, cut, grown, swapped, replayed and missing files: none is given back, each is forgotten and counted; the
    untouched one is given (control)."""
    store = SpillStore(SpillLimits(1, 1 << 20, tmp_path / "spill"), keyring)
    paths: list[Path] = []
    for number in range(7):
        before = set((tmp_path / "spill").iterdir())
        store.put(name("alpha", number), content(number))
        paths += set((tmp_path / "spill").iterdir()) - before
    data = [path.read_bytes() for path in paths]
    paths[0].write_bytes(data[0][:-1] + bytes([data[0][-1] ^ 1]))
    paths[1].write_bytes(data[1][: len(data[1]) // 2])
    paths[2].write_bytes(data[2] + b"x")
    paths[3].write_bytes(data[4])
    paths[4].write_bytes(data[3])
    paths[5].unlink()
    assert held(store, "alpha", 7) == [6]
    assert store.figures.rejected == 6
    assert [path for path in paths if path.exists()] == [paths[6]]
    store.put(name("alpha", 0), content(0))
    (fresh,) = set((tmp_path / "spill").iterdir()) - {paths[6]}
    fresh.write_bytes(data[0])  # What this name held before.
    assert held(store, "alpha", 1) == []
    store.close()


def test_a_disk_that_refuses_costs_blocks_and_nothing_else(keyring: Keyring, tmp_path: Path) -> None:
    """When files cannot be written the block is dropped and counted; so it is when the tenant's key cannot be had."""
    store = SpillStore(SpillLimits(SEALED, 1 << 20, tmp_path / "spill"), keyring)
    store.put(name("alpha", 0), content(0))
    (tmp_path / "spill").rmdir()
    store.put(name("alpha", 1), content(1))
    assert held(store, "alpha", 2) == [1]
    assert (store.figures.failed, store.figures.evicted) == (1, 1)
    (tmp_path / "keys" / "beta.kek").write_bytes(b"damaged")
    assert not store.put(name("beta", 0), content(0))
    assert not store.put(replace(name("alpha", 0), tenant="../x"), content(0))
    assert store.figures.failed == 3


def test_a_disk_that_fills_in_the_middle_of_a_block_is_no_tampering(keyring: Keyring, tmp_path: Path) -> None:
    """A block of which a part could be written is dropped, and its file with it: it is counted as the disk's failure,
    and nothing is called changed later."""
    store = SpillStore(SpillLimits(1, 1 << 20, tmp_path / "spill"), keyring)
    store.put(name("alpha", 0), content(0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SEALED // 2, before[1]))
    try:
        store.put(name("alpha", 1), content(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert held(store, "alpha", 2) == [0]
    assert (store.figures.failed, store.figures.rejected, store.figures.absent) == (1, 0, 1)
    assert len(list((tmp_path / "spill").iterdir())) == 1
    store.close()


def test_a_folder_that_others_use_as_well_keeps_what_is_theirs(keyring: Keyring, tmp_path: Path) -> None:
    """An operator who names a disk's mount point loses nothing on it when the appliance stops."""
    (tmp_path / "disk" / "models").mkdir(parents=True)
    (tmp_path / "disk" / "models" / "weights").write_text("theirs")
    store = SpillStore(SpillLimits(1, 1 << 20, tmp_path / "disk"), keyring)
    store.put(name("alpha", 0), content(0))
    store.close()
    assert [path.name for path in (tmp_path / "disk").rglob("*")] == ["models", "weights"]


def test_an_earlier_runs_files_are_removed_and_a_shred_leaves_none(keyring: Keyring, tmp_path: Path) -> None:
    """Sealed files that a killed run left are gone at the next start, other files stay; after a shred no file of the
    tenant is left, and its old files, put back, are of no use."""
    folder = tmp_path / "spill"
    folder.mkdir()
    (folder / "00.kv").write_bytes(b"old")
    (folder / "note").write_text("mine")
    store = SpillStore(SpillLimits(1, 1 << 20, folder), keyring)
    assert [path.name for path in folder.iterdir()] == ["note"]
    store.put(name("alpha", 0), content(0))
    store.put(name("beta", 0), content(0))
    copies = {path: path.read_bytes() for path in folder.glob("*.kv")}
    assert store.shred("alpha") == 1
    assert len(list(folder.glob("*.kv"))) == 1
    for path, data in copies.items():
        path.write_bytes(data)
    assert (held(store, "alpha", 1), held(store, "beta", 1)) == ([], [0])
    with pytest.raises(KeyringError):
        store.shred("../alpha")
