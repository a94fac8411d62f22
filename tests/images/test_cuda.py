"""The cuda variant, as far as a machine without a torch for GPUs can tell: a small tree with a real one's places."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engine.backends.cuda.kernels import folder
from images.build import build, build_tree, is_program, variant_of
from images.sbom import bill_of
from images.triton_cache import add_cache
from isolation.errors import IsolationError
from isolation.image.python_rootfs import ROLE_PACKAGES, PythonInstall, running_python, tools_of

PROGRAM = Path("/bin/true")
"""Any program that is an ELF file and no script."""

TOOLS = (
    "triton/backends/nvidia/bin/ptxas",
    "triton/FileCheck",
    "nvidia/cu13/bin/nvcc",
    "nvidia/cuda_nvcc/bin/ptxas",
    "nvidia/cuda_nvcc/nvvm/bin/cicc",
)
"""Where packages for GPUs keep their compilers and assemblers."""

KEPT = (
    "torch/lib/libtorch_cuda.so",
    "nvidia/cu13/lib/libcublas.so.13",
    "triton/backends/nvidia/driver.c",
    "triton/backends/nvidia/lib/libdevice.10.bc",
)
"""What an engine on a GPU reads."""

DROPPED = ("triton/backends/nvidia/include/cuda.h", "triton/backends/amd/driver.c")


@pytest.fixture
def install(tmp_path: Path) -> PythonInstall:
    """An interpreter beside which a torch for GPUs seems to be installed, with next to no standard library."""
    packages, stdlib = tmp_path / "packages", tmp_path / "stdlib"
    stdlib.mkdir()
    (stdlib / "os.py").write_text("name = 'posix'\n")
    for name in (*ROLE_PACKAGES["engine"], "triton"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text("__version__ = '3.7.1'\n")
    for place in (*TOOLS, *KEPT, *DROPPED):
        path = packages / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if place in TOOLS:
            shutil.copy(PROGRAM, path)
        else:
            path.write_text(f"{place}\n")
    for name, place in (("nvidia-cublas", KEPT[1]), ("nvidia-cuda-nvcc", TOOLS[3]), ("torch", KEPT[0])):
        record = packages / f"{name.replace('-', '_')}-1.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (record / "RECORD").write_text(f"{place},,\n")
    found = running_python()
    return replace(found, path=(os.fspath(packages),), stdlib=stdlib, dynload=stdlib / "lib-dynload")


def programs(tree: Path) -> list[str]:
    """Names of everything that can be started."""
    return sorted(path.name for path in tree.rglob("*") if path.is_file() and is_program(path))


def test_the_cuda_tree_has_its_libraries_and_no_compiler(install: PythonInstall, tmp_path: Path) -> None:
    """The interpreter is the only program. Control: the packages that it was built from hold five."""
    packages = Path(install.path[0])
    assert programs(packages) == sorted(Path(tool).name for tool in TOOLS)
    tree = tmp_path / "image/engine"
    build_tree(tree, "engine", install)
    assert programs(tree) == [install.version]
    inside = tree / "opt/packages"
    assert all((inside / place).is_file() for place in KEPT)
    assert not any((inside / place).exists() for place in (*TOOLS, *DROPPED))
    assert variant_of(tree.parent) == "cuda"
    (inside / KEPT[0]).unlink()
    assert variant_of(tree.parent) == "cpu"


@pytest.mark.parametrize("place", ["numpy/gcc", pytest.param("nvidia/newer/cicc", marks=pytest.mark.full)])
def test_a_program_that_no_rule_knows_ends_the_build(install: PythonInstall, tmp_path: Path, place: str) -> None:
    """A compiler in a new place is an error that names it. Control: as a library's file it is none."""
    added = Path(install.path[0]) / place
    added.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(PROGRAM, added)
    with pytest.raises(IsolationError, match=f"{place} is a program"):
        build_tree(tmp_path / "refused", "engine", install)
    added.rename(added.with_name("libtool.so.1"))
    build_tree(tmp_path / "taken", "engine", install)


def test_mounts_of_the_packages_hide_the_same_tools(install: PythonInstall) -> None:
    """Without an image the folders of compilers are masked, in every package for GPUs."""
    packages = [Path(install.path[0], name) for name in ("triton", "nvidia", "numpy")]
    (packages[2] / "f2py/bin").mkdir(parents=True)
    assert set(tools_of(packages)) == {f"/opt/packages/{Path(tool).parent}" for tool in TOOLS if "bin/" in tool}


def test_the_bill_names_every_package_of_a_shared_folder(install: PythonInstall, tmp_path: Path) -> None:
    """Packages that fill one folder together are all in the bill, and so are their libraries."""
    image = tmp_path / "image"
    for role in ROLE_PACKAGES:
        if role == "engine":
            build_tree(image / role, role, install)
        else:
            shutil.copytree(image / "engine", image / role, ignore=shutil.ignore_patterns("nvidia", "torch", "triton"))
    components = bill_of(image, install)["components"]
    named = {one["name"] for one in components}
    assert {"nvidia-cublas", "nvidia-cuda-nvcc", "torch", "libcublas.so.13", "libtorch_cuda.so"} <= named
    roles = {one["name"]: [entry["value"] for entry in one["properties"]] for one in components}
    assert "text" not in roles["nvidia-cublas"] and "engine" in roles["nvidia-cublas"]


def sealed(root: Path, tree: Path, *, triton: str = "3.7.1", sources: str = "") -> Path:
    """A folder of kernels as it is sealed, for a tree's own sources unless told otherwise."""
    kernels = sources or folder.sources_digest(tree / "opt/athanor/engine/backends/cuda/kernels")
    words = "sm_90", triton, kernels, "c0" * 32
    place = root / str(folder.folder_name(*words))
    (place / "KEY").mkdir(parents=True)
    (place / "KEY/kernel.cubin").write_bytes(b"cubin")
    said = {**folder.known(*words), "assembler": "a", "files": folder.files_digest(place)}
    (place / folder.MANIFEST).write_text(json.dumps(said))
    return place


def test_compiled_kernels_have_their_place(install: PythonInstall, tmp_path: Path) -> None:
    """A folder for the image's own Triton and sources goes into it under its name. Of another Triton, from other
    sources, changed since, of no such name, with a link, without a manifest, or none at all: refused by what it is."""
    tree = tmp_path / "engine"
    build_tree(tree, "engine", install)
    good = sealed(tmp_path / "good", tree)
    assert add_cache(tree, tmp_path / "good") == (good.name,)
    copied = tree / "opt/triton" / good.name
    assert (copied / "KEY/kernel.cubin").read_bytes() == b"cubin" and (copied / folder.MANIFEST).is_file()
    sealed(tmp_path / "older", tree, triton="3.6.0")
    sealed(tmp_path / "others", tree, sources="0" * 64)
    (sealed(tmp_path / "changed", tree) / "KEY/kernel.cubin").write_bytes(b"Cubin")
    (sealed(tmp_path / "linked", tree) / "KEY/link").symlink_to("/etc/passwd")
    (sealed(tmp_path / "bare", tree) / folder.MANIFEST).unlink()
    (tmp_path / "odd/sm_90").mkdir(parents=True)
    (tmp_path / "none").mkdir()
    for name, said in {
        "older": r"compiled by triton 3\.6\.0, the image has 3\.7\.1",
        "others": "from other sources",
        "changed": "not as they were sealed",
        "linked": "files only",
        "bare": "no manifest",
        "odd": "holds no compiled kernels",
        "none": "no compiled kernels are in",
    }.items():
        with pytest.raises(IsolationError, match=said):
            add_cache(tree, tmp_path / name)
    assert [path.name for path in (tree / "opt/triton").iterdir()] == [good.name]
    shutil.rmtree(tree / "opt/packages/triton")
    with pytest.raises(IsolationError, match="no triton"):
        add_cache(tree, tmp_path / "good")


def test_a_variant_that_was_asked_for_is_held_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a torch for processors no cuda image comes out, and nothing is left."""
    monkeypatch.setattr("images.build.build_tree", lambda tree, *_: tree.mkdir(parents=True))
    with pytest.raises(IsolationError, match=r"makes the cpu variant, not cuda"):
        build(tmp_path / "out", variant="cuda")
    assert list(tmp_path.iterdir()) == []
