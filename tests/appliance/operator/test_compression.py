"""``athanor model convert --compress`` and ``--expand``: what they say and leave, and what they refuse."""

from __future__ import annotations

import filecmp
import json
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance.common.catalog import read_model
from appliance.common.errors import ConfigError
from appliance.operator import conversion_child, kernels
from appliance.operator.compression import CODED, compress
from isolation.host.process import owned_children
from tests.appliance.operator.cli.conftest import Run, run  # noqa: F401 - a fixture
from tests.short_model import TENSORS, WEIGHT_BYTES, short_model

WEIGHTS = "model.safetensors"


def tell_nobody(_done: int, _total: int) -> None:
    """No progress."""


def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a weight file that a sandbox may read."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def shards(folder: Path) -> Path:
    """One layer of athanor-mini in two weight files with an index, with a file that no sandbox gets."""
    shutil.copytree(short_model(), folder, ignore=shutil.ignore_patterns(WEIGHTS))
    tensors = load_file(short_model() / WEIGHTS)
    names = sorted(tensors)
    mapping = {}
    for number, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save({name: tensors[name] for name in part}, folder / file)
        mapping |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    return folder


def test_the_command_makes_a_folder_that_can_be_served(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """Sizes by class and the sum are printed; the catalog takes the folder, all of its files readable by the sandbox;
    nothing is left beside it."""
    folder = tmp_path / "models" / "mini"
    result = run("model", "convert", str(short_model()), str(folder), "--compress", columns=120)
    assert result.exit_code == 0, result.output
    assert "MLP" in result.stdout
    assert "8 of 11 tensors compressed, 5.3 MiB in 3.5 MiB (0.663), every bit compared" in result.stdout
    assert "computed with" in result.stderr
    assert [one.name for one in folder.parent.iterdir()] == ["mini"]
    found = read_model("mini", folder)
    assert {name for name, _ in found.engine} == {"config.json", "generation_config.json", WEIGHTS}
    assert {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()} == {0o644}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert found.digest != read_model("mini", short_model()).digest


def test_without_kernels_it_is_slow_and_says_so(
    run: Run,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no compiled kernels are installed, numpy computes, the command names it, and the bytes are those that
    compiled code gives."""
    compress(short_model(), tmp_path / "compiled", form=CODED, progress=tell_nobody)
    monkeypatch.setattr(kernels, "installed", lambda: None)
    result = run("model", "convert", str(short_model()), str(tmp_path / "numpy"), "--compress", columns=120)
    assert "computed with numpy (slow: without compiled kernels)" in result.stderr
    assert (tmp_path / "numpy" / WEIGHTS).read_bytes() == (tmp_path / "compiled" / WEIGHTS).read_bytes()


def test_there_and_back_again(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """A folder of two weight files comes back from --expand with the bytes that it had, its index included."""
    source = shards(tmp_path / "plain")
    for folder, origin, form in (("a", source, "--compress"), ("back", tmp_path / "a", "--expand")):
        result = run("model", "convert", str(origin), str(tmp_path / folder), form, "-o", "json")
        value = json.loads(result.stdout)
        assert (value["files"], value["tensors"], value["before"]) == (2, TENSORS, WEIGHT_BYTES)
        assert value["ratio"] == (1.0 if form == "--expand" else 0.6633)
        assert sum(one["after"] for one in value["classes"]) == value["after"]
    names = [path.name for path in (tmp_path / "a").iterdir()]
    assert len(names) == 7
    assert filecmp.cmpfiles(source, tmp_path / "back", names, shallow=False)[0] == names
    assert (tmp_path / "a" / "model-00001-of-00002.safetensors").stat().st_size < 0.7 * WEIGHT_BYTES


def test_pooling_stays_where_it_is(tmp_path: Path) -> None:
    """The description of an embedding model's pooling, which sandboxes get under another name, keeps its place."""
    source = tmp_path / "plain"
    shutil.copytree(short_model(), source)
    (source / "modules.json").write_text("[]")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    compress(source, tmp_path / "made", form=CODED, progress=tell_nobody)
    for name in ("modules.json", "1_Pooling/config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (source / name).read_bytes()
    names = [name for name, _ in read_model("made", tmp_path / "made").engine]
    assert names == [name for name, _ in read_model("plain", source).engine]


def test_manifests_and_the_cache_take_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A compressed folder has a manifest, is pulled into the cache by it, shown and verified; a byte that differs is
    found, as in any model."""
    monkeypatch.chdir(tmp_path)
    compress(short_model(), tmp_path / "mini", form=CODED, progress=tell_nobody)
    cache = ("--cache", str(tmp_path / "cache"))
    assert run("model", "manifest", "mini").exit_code == 0
    pulled = run("model", "pull", "mini", *cache, columns=160)
    assert pulled.exit_code == 0, pulled.output
    assert read_model("mini", tmp_path / "mini").digest in pulled.stdout
    shown = json.loads(run("model", "show", "mini", *cache, "-o", "json").stdout)
    sizes = {one["name"]: one["bytes"] for one in shown["files"]}
    assert sizes[WEIGHTS] == (tmp_path / "mini" / WEIGHTS).stat().st_size
    verified = run("model", "verify", "mini", *cache)
    assert verified.exit_code == 0, verified.output
    kept = Path(shown["folder"]) / WEIGHTS
    kept.chmod(0o644)
    with kept.open("r+b") as file:
        file.seek(100_000)
        file.write(b"\xff\x00\xff\x00")
    assert run("model", "verify", "mini", *cache).exit_code == 1


def test_refusals(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """A folder without a word of what to do with it, a GGUF file to compress, both directions at once, weights that
    become no smaller, hostile files: code 1, a sentence, nothing left behind."""
    folders = {name: tmp_path / name for name in ("float32", "noise", "cut", "coded", "linked")}
    for folder in folders.values():
        shutil.copytree(short_model(), folder, ignore=shutil.ignore_patterns(WEIGHTS))
    save({"w": torch.randn(300, 300)}, folders["float32"] / WEIGHTS)
    noise = torch.randint(-(1 << 15), 1 << 15, (300, 300), dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    save({"w": noise}, folders["noise"] / WEIGHTS)
    (folders["cut"] / WEIGHTS).write_bytes((short_model() / WEIGHTS).read_bytes()[:-1])
    save({"w.coded_bf16": torch.randint(0, 255, (900,), dtype=torch.uint8)}, folders["coded"] / WEIGHTS)
    (folders["linked"] / WEIGHTS).symlink_to(short_model() / WEIGHTS)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    before = sorted(tmp_path.iterdir())
    for source, options, message in (
        ("float32", (), "is a folder; add --compress"),
        ("float32", ("--compress", "--expand"), "exclude each other"),
        ("float32", ("--compress", "--dtype", "float16"), "no --dtype"),
        ("a.gguf", ("--compress",), "convert a GGUF file first"),
        ("noise", ("--compress",), "becomes no smaller"),
        ("cut", ("--compress",), "the file has"),
        ("coded", ("--compress",), "is not a coded tensor"),
        ("linked", ("--compress",), "a link out of the model's folder"),
    ):
        result = run("model", "convert", str(tmp_path / source), str(tmp_path / "made"), *options, columns=300)
        assert result.exit_code == 1, (source, options)
        assert message in result.stderr
        assert result.stdout == ""
    assert sorted(tmp_path.iterdir()) == before


def test_progress_goes_over_all_files(tmp_path: Path) -> None:
    """Bytes of all weight files in one row that never falls, the last word all of them."""
    told: list[tuple[int, int]] = []
    source = shards(tmp_path / "plain")
    compress(source, tmp_path / "made", form=CODED, progress=lambda *one: told.append(one))
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert told == sorted(told)
    assert told[-1] == (total, total)


def test_breaking_off_leaves_nothing(tmp_path: Path) -> None:
    """An interrupt ends the child and removes what was written."""
    with owned_children() as before:
        pass

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(short_model(), tmp_path / "made", form=CODED, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    with owned_children() as children:
        assert children == before


KILLED = """
import os, signal, sys
from pathlib import Path
from appliance.operator.compression import CODED, compress
compress(Path(sys.argv[1]), Path(sys.argv[2]), form=CODED, progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_killed_conversion_has_no_name(tmp_path: Path) -> None:
    """Killed without warning, a conversion leaves no folder under its name, and another one can be made; control: the
    kill came when there was something to leave."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(short_model()), str(tmp_path / "made")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "made").exists()
    (left,) = tmp_path.iterdir()
    assert (left / WEIGHTS).stat().st_size > 1_000_000
    compress(short_model(), tmp_path / "made", form=CODED, progress=tell_nobody)
    assert read_model("made", tmp_path / "made").engine


def test_the_program_locks_itself_down_before_it_reads(tmp_path: Path) -> None:
    """The program's order, in its own process: the filter is there when the first byte is read."""
    code = (
        "import os, sys\n"
        "import engine.convert.compress as program\n"
        "def look(path, open_codec, fd):\n"
        "    os.preadv(fd, [bytearray(4)], 0)\n"
        "    os.open('/etc/passwd', os.O_RDONLY)\n"
        "program.SafetensorsFile = look\n"
        "sys.exit(program.main(sys.argv[1:]))\n"
    )
    arguments = [str(short_model() / WEIGHTS), str(tmp_path / "out"), "coded", ""]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False)
    assert done.returncode == -signal.SIGSYS


@pytest.mark.parametrize(
    "said",
    [
        "{}",
        "[]",
        "7",
        '{"tensors": 1, "coded": 1, "before": 1, "after": 1, "codec": "x", "classes": {"a": [1, 2]}}',
        '{"tensors": 1, "coded": 1, "before": 1, "after": 1, "codec": "x", "classes": {"a": 3}}',
        '{"tensors": "x", "coded": 1, "before": 1, "after": 1, "codec": "x", "classes": {}}',
    ],
)
def test_a_program_that_misbehaves_is_held_to_its_words(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A taken-over program reports values of other shapes: an error, and nothing is left."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nprint('progress 9 0')\nprint('done ' + {said!r})\n")
    script.chmod(0o755)
    monkeypatch.setattr(conversion_child.sys, "executable", str(script))
    with pytest.raises(ConfigError, match="without a word"):
        compress(short_model(), tmp_path / "made", form=CODED, progress=tell_nobody)
    assert [one.name for one in tmp_path.iterdir()] == ["python"]
