"""All kernels of a served model, compiled ahead on a machine without a GPU, and an engine that has no compiler."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from appliance.common.errors import ConfigError
from appliance.operator.gpu_kernels import BuiltKernels, GpuKernels, build, compile_launcher
from engine.backends.cuda.kernels import ahead, cache
from engine.backends.cuda.kernels.cache import folder_name, open_cache
from engine.backends.cuda.kernels.folder import MANIFEST, Asked, description_digest, read_asked
from engine.backends.cuda.runtime.launch_digest import launch_configuration
from engine.errors import ConfigurationError
from engine.model.checkpoint.registry import load_model_config
from engine.startup import enumerate_kernels
from tests.engine.support import model_config

ROWS, BLOCK_SIZE = 2, 4
SHAPE = model_config(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32)


def asked(model: Path, **fields: object) -> GpuKernels:
    """The smallest model that has every kernel."""
    values = {
        "architecture": "sm_90",
        "model": model,
        "dtype": "bfloat16",
        "block_size": BLOCK_SIZE,
        "max_num_seqs": ROWS,
        **fields,
    }
    return GpuKernels(**values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which there is nothing but its description."""
    folder = tmp_path_factory.mktemp("model")
    said = {
        "architectures": [SHAPE.architecture],
        "hidden_size": SHAPE.hidden_size,
        "head_dim": SHAPE.head_dim,
        "intermediate_size": SHAPE.intermediate_size,
        "num_hidden_layers": SHAPE.num_layers,
        "num_attention_heads": SHAPE.num_heads,
        "num_key_value_heads": SHAPE.num_kv_heads,
        "vocab_size": SHAPE.vocab_size,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(said))
    return folder


@pytest.fixture(scope="module")
def built(model: Path, tmp_path_factory: pytest.TempPathFactory) -> BuiltKernels:
    """Its kernels, moved after they were made and with no right to write."""
    made = build(tmp_path_factory.mktemp("made"), asked(model))
    moved = tmp_path_factory.mktemp("moved") / made.folder.name
    shutil.move(made.folder, moved)
    return replace(made, folder=moved)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver that starts nothing."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("pretended_driver.c")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(folder / "libcuda.so.1")],
        check=True,
    )
    return folder


def serve(repository: Path, kernels: Path, model: Path, driver: Path) -> subprocess.CompletedProcess[str]:
    """An engine's process, which sees the kernels and the driver."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return subprocess.run(
        [sys.executable, "-m", "tests.engine.backends.cuda.kernels.ahead_probe", str(kernels), str(model), str(ROWS)],
        cwd=repository,
        env={**environment, "LD_LIBRARY_PATH": str(driver), "TRITON_BACKENDS_IN_TREE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.full
@pytest.mark.timeout(300)
def test_an_engine_without_compilers_finds_every_kernel(
    root: Path, built: BuiltKernels, model: Path, driver: Path
) -> None:
    """Warm-up and requests launch every kernel through Triton's own launcher, out of a moved folder that is not
    changed, and no program is started. What happens to a form that is not there, ``test_kernel_cache`` shows."""
    before = {path: path.stat().st_mtime_ns for path in built.folder.rglob("*")}
    served = serve(root, built.folder.parent, model, driver)
    assert served.returncode == 0, served.stderr
    launched = set(served.stdout.split())
    assert launched == {
        "_begin",
        "_end",
        "_compare",
        "_few_rows",
        "_one_row",
        "_norm",
        "_rotations",
        "_rope",
        "_decode_joined",
        "_activate",
        "_sketch",
        "_prepare",
        "_choose",
        "_report",
        "_chunk_map",
        "_prefill",
        "_zero",
    }
    tokens, reports = (int(count) for count in served.stderr.split()[-2:])
    assert tokens > 10 and reports > 10
    assert {path: path.stat().st_mtime_ns for path in built.folder.rglob("*")} == before


@pytest.mark.full
def test_nothing_of_the_machine_is_in_it(built: BuiltKernels, model: Path, root: Path, tmp_path: Path) -> None:
    """No file names the repository, the packages' folder or the place where it was compiled; only machine code, its
    metadata and the launcher are there. Control: a module as the interpreter compiles it names its place."""
    files = [path for path in built.folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".cubin", ".json", ".so"}
    packages = sysconfig.get_paths()["purelib"]
    for path in files:
        content = path.read_bytes()
        for place in (str(root), packages, "/tmp/", str(Path.home())):
            assert place.encode() not in content, path
        assert path.stat().st_mode & 0o777 == 0o644
    # What was asked for is told, for those who cannot work the configuration's digest out.
    assert read_asked(built.folder) == Asked(description_digest(model), "bfloat16", BLOCK_SIZE, ROWS)
    py_compile.compile(cache.__file__, cfile=str(tmp_path / "control"), doraise=True)
    assert str(root).encode() in (tmp_path / "control").read_bytes()


@pytest.mark.full
def test_what_does_not_fit_is_refused(built: BuiltKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed byte, an added file, another architecture, another Triton, other sources, another configuration: each
    a typed error that says what is needed. Nothing of Triton is switched by a refusal."""
    known = json.loads((built.folder / MANIFEST).read_text())
    configuration = known["configuration"]
    copy = tmp_path / built.folder.name
    shutil.copytree(built.folder, copy)
    for other in (("sm_80", configuration), ("sm_90", "0" * 64)):
        with pytest.raises(ConfigurationError, match=rf"needed, there is {copy.name}; compile them"):
            open_cache(tmp_path, *other)
    for name, value in (("kernels_digest", lambda: "0" * 64), ("triton", None)):
        with monkeypatch.context() as patch:
            if value is None:
                patch.setattr("triton.__version__", "9.9.9")
            else:
                patch.setattr(cache, name, value)
            with pytest.raises(ConfigurationError, match=f"needed, there is {copy.name}"):
                open_cache(tmp_path, "sm_90", configuration)
            # Renamed by somebody to what is looked for, it still says what it is.
            renamed = copy.rename(tmp_path / folder_name("sm_90", configuration))
            with pytest.raises(ConfigurationError, match="made for something else"):
                open_cache(tmp_path, "sm_90", configuration)
            renamed.rename(copy)
    victim = next(copy.rglob("*.cubin"))
    good = victim.read_bytes()
    for change in (lambda: victim.write_bytes(good[:-1] + bytes([good[-1] ^ 1])), lambda: (copy / "more").touch()):
        change()
        with pytest.raises(ConfigurationError, match="not as they were sealed"):
            open_cache(tmp_path, "sm_90", configuration)
        victim.write_bytes(good)


@pytest.mark.full
def test_what_cannot_be_compiled_is_said(model: Path, tmp_path: Path) -> None:
    """A folder without a model, an architecture that is none, a dtype that is none, a request of another form: typed
    errors, and nothing is left, neither in the folder nor in the environment that children get."""
    kernels = tmp_path / "kernels"
    with pytest.raises(ConfigError, match="config.json"):
        build(kernels, replace(asked(model), model=tmp_path))
    request = ahead.CompileRequest(
        into=str(kernels),
        claims=str(kernels),
        model_dir=str(model),
        architecture="sm_90",
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        max_num_seqs=ROWS,
        weights="stored",
    )
    for wrong, said in (
        (replace(request, architecture="sm90"), "no architecture of a GPU"),
        (replace(request, dtype="int3"), "dtype must be one of"),
        (replace(request, block_size=0), "block_size is 0"),
        (replace(request, weights="int8"), "weights must be stored or fp8"),
        (replace(request, weights="fp8", architecture="sm_80"), "sm_89 or later"),
    ):
        before = dict(os.environ)
        with pytest.raises(ConfigurationError, match=said):
            ahead.build(wrong, enumerate_kernels.rehearse)
        assert dict(os.environ) == before
    for values in ("{}", json.dumps({**asdict(request), "block_size": "4"}), "[]", "{"):
        assert enumerate_kernels.main([values]) == enumerate_kernels.EXIT_REFUSED
    assert list(kernels.iterdir()) == []


def test_no_form_depends_on_what_is_left_out_of_the_configuration(model: Path) -> None:
    """Contexts and stop ids leave the configuration as it is; everything else of a description is in it."""
    description = load_model_config(str(model))

    def known(**fields: object) -> str:
        return launch_configuration(replace(description, **fields), torch.bfloat16, BLOCK_SIZE, ROWS)

    whole = known()
    assert known(max_positions=64, stop_ids=frozenset({1})) == whole
    assert launch_configuration(description.within(32), torch.bfloat16, BLOCK_SIZE, ROWS) == whole
    others = {
        known(head_dim=32),
        known(hidden_size=64),
        known(vocab_size=98),
        known(num_kv_heads=2),
        known(extra=1),
        launch_configuration(description, torch.float32, BLOCK_SIZE, ROWS),
        launch_configuration(description, torch.bfloat16, 8, ROWS),
        launch_configuration(description, torch.bfloat16, BLOCK_SIZE, 3),
        launch_configuration(description, torch.bfloat16, BLOCK_SIZE, ROWS, scaled=True),
    }
    assert len(others) == 9 and whole not in others


def test_two_launchers_are_the_same_bytes(tmp_path: Path) -> None:
    """The module by which Triton reaches the driver, compiled in two places; it needs the driver's library by name."""
    folders = [tmp_path / name for name in ("a", "other")]
    for folder in folders:
        folder.mkdir()
    first, second = (compile_launcher(folder).read_bytes() for folder in folders)
    assert first == second and b"libcuda.so.1" in first


@pytest.mark.full
@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_builds_give_one_digest(built: BuiltKernels, model: Path, tmp_path: Path) -> None:
    """A second build, in another folder and under another umask, is the same bit by bit."""
    before = os.umask(0o077)
    try:
        again = build(tmp_path / "elsewhere", asked(model))
    finally:
        os.umask(before)
    assert again.digest == built.digest and again.folder.name == built.folder.name
    assert (again.folder / MANIFEST).read_bytes() == (built.folder / MANIFEST).read_bytes()
