"""The sandboxes' root file systems: built twice alike, with nothing in them that is not needed, and fit to run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from images.build import build, build_tree
from isolation.errors import ImageError, IsolationError, RootfsError
from isolation.gvisor.environment import guest_environment
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import find_runsc
from isolation.gvisor.spec import Limits, SandboxSpec
from isolation.image.manifest import SBOM, read_list, read_manifest
from isolation.image.python_rootfs import ROLE_PACKAGES, running_python
from isolation.image.rootfs import image_rootfs, tree_digest, verify_image

ROLES = [pytest.param(role, marks=[] if role == "text" else [pytest.mark.full]) for role in sorted(ROLE_PACKAGES)]
"""Both roles; the engine's tree, with torch in it, only at the full count."""


@pytest.fixture(scope="module")
def image():
    """An image of all roles, built once; some 700 MB. Tests that use it are of the full count."""
    with tempfile.TemporaryDirectory(prefix="ath-image-") as place:
        target = Path(place) / "out"
        build(target)
        yield target


@pytest.fixture(scope="module")
def text_tree():
    """The tree of the text role alone, by the function that the image is built with; some 60 MB."""
    with tempfile.TemporaryDirectory(prefix="ath-image-") as place:
        build_tree(Path(place) / "text", "text", running_python())
        yield Path(place) / "text"


@pytest.fixture
def tree_of(request):
    """Give the tree of a role: out of the whole image for the engine."""

    def tree_of(role: str) -> Path:
        return request.getfixturevalue("text_tree") if role == "text" else request.getfixturevalue("image") / role

    return tree_of


def files(tree: Path) -> list[Path]:
    """All files of a tree."""
    return [path for path in tree.rglob("*") if path.is_file()]


@pytest.mark.full
def test_two_builds_of_a_tree_give_one_digest(text_tree, tmp_path):
    """A second build, in a directory with another name and under another umask, is the same bit by bit."""
    before = os.umask(0o077)
    try:
        build_tree(tmp_path / "another-place" / "text", "text", running_python())
    finally:
        os.umask(before)
    assert tree_digest(tmp_path / "another-place" / "text") == tree_digest(text_tree)


@pytest.mark.full
def test_an_image_verifies_and_its_tree_is_the_role_s(image, text_tree):
    """A whole image passes its own check, and its manifest has the digest of the text tree built apart."""
    manifest, _ = read_manifest(image)
    assert tree_digest(text_tree) == manifest.roles["text"].digest
    assert verify_image(image) == manifest


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_builds_give_one_digest(image, tmp_path, root):
    """A whole second image, built by a process of its own: at another time, in another place, from another working
    directory, under another umask, time zone, locale and order of hashes."""
    code = (
        "import sys, os; os.umask(0o027); from images.build import build; from pathlib import Path; "
        "print(build(Path(sys.argv[1])).digest)"
    )
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(root),
        "TZ": "Pacific/Apia",
        "LC_ALL": "C",
        "PYTHONHASHSEED": "7",
    }
    time.sleep(1.1)  # times of files have a second's digits in some formats
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a/b/second")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == read_manifest(image)[0].digest
    for name in (SBOM, "engine.files", "text.files"):
        assert (tmp_path / "a/b/second" / name).read_bytes() == (image / name).read_bytes()


@pytest.mark.full
def test_the_bill_of_materials_is_true(image):
    """Each library of the tree is in it with its own digest; the packages have the versions that are installed, and
    hashes of the lock; a Debian package is named only for a file that is that package's, byte by byte."""
    import importlib.metadata

    bill = json.loads((image / SBOM).read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    components = bill["components"]
    assert len({one["bom-ref"] for one in components}) == len(components)
    packages = {one["name"]: one for one in components if one.get("purl", "").startswith("pkg:pypi/")}
    assert set(packages) >= {"torch", "numpy", "tokenizers", "jinja2", "llguidance", "markupsafe"}
    for name, one in packages.items():
        assert one["version"] == importlib.metadata.version(name)
        assert [entry for entry in one["properties"] if entry["name"] == "athanor:locked-sha256"], name
    libraries = {one["hashes"][0]["content"]: one for one in components if "hashes" in one}
    system = [path for role in ROLE_PACKAGES for path in files(image / role / "lib")]
    assert len(system) > 15
    for path in (*system, *(image / "engine/opt/packages/torch/lib").glob("*.so*")):
        assert libraries[hashlib.sha256(path.read_bytes()).hexdigest()]["name"] == path.name
    for one in libraries.values():
        owner = PackageURL.from_string(one["purl"]) if "purl" in one else None
        if owner is not None and owner.type == "deb":
            listed = subprocess.run(["dpkg", "-L", owner.name], capture_output=True, text=True).stdout.splitlines()
            owned = {hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in listed if one["name"] in name}
            assert one["hashes"][0]["content"] in owned


@pytest.mark.full
def test_the_bill_of_materials_satisfies_its_schema(image):
    """CycloneDX's own schema, in its strict form, has nothing against it, and package URLs are in their one canonical
    form. Controls: a bill without a name, with a short digest, with a word that the schema does not know."""
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    text = (image / SBOM).read_text()
    assert validator.validate_str(text) is None
    urls = [one["purl"] for one in json.loads(text)["components"] if "purl" in one]
    assert [PackageURL.from_string(url).to_string() for url in urls] == urls
    for change in ({"name": None}, {"hashes": [{"alg": "SHA-256", "content": "abc"}]}, {"licence": "none"}):
        bill = json.loads(text)
        bill["components"][0] |= change
        assert validator.validate_str(json.dumps(bill)) is not None, change


@pytest.mark.parametrize("role", ROLES)
def test_image_holds_no_tools(tree_of, role):
    """No shell, no package manager, no set-id file, no link; the only program is the interpreter."""
    tree = tree_of(role)
    found = files(tree)
    names = {path.name for path in found}
    assert not names & {"sh", "bash", "dash", "busybox", "pip", "apt", "gcc", "cc", "ld", "perl", "env"}
    assert not [path for path in tree.rglob("*") if path.is_symlink()]
    assert not [path for path in found if "site-packages" in path.parts or "ensurepip" in path.parts]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in found}
    assert modes == {0o644, 0o755}
    programs = [path for path in found if path.stat().st_mode & 0o100 and ".so" not in path.name]
    assert [path.parent.name for path in programs] == ["bin"]
    assert {path.stat().st_mtime for path in found} == {315_532_800}


@pytest.mark.parametrize(
    ("role", "there", "absent"),
    [
        pytest.param("engine", {"torch", "numpy"}, {"tokenizers", "jinja2"}, marks=pytest.mark.full),
        ("text", {"tokenizers", "jinja2"}, {"torch", "numpy"}),
    ],
)
def test_each_role_has_its_own_packages(tree_of, role, there, absent):
    """The engine parses no text and the text side holds no tensors, already by what is installed."""
    tree = tree_of(role)
    packages = set(os.listdir(tree / "opt/packages"))
    assert there <= packages
    assert not absent & packages
    assert sorted(os.listdir(tree / "opt/athanor")) == ["engine", "isolation"]
    assert sorted(os.listdir(tree / "opt/athanor/isolation")) == ["__init__.py", "__pycache__", "ipc"]


@pytest.mark.full
def test_the_engine_image_holds_what_kernels_are_compared_with(image):
    """The C sources are the same as here, so kernels compiled from this checkout are taken inside."""
    from engine.backends.native.manifest import SOURCES

    inside = image / "engine" / "opt/athanor/engine/backends/native/csrc"
    names = sorted(path.name for path in SOURCES.iterdir())
    assert "linear.c" in names
    assert sorted(path.name for path in inside.iterdir()) == names
    assert all((inside / name).read_bytes() == (SOURCES / name).read_bytes() for name in names)


def test_compiled_modules_do_not_look_at_times(text_tree):
    """Every module has its compiled form with an unchecked hash (PEP 552): flags 1, whatever the time of its source."""
    modules = [path for path in files(text_tree) if path.suffix == ".py"]
    for path in modules:
        (compiled,) = (path.parent / "__pycache__").glob(f"{path.stem}.cpython-*.pyc")
        assert int.from_bytes(compiled.read_bytes()[4:8], "little") == 1, path


@pytest.fixture
def tree(tmp_path):
    """A small tree to change."""
    (tmp_path / "t/opt/d").mkdir(parents=True)
    (tmp_path / "t/opt/f").write_text("content")
    return tmp_path / "t"


CHANGES = {
    "content": lambda tree: (tree / "opt/f").write_text("Content"),
    "mode": lambda tree: (tree / "opt/f").chmod(0o600),
    "name": lambda tree: (tree / "opt/f").rename(tree / "opt/g"),
    "place": lambda tree: (tree / "opt/f").rename(tree / "opt/d/f"),
    "addition": lambda tree: (tree / "opt/new").touch(),
    "empty directory": lambda tree: (tree / "opt/e").mkdir(),
    "link": lambda tree: (tree / "opt/l").symlink_to("f"),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_digest_sees_every_change(tree, change):
    """Whatever a program in the sandbox could see changes the digest; times and owners do not."""
    before = tree_digest(tree)
    os.utime(tree / "opt/f", (1, 1))
    assert tree_digest(tree) == before
    CHANGES[change](tree)
    assert tree_digest(tree) != before


@pytest.mark.parametrize("odd", ["fifo", "set-id", "line break"])
def test_odd_files_are_refused(tree, odd):
    """What has no place in an image is no part of a digest either."""
    if odd == "fifo":
        os.mkfifo(tree / "opt/p")
    elif odd == "set-id":
        (tree / "opt/f").chmod(0o4755)
    else:
        (tree / "opt/a\nf 0644 b").touch()
    with pytest.raises(RootfsError, match="may not be in an image"):
        tree_digest(tree)


@pytest.mark.full
def test_verify_finds_a_changed_byte(image):
    """One byte of one file is enough, and the error names the file; control: with the byte back it is whole."""
    victim = image / "text/opt/athanor/engine/__init__.py"
    good = victim.read_bytes()
    victim.write_bytes(good + b"#")
    with pytest.raises(ImageError, match="is not what the image was built with") as caught:
        verify_image(image)
    assert caught.value.path == victim
    victim.write_bytes(good)
    manifest = verify_image(image)
    assert manifest.variant == "cpu" and manifest.roles["text"].files == len(
        read_list(image, "text", manifest.roles["text"])
    ) - sum(path.is_dir() for path in (image / "text").rglob("*"))


def test_verify_refuses_what_is_no_image(tmp_path):
    """A directory without a manifest is said to be none."""
    with pytest.raises(IsolationError, match="is no image"):
        verify_image(tmp_path)
    with pytest.raises(IsolationError, match="is no sandbox image"):
        image_rootfs(tmp_path)


def test_build_does_not_overwrite_other_things(tmp_path):
    """A directory that holds something else is left alone."""
    (tmp_path / "precious").touch()
    with pytest.raises(IsolationError, match="something else"):
        build(tmp_path)
    assert (tmp_path / "precious").exists()


PROBES = {
    "engine": "import torch; assert float((torch.ones(9, 9) @ torch.ones(9, 9))[0, 0]) == 9; import engine.config",
    "text": "import tokenizers, jinja2.sandbox, isolation.ipc.messages",
}
LOOK = (
    "\nimport os\nassert not os.path.exists('/bin') and not os.path.exists('/usr/bin')"
    "\ntry: os.execv('/bin/sh', ['sh'])\nexcept FileNotFoundError: print('no shell')"
)


@pytest.mark.runsc
@pytest.mark.parametrize("role", ROLES)
def test_sandbox_runs_from_the_image(tree_of, runsc_path, role):
    """Each role's modules import in a real sandbox made from the image, and there is no shell."""
    if os.geteuid() != 0:
        pytest.skip("the profile for root needs root")
    rootfs = image_rootfs(tree_of(role))
    argv = (rootfs.python, "-s", "-S", "-P", "-c", PROBES[role] + LOOK)
    run_dir = Path(tempfile.mkdtemp(prefix="ath-"))
    try:
        runtime = GvisorRuntime(find_runsc([runsc_path]), run_dir)
        spec = SandboxSpec(role, argv, guest_environment(threads=1), rootfs, (), Limits(2 << 30))
        sandbox = runtime.boot(spec)
        status = sandbox.wait(60)
        sandbox.delete()
        runtime.close()
    finally:
        shutil.rmtree(run_dir)
    assert (status, sandbox.output_tail()) == (0, ("no shell",))
