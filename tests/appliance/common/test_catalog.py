"""Models on disk: which file goes where, and a digest that notices every change."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.common.catalog import embedded_model, read_model
from appliance.common.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that looks like a model."""
    for name in ("config.json", "tokenizer.json", "model.safetensors", "README.md"):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(0o644)
    return tmp_path


def test_each_room_sees_its_own_files(folder: Path) -> None:
    """Weights and configuration to the engine, the tokenizer to the text sandbox, nothing else to either."""
    files = read_model("m", folder)
    assert [name for name, _ in files.engine] == ["config.json", "model.safetensors"]
    assert [name for name, _ in files.text] == ["tokenizer.json"]


def test_a_file_of_llama_cpp_s_is_told_how_it_becomes_a_model(tmp_path: Path) -> None:
    """GGUF is named as what it is, with the command that converts it: the file itself, and a folder of such files."""
    packed = tmp_path / "llama.gguf"
    packed.write_bytes(b"GGUF")
    for place in (packed, tmp_path):
        with pytest.raises(ConfigError, match=f"; athanor model convert {packed} DIR"):
            read_model("m", place)


def test_the_digest_names_the_content(folder: Path) -> None:
    """A flipped byte or a renamed shard changes it; a foreign file does not."""
    before = read_model("m", folder).digest
    (folder / "README.md").write_text("changed")
    assert read_model("m", folder).digest == before
    (folder / "model.safetensors").write_text("Model.safetensors")
    after = read_model("m", folder).digest
    assert after != before
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert read_model("m", folder).digest not in (before, after)


def test_links_are_followed_as_hub_caches_need(folder: Path) -> None:
    """A file that is a link is given by its real path."""
    (folder / "model.safetensors").rename(folder / "blob")
    (folder / "model.safetensors").symlink_to("blob")
    assert dict(read_model("m", folder).engine)["model.safetensors"] == folder / "blob"


def test_a_snapshot_of_the_hubs_cache_is_followed_to_its_blobs(folder: Path, tmp_path: Path) -> None:
    """The cache's layout: snapshots/REVISION holds links into blobs beside snapshots."""
    snapshot = tmp_path / "snapshots" / "abc"
    blobs = tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).rename(blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert dict(read_model("m", snapshot).engine)["config.json"] == blobs / "config.json"


def test_a_link_out_of_the_models_folder_is_refused(folder: Path) -> None:
    """A model from strangers cannot show a sandbox a file of the host's by a link."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="link out of the model's folder"):
        read_model("m", folder)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, missing: str) -> None:
    """The error says what is missing where."""
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match="safetensors" if "safetensors" in missing else missing):
        read_model("m", folder)


def test_a_file_the_sandbox_could_not_read_is_named_with_its_mend(folder: Path) -> None:
    """Permissions are checked before a boot would fail on them."""
    (folder / "config.json").chmod(0o600)
    with pytest.raises(ConfigError, match="chmod o\\+r"):
        read_model("m", folder)


def test_the_embedded_model_is_there() -> None:
    """The project's own model is found and whole."""
    files = read_model("athanor-mini", embedded_model())
    assert "model.safetensors" in dict(files.engine)
