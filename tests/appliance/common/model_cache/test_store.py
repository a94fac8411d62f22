"""The cache on disk: what leaves for what, locks, and what a crash leaves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.common.errors import ModelCacheError
from appliance.common.model_cache.eviction import Occupant, choose_evictions
from appliance.common.model_cache.manifest import ModelManifest
from appliance.common.model_cache.store import ModelCache, Notes
from tests.appliance.fetch.sample import make_model, manifest_of

KEY = "a" * 64


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    """An empty cache."""
    cache = ModelCache(tmp_path / "cache")
    cache.prepare()
    return cache


def put(cache: ModelCache, source: Path, key: str = KEY) -> ModelManifest:
    """Put a model into the cache as a pull does, less the downloading."""
    manifest = manifest_of(source)
    with cache.pulling(key) as folder:
        assert folder is not None
        cache.make_room(key, "here", manifest.size, 0, frozenset())
        for file in manifest.files:
            (folder / "files").mkdir(exist_ok=True)
            shutil.copy(source / file.name, folder / "files" / file.name)
        cache.commit(key, manifest, Notes("m", "here", 1.0, 1.0))
    return manifest


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9), st.booleans()), max_size=8), st.integers(-10, 400))
def test_what_leaves_is_enough_and_no_more(sizes: list[tuple[int, int, bool]], excess: int) -> None:
    """The oldest that may leave go, until it is enough; nothing that is kept goes; refused only if all would not do."""
    all_of_them = [Occupant(str(n), size, used, kept) for n, (size, used, kept) in enumerate(sizes)]
    free = [one for one in all_of_them if not one.kept]
    chosen = choose_evictions(all_of_them, excess)
    if chosen is None:
        assert sum(one.size for one in free) < excess
        return
    gone = [one for one in all_of_them if one.key in chosen]
    assert not any(one.kept for one in gone)
    assert sum(one.size for one in gone) >= excess or excess <= 0
    if gone:
        last = max(gone, key=lambda one: (one.used, one.key))
        assert sum(one.size for one in gone) - last.size < excess
        assert all((one.used, one.key) >= (last.used, last.key) for one in free if one not in gone and one.size)


def test_a_model_is_there_whole_or_not_at_all(cache: ModelCache, tmp_path: Path) -> None:
    """Nothing is among the models before the commit; afterwards it is found, readable for all, and its part is gone."""
    digest = make_model(tmp_path / "m", (100,))
    with cache.pulling(digest) as folder:
        assert folder is not None
        cache.make_room(digest, "here", 100, 0, frozenset())
        assert cache.models() == ()
        assert [(one.key, one.running) for one in cache.partials()] == [(digest, True)]
    assert [(one.key, one.running) for one in cache.partials()] == [(digest, False)]
    put(cache, tmp_path / "m", digest)
    (model,) = cache.models()
    assert (model.digest, model.notes.name, cache.partials()) == (digest, "m", ())
    assert {path.stat().st_mode & 0o777 for path in model.folder.iterdir()} == {0o644}
    assert cache.find(digest[:6]) == cache.find("m") == model
    assert list((cache.folder / "locks").iterdir()) == []


def test_a_part_is_held_by_one_pull(cache: ModelCache, tmp_path: Path) -> None:
    """A second pull does not get it, nor does a removal; after the first has ended both do."""
    with cache.pulling(KEY) as first, cache.pulling(KEY) as second:
        assert (first is None, second is None) == (False, True)
        with pytest.raises(ModelCacheError, match="is being pulled"):
            cache.remove(KEY)
    with cache.pulling(KEY) as third:
        assert third is not None
    cache.remove(KEY)
    assert cache.partials() == ()


def test_a_crash_leaves_nothing_that_is_taken_for_a_model(cache: ModelCache, tmp_path: Path) -> None:
    """Spoilt notes cost the name; a folder without a manifest is broken and can be removed; trash goes with the next
    change."""
    digest = make_model(tmp_path / "m", (100,))
    put(cache, tmp_path / "m", digest)
    (cache.folder / "notes" / f"{digest}.json").write_text("{")
    assert cache.find(digest).notes == Notes()
    half = cache.folder / "models" / KEY
    half.mkdir()
    assert [bool(one.problem) for one in cache.models()] == [one.digest == KEY for one in cache.models()]
    assert not cache.has(KEY)
    (cache.folder / "trash" / "left").mkdir()
    cache.remove(KEY)
    assert [one.digest for one in cache.models()] == [digest]
    assert list((cache.folder / "trash").iterdir()) == []


def test_a_disk_without_room_refuses_before_anything_is_written(cache: ModelCache) -> None:
    """A model of more bytes than the disk has is refused in words; no part and no model has changed."""
    disk = os.statvfs(cache.folder)
    with cache.pulling(KEY), pytest.raises(ModelCacheError, match="too few are free"):
        cache.make_room(KEY, "here", disk.f_blocks * disk.f_frsize * 2, 0, frozenset())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_folder_of_another_user_is_refused(cache: ModelCache) -> None:
    """Root would leave files there that the downloader's user cannot change."""
    os.chown(cache.folder, 65_534, 65_534)
    with pytest.raises(ModelCacheError, match=r"start athanor-fetch\.service"):
        cache.prepare()
