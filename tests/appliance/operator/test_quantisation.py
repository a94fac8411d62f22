"""``athanor model convert --quantise`` and ``athanor model compare``: what they say and leave, and what they refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from appliance.common.catalog import read_model
from appliance.common.errors import ConfigError
from appliance.operator import conversion_child
from appliance.operator.comparison import compare
from appliance.operator.quantisation import quantise
from tests.appliance.operator.cli.conftest import Run, run  # noqa: F401 - a fixture
from tests.appliance.operator.test_compression import WEIGHTS, shards, tell_nobody
from tests.short_model import TENSORS, short_model


def test_a_folder_that_can_be_served_and_what_it_costs(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """Sizes and errors by class are printed; the catalog takes the folder; beside its source it diverges a little on a
    text. A compressed folder beside its source does not. Nothing else is left."""
    folder, small = tmp_path / "models" / "mini", tmp_path / "models" / "small"
    result = run("model", "convert", str(short_model()), str(folder), "--quantise", "int8", columns=120)
    assert result.exit_code == 0, result.output
    assert "7 of 11 tensors in int8, 5.3 MiB in 4.2 MiB (0.783)" in result.stdout
    assert "0.74 %" in result.stdout
    assert {name for name, _ in read_model("mini", folder).engine} == {"config.json", "generation_config.json", WEIGHTS}
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    assert run("model", "convert", str(short_model()), str(small), "--compress").exit_code == 0
    assert {one.name for one in folder.parent.iterdir()} == {"mini", "small"}
    text = tmp_path / "text"
    text.write_text("How do I add a tenant? Write it into policy.yaml, then run athanor reload. " * 5)
    words = ("--text", str(text), "--tokens", "64")
    compared = json.loads(run("model", "compare", str(short_model()), str(folder), *words, "-o", "json").stdout)
    assert 0 < compared["divergence"] < 0.05
    assert compared["agreement"] > 0.9
    same = run("model", "compare", str(short_model()), str(small), *words, columns=120)
    assert "divergence  0.0000 nats a token" in same.stdout, same.output
    assert "agreement   100.0 % of tokens" in same.stdout
    assert "(+0.00 %)" in same.stdout


def test_two_files_and_their_index(tmp_path: Path) -> None:
    """A folder of two weight files becomes one of two, with an index of its tensors; again: the same bytes. Progress
    goes over all files and never falls."""
    told: list[tuple[int, int]] = []
    source = shards(tmp_path / "plain")
    done = quantise(source, tmp_path / "one", form="int4", progress=lambda *one: told.append(one))
    quantise(source, tmp_path / "two", form="int4", progress=tell_nobody)
    assert (done.files, done.tensors, done.packed) == (2, TENSORS, 7)
    assert read_model("x", tmp_path / "one").digest == read_model("x", tmp_path / "two").digest
    index = json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(index) == TENSORS + 2 * 7
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


def test_refusals(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """Quantised twice, two directions at once, an unknown form, no text: code 1, a sentence, nothing left."""
    packed = tmp_path / "packed"
    quantise(short_model(), packed, form="int4", progress=tell_nobody)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    before = sorted(tmp_path.iterdir())
    for source, options, message in (
        (packed, ("--quantise", "int8"), "packed already"),
        (packed, ("--quantise", "int8", "--compress"), "exclude each other"),
        (packed, ("--quantise", "int3"), "takes one of: int8, int4"),
        (tmp_path / "a.gguf", ("--quantise", "int8"), "convert a GGUF file first"),
    ):
        result = run("model", "convert", str(source), str(tmp_path / "made"), *options, columns=300)
        assert (result.exit_code, result.stdout) == (1, ""), options
        assert message in result.stderr
    result = run("model", "compare", str(packed), str(packed), "--text", str(tmp_path / "none"), columns=300)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is not a file" in result.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.full
def test_a_gguf_file_of_a_folder(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """The file is told and converts back to a folder with the same tensors; one that is there is not replaced, and what
    is no folder is refused; nothing else is left."""
    made = tmp_path / "made" / "mini.gguf"
    result = run("model", "convert", str(short_model()), str(made), "--to-gguf", columns=160)
    assert result.exit_code == 0, result.output
    assert "mini.gguf: llama, 11 tensors of BF16, F32 (5.3 MiB)" in result.stdout
    again = run("model", "convert", str(short_model()), str(made), "--to-gguf", columns=160)
    assert (again.exit_code, "exists; name another file" in again.stderr) == (1, True)
    other = run("model", "convert", str(made), str(tmp_path / "x.gguf"), "--to-gguf", columns=160)
    assert (other.exit_code, "takes a model folder" in other.stderr) == (1, True)
    assert run("model", "convert", str(made), str(tmp_path / "back")).exit_code == 0
    assert (tmp_path / "back" / "tokenizer.json").exists()
    assert [one.name for one in made.parent.iterdir()] == ["mini.gguf"]


@pytest.mark.parametrize("said", ["{}", "7", '{"classes": {"a": [1, 2, 3]}}', '{"classes": 4, "tokens": "x"}'])
def test_programs_that_misbehave_are_held_to_their_words(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A taken-over program reports values of other shapes: an error, and nothing is left."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nprint('done ' + {said!r})\n")
    script.chmod(0o755)
    monkeypatch.setattr(conversion_child.sys, "executable", str(script))
    with pytest.raises(ConfigError, match="without a word"):
        quantise(short_model(), tmp_path / "made", form="int8", progress=tell_nobody)
    with pytest.raises(ConfigError, match="without a word"):
        compare(short_model(), short_model(), script, tokens=9, dtype="float32", progress=tell_nobody)
    assert [one.name for one in tmp_path.iterdir()] == ["python"]
