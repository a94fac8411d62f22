"""Folders that look like models: the host reads names and bytes, and no more."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from appliance.common.catalog import read_model
from appliance.common.model_cache.manifest import MANIFEST, ManifestFile, ModelManifest, served_names


def make_model(folder: Path, sizes: tuple[int, ...], seed: int = 0) -> str:
    """Write a model with weight files of these sizes, and its manifest; gives its digest."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(f'{{"seed": {seed}}}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("not for a sandbox")
    for number, size in enumerate(sizes):
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            for start in range(0, size, 1 << 24):
                file.write(draw.randbytes(min(1 << 24, size - start)))
    manifest = manifest_of(folder)
    (folder / MANIFEST).write_bytes(manifest.text())
    digest = read_model("sample", folder).digest
    assert digest == manifest.digest
    return digest


def manifest_of(folder: Path) -> ModelManifest:
    """The manifest of a folder."""
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return ModelManifest(tuple(_entry(folder / name, name) for name in served_names(there)))


def _entry(path: Path, name: str) -> ManifestFile:
    with path.open("rb") as file:
        return ManifestFile(name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
