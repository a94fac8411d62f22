"""Folders with quantised matrices: what the engine reads is what was rounded, and equal sources give equal bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.convert import quantise as program
from engine.convert.compare import distributions
from engine.convert.compress import CODED, rewrite
from engine.convert.quantise import CONFIG, FORMS, GROUP, INDEX, pack, quantise, rewrite_json
from engine.errors import ModelLoadError
from engine.model.checkpoint.registry import load_model_config
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.checkpoint.weights import load_model
from engine.model.coded.codec import NumpyCodec
from tests.short_model import short_model

WEIGHTS = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj"


def quantised(source: Path, target: Path, form: str) -> dict[str, Any]:
    """Quantise one weight file in this process."""
    output = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        with SafetensorsFile(source, NumpyCodec) as file:
            return quantise(file, output, FORMS[form])
    finally:
        os.close(output)


def described(source: Path, target: Path, form: str) -> dict[str, Any]:
    """Rewrite a description in this process; gives what was written."""
    fd, output = os.open(source, os.O_RDONLY), os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        rewrite_json(fd, output, source.name, form)
    finally:
        os.close(fd)
        os.close(output)
    return json.loads(target.read_text())


def folder_of(source: Path, folder: Path, form: str) -> Path:
    """A quantised model folder."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(WEIGHTS, CONFIG))
    quantised(source / WEIGHTS, folder / WEIGHTS, form)
    described(source / CONFIG, folder / CONFIG, form)
    return folder


def meant(file: Path, module: str, bits: int, group: int) -> NDArray[np.float32]:
    """What packed tensors mean, by the page: read without the engine's code."""
    with safe_open(file, "pt") as tensors:
        words = tensors.get_tensor(f"{module}.weight_packed").numpy().view(np.uint32)
        outputs, inputs = tensors.get_tensor(f"{module}.weight_shape").tolist()
        scale = tensors.get_tensor(f"{module}.weight_scale").float().numpy()
    found = np.empty((outputs, inputs), np.float32)
    for place in range(inputs):
        word, lane = divmod(place, 32 // bits)
        number = (words[:, word] >> np.uint32(bits * lane)) & np.uint32((1 << bits) - 1)
        found[:, place] = (number.astype(np.int64) - (1 << (bits - 1))) * scale[:, place // group if group else 0]
    return found


def spelt_out(source: Path, packed: Path, folder: Path, form: str) -> Path:
    """A folder with plain float32 matrices that are what the packed ones mean."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(WEIGHTS))
    tensors = {name: one.float() for name, one in load_file(packed / WEIGHTS).items() if ".weight_" not in name}
    modules = [name.removesuffix(".weight_packed") for name in load_file(packed / WEIGHTS) if name.endswith("_packed")]
    group = FORMS[form].group
    for module in modules:
        numbers = meant(packed / WEIGHTS, module, FORMS[form].bits, group)
        tensors[f"{module}.weight"] = torch.from_numpy(numbers)
    save_file(tensors, folder / WEIGHTS)
    return folder


@torch.inference_mode()
def log_probabilities(folder: Path) -> torch.Tensor:
    """Of the model as the engine loads it, in float32, behind a row of tokens."""
    config = load_model_config(str(folder))
    model = load_model(str(folder), config, dtype="float32", device=torch.device("cpu"))
    ids = torch.arange(7, 71)
    return torch.cat(list(distributions(model, ids, 64, lambda _: None)))


@pytest.mark.parametrize("form", FORMS)
def test_the_engine_reads_what_was_rounded(form: str, tmp_path: Path) -> None:
    """The loaded model gives the bits of one whose plain matrices are what the packed tensors mean by the page. Every
    number is near the source's: within half a step (int8), or 1.5 steps where a group's largest was cut (int4). What is
    not packed has its bits. Control: the source itself gives others."""
    source = short_model()
    folder = folder_of(source, tmp_path / "made", form)
    found = log_probabilities(folder)
    assert torch.equal(found, log_probabilities(spelt_out(source, folder, tmp_path / "plain", form)))
    assert not torch.equal(found, log_probabilities(source))
    before, here = load_file(source / WEIGHTS), load_file(folder / WEIGHTS)
    changed = np.abs(meant(folder / WEIGHTS, DOWN, FORMS[form].bits, FORMS[form].group) - floats(before, DOWN))
    scale = here[f"{DOWN}.weight_scale"].float().numpy()
    steps = np.repeat(scale, FORMS[form].group, 1) if FORMS[form].group else scale
    assert (changed <= (0.5001 if form == "int8" else 1.5) * steps).all()
    kept = set(before) & set(here)
    assert len(kept) == 4
    assert all(torch.equal(before[name], here[name]) for name in kept)


def floats(tensors: dict[str, torch.Tensor], module: str) -> NDArray[np.float32]:
    """A plain matrix as numbers."""
    return tensors[f"{module}.weight"].float().numpy()


@pytest.mark.parametrize("form", FORMS)
def test_equal_sources_give_equal_bytes(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again, in slabs of another size, and from compressed weights: the same file. Control: the other form differs."""
    source = tmp_path / "source"
    whole = load_file(short_model() / WEIGHTS)
    # A matrix of several slabs and of chunks of the codec that end within a row, one of few, and what is not packed.
    some = {f"{DOWN}.weight": whole[f"{DOWN}.weight"][:50].contiguous()}
    some |= {name: one for name, one in whole.items() if name.endswith(("k_proj.weight", "layernorm.weight"))}
    save_file(some, source)
    quantised(source, tmp_path / "one", form)
    monkeypatch.setattr(program, "STAGING_NUMBERS", 3_000)
    quantised(source, tmp_path / "two", form)
    output = os.open(tmp_path / "coded", os.O_RDWR | os.O_CREAT, 0o644)
    with SafetensorsFile(source, NumpyCodec) as file:
        rewrite(file, output, CODED, NumpyCodec())
    os.close(output)
    quantised(tmp_path / "coded", tmp_path / "three", form)
    one = (tmp_path / "one").read_bytes()
    assert (tmp_path / "two").read_bytes() == one
    assert (tmp_path / "three").read_bytes() == one
    quantised(source, tmp_path / "other", "int4" if form == "int8" else "int8")
    assert (tmp_path / "other").read_bytes() != one


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_all_numbers_that_a_matrix_may_have(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Zeros, numbers near the largest and denormals of a dtype, rows that end within a group: rounded to what is near,
    and finite; zeros stay zeros. A matrix that has integers with a scale keeps them."""
    largest, least = torch.finfo(dtype).max / 4, torch.finfo(dtype).smallest_normal / 4
    rows = torch.zeros(6, GROUP + 13)
    rows[1], rows[2, ::2], rows[3] = largest, -largest, least
    rows[4] = torch.linspace(-1, 1, GROUP + 13)
    rows[5] = (torch.arange(GROUP + 13) % 15 - 7) * 0.25
    save_file({"a.q_proj.weight": rows.to(dtype)}, tmp_path / "source")
    quantised(tmp_path / "source", tmp_path / "made", form)
    found = torch.from_numpy(meant(tmp_path / "made", "a.q_proj", FORMS[form].bits, FORMS[form].group))
    plain = rows.to(dtype).float()
    assert torch.isfinite(found).all()
    assert not found[0].any()
    for row in (1, 2, 4):
        assert (found[row] - plain[row]).abs().max() <= plain[row].abs().max() * (0.005 if form == "int8" else 0.12)
    assert found[3].abs().max() <= 2 * plain[3].abs().max()
    exact = pack(rows[5:].numpy(), FORMS["int4"])
    assert exact[2] == 0.0


def test_an_index_names_what_is_there(tmp_path: Path) -> None:
    """The rewritten index maps exactly the tensors of the packed files, to the files that have them."""
    source = load_file(short_model() / WEIGHTS)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(source, "a")}))
    quantised(short_model() / WEIGHTS, tmp_path / "made", "int4")
    with safe_open(tmp_path / "made", "pt") as made:
        names = set(made.keys())
    assert described(tmp_path / INDEX, tmp_path / "index", "int4")["weight_map"] == dict.fromkeys(names, "a")


def test_what_is_refused(tmp_path: Path) -> None:
    """A number that is not finite, a projection that is no matrix of floats, names that packed tensors would take,
    descriptions that are packed already or malformed: a sentence with the name."""
    good = torch.ones(4, 8)
    for tensors, message in (
        ({"a.q_proj.weight": torch.full((4, 8), torch.nan)}, "'a.q_proj.weight' holds a number that is not finite"),
        ({"a.q_proj.weight": torch.full((4, 8), -torch.inf)}, "not finite"),
        ({"a.q_proj.weight": torch.ones(2, 4, 8)}, r"dtype F32 and shape \[2, 4, 8\]"),
        ({"a.q_proj.weight": torch.ones(4, 8, dtype=torch.int8)}, "dtype I8"),
        ({"a.q_proj.weight": good, "a.q_proj.weight_scale": torch.ones(3)}, "under the names that packed ones get"),
    ):
        save_file(tensors, tmp_path / "source")
        with pytest.raises(ModelLoadError, match=message):
            quantised(tmp_path / "source", tmp_path / "made", "int4")
    for name, text, message in (
        (CONFIG, '{"quantization_config": {}}', "packed already"),
        (CONFIG, '{"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}', "packed already"),
        (CONFIG, "[]", "is not a JSON object"),
        (CONFIG, "{", "not well-formed"),
        (INDEX, '{"weight_map": {"a": 1}}', "not a JSON object of file names"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ModelLoadError, match=message):
            described(tmp_path / name, tmp_path / "made", "int4")


def test_the_program_locks_itself_down_before_it_reads(tmp_path: Path) -> None:
    """The program's order, in its own process: the filter is there when the first byte is read."""
    code = (
        "import os, sys\n"
        "import engine.convert.quantise as program\n"
        "def look(path, open_codec, fd):\n"
        "    os.preadv(fd, [bytearray(4)], 0)\n"
        "    os.open('/etc/passwd', os.O_RDONLY)\n"
        "program.SafetensorsFile = look\n"
        "sys.exit(program.main(sys.argv[1:]))\n"
    )
    arguments = [str(short_model() / WEIGHTS), str(tmp_path / "out"), "int4", ""]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False)
    assert done.returncode == -signal.SIGSYS
