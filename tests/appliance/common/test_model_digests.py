"""Digests of model files that are remembered: what is believed, what is read again, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from appliance.common.catalog import check_files, read_model
from appliance.common.errors import ConfigError, ModelDigestError
from appliance.common.model_digests import DigestCache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that looks like a model."""
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text(name)
        (folder / name).chmod(0o644)
    return folder


def test_an_unchanged_file_is_not_read_again(folder: Path, tmp_path: Path) -> None:
    """A second start reads nothing and has the same digest; without a cache, or after a touch, all or one is read."""
    first = DigestCache.load(tmp_path / "digests")
    digest = read_model("m", folder, first).digest
    first.save()
    assert first.num_read == 3
    second = DigestCache.load(tmp_path / "digests")
    assert read_model("m", folder, second).digest == digest
    assert second.num_read == 0
    (folder / "config.json").touch()
    third = DigestCache.load(tmp_path / "digests")
    assert read_model("m", folder, third).digest == digest
    assert third.num_read == 1


def test_putting_the_times_back_does_not_help(folder: Path, tmp_path: Path) -> None:
    """A byte of another value under the old size and time of content is noticed by a start and by a boot."""
    cache = DigestCache(tmp_path / "digests")
    files = read_model("m", folder, cache)
    cache.save()
    weights = folder / "model.safetensors"
    before = weights.stat()
    weights.write_text("Model.safetensors")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_model("m", folder, DigestCache.load(tmp_path / "digests")).digest != files.digest
    with pytest.raises(ModelDigestError, match="is not what it was at the start"):
        check_files(files, files.digest)


def test_pinned_is_pinned(folder: Path) -> None:
    """Another digest is refused with both and with what to do; the right one and none at all pass."""
    files = read_model("m", folder)
    with pytest.raises(ModelDigestError, match=rf"{files.digest}, the configuration pins 0{{64}}; .*model digest"):
        check_files(files, "0" * 64)
    check_files(files, files.digest)
    check_files(files, "")


def test_a_file_that_was_only_touched_passes(folder: Path) -> None:
    """Other times and the same content are the same model; a file that is gone is an error that names it."""
    files = read_model("m", folder)
    (folder / "config.json").write_text("config.json")
    check_files(files, files.digest)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        check_files(files, files.digest)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version": 2, "files": []}',
        b'{"version": 1, "files": [[1]]}',
        b"\xff",
        b'{"version": 1, "files": [[1, 2, 3, 4, 5, "00"]]}',
    ],
)
def test_a_damaged_cache_is_not_used(folder: Path, tmp_path: Path, content: bytes) -> None:
    """Whatever lies there, files are read."""
    (tmp_path / "digests").write_bytes(content)
    cache = DigestCache.load(tmp_path / "digests")
    read_model("m", folder, cache)
    assert cache.num_read == 3


def test_a_cache_that_others_may_write_is_not_believed(folder: Path, tmp_path: Path) -> None:
    """Digests that somebody else could have put there pin nothing: the files are read; a private one is believed."""
    cache = DigestCache(tmp_path / "digests")
    honest = read_model("m", folder, cache).digest
    cache.save()
    assert (tmp_path / "digests").stat().st_mode & 0o777 == 0o600
    values = json.loads((tmp_path / "digests").read_text())
    for row in values["files"]:
        row[-1] = "ab" * 32
    (tmp_path / "digests").write_text(json.dumps(values))
    assert read_model("m", folder, DigestCache.load(tmp_path / "digests")).digest != honest
    (tmp_path / "digests").chmod(0o622)
    assert read_model("m", folder, DigestCache.load(tmp_path / "digests")).digest == honest
