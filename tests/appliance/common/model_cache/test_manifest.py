"""Manifests from strangers: what is read, what is refused, and the digest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.common.catalog import read_model
from appliance.common.errors import ModelSourceError
from appliance.common.model_cache import manifest as manifests
from appliance.common.model_cache.manifest import ManifestFile, ModelManifest, choose_files, is_name, read_manifest

SHA = "0" * 64
NEEDED = [{"name": name, "size": 1, "sha256": SHA} for name in ("config.json", "tokenizer.json", "a.safetensors")]


def text(*more: object, version: object = 1) -> bytes:
    """A manifest of what every model has, and more."""
    return json.dumps({"version": version, "files": [*NEEDED, *more]}).encode()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """A manifest is read as it was written, without files that no sandbox gets, and its digest is the catalog's."""
    for name, data in (
        ("config.json", b"{}"),
        ("tokenizer.json", b"[]"),
        ("b.safetensors", b"b"),
        ("a.safetensors", b""),
    ):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text("{}")
    found = read_model("m", tmp_path)
    files = tuple(
        ManifestFile(str(one.path.relative_to(tmp_path)), one.identity[2], one.digest.hex()) for one in found.hashed
    )
    written = ModelManifest(files)
    assert written.digest == found.digest
    assert read_manifest(written.text(), "here") == written
    values = json.loads(written.text())
    values["files"].append({"name": "README.md", "size": 3, "sha256": SHA})
    assert read_manifest(json.dumps(values).encode(), "here") == written


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/../b", ".hidden", "a//b", "", "a\\..\\b", "a\nb", "x" * 300, "./a", "a/", "%2e%2e/\x00"],
)
def test_names_that_leave_the_folder_are_refused(name: str) -> None:
    """With the whole manifest; control: a plain name is none of them."""
    with pytest.raises(ModelSourceError, match="do not use this source"):
        read_manifest(text({"name": name, "size": 1, "sha256": SHA}), "there")
    assert is_name("1_Pooling/config.json")


@given(st.text())
def test_a_name_never_leaves_its_folder(name: str) -> None:
    """What counts as a name stays below a folder, whatever it is joined to."""
    if is_name(name):
        assert (Path("/cache") / name).resolve().is_relative_to("/cache")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (b"[" * 100, "not JSON"),
        (b'{"version": 1, "version": 1}', "twice"),
        (text(version=2), "no manifest of version 1"),
        (text({"name": "b.safetensors", "size": -1, "sha256": SHA}), "has -1 bytes"),
        (text({"name": "b.safetensors", "size": 1 << 41, "sha256": SHA}), "are the most"),
        (text({"name": "b.safetensors", "size": True, "sha256": SHA}), "name, size and sha256"),
        (text({"name": "b.safetensors", "size": 1, "sha256": "0"}), "name, size and sha256"),
        (text({"name": "a.safetensors", "size": 1, "sha256": SHA}), "listed twice"),
        (
            text(*({"name": f"{n}.safetensors", "size": 1, "sha256": SHA} for n in range(1_024))),
            "more than 1024 weight",
        ),
        (text(*({"name": f"{n}.txt", "size": 1, "sha256": SHA} for n in range(2_048))), "more than 2048 files"),
        (json.dumps({"version": 1, "files": NEEDED[:2]}).encode(), r"no \*\.safetensors there"),
        (json.dumps({"version": 1, "files": NEEDED[1:]}).encode(), "no config.json there"),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes, said: str) -> None:
    """With what is wrong."""
    with pytest.raises(ModelSourceError, match=said):
        read_manifest(data, "there")


def test_a_model_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sum of its files; one byte less is taken."""
    files = [ManifestFile(str(one["name"]), 10, SHA) for one in NEEDED]
    monkeypatch.setattr(manifests, "MAX_MODEL_BYTES", 29)
    with pytest.raises(ModelSourceError, match="the model has 30 bytes"):
        choose_files(files, "there")
    monkeypatch.setattr(manifests, "MAX_MODEL_BYTES", 30)
    assert choose_files(files, "there").size == 30
