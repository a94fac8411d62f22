"""The Debian package: what is in it, that two builds are one, that its scripts are sound. It is installed for real in
``tests/test_systemd_boot.py``."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest

from appliance.common.errors import ConfigError
from appliance.operator.install import closure, deb
from appliance.operator.install.closure import package_files, requirement_closure
from tests.appliance.operator.cli.conftest import Run, run

__all__ = ["run"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of our packages in place of all: what is packed is the same kind of thing, in a second."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg-deb on this machine")
    monkeypatch.setattr(deb, "OUR_PACKAGES", ("policy",))


@pytest.mark.usefixtures("small")
@pytest.mark.runsc
def test_two_builds_are_one(runsc_path: Path, tmp_path: Path, run: Run) -> None:
    """The same files give the same bytes; what is inside belongs to root, with units, command, runsc and model."""
    packages = []
    for name in ("a", "b"):
        result = run("package", "deb", str(tmp_path / name), "--slim")
        assert result.exit_code == 0, result.output
        packages.append(next((tmp_path / name).iterdir()))
    first, second = (hashlib.sha256(path.read_bytes()).hexdigest() for path in packages)
    assert first == second
    listed = subprocess.run(["dpkg-deb", "-c", str(packages[0])], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in listed.splitlines()]
    assert {line[1] for line in lines} == {"root/root"}
    inside = {line[5]: line[0] for line in lines}
    assert inside["./usr/bin/athanor"] == inside["./usr/lib/athanor/bin/runsc"] == "-rwxr-xr-x"
    assert "./usr/lib/systemd/system/athanor-gateway.service" in inside
    assert "./usr/lib/athanor/share/athanor/models/athanor-mini/model.safetensors" in inside
    modes = [mode for mode in inside.values() if mode[0] != "l"]
    assert not any(mode[8] == "w" or "s" in mode.lower() for mode in modes), "nothing for others to write"


@pytest.mark.parametrize("name", sorted(deb.SCRIPTS))
def test_scripts_are_sound(name: str, tmp_path: Path, root: Path) -> None:
    """shellcheck has nothing to say."""
    path = tmp_path / name
    path.write_text(deb.SCRIPTS[name])
    done = subprocess.run([root / ".venv/bin/shellcheck", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_without_dpkg_deb_it_says_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another system than Debian gets one sentence, and no folder."""
    monkeypatch.setattr(deb.shutil, "which", lambda *_, **__: None)
    result = run("package", "deb", str(tmp_path / "out"))
    assert (result.exit_code, "there is no dpkg-deb" in result.stderr) == (1, True)
    assert not (tmp_path / "out").exists()


def test_what_is_needed_is_packed_and_nothing_of_the_tests() -> None:
    """The closure has what serving imports, by way of others too, and none of the test tools."""
    names = {dist.name.lower().replace("_", "-") for dist in requirement_closure("athanor")}
    assert {"torch", "grpcio", "pydantic-core", "starlette", "anyio"} <= names
    assert not {"pytest", "transformers", "mypy", "athanor", "matplotlib"} & names
    below = {str(path) for _, path in package_files(distribution("typer"))}
    assert "typer/__init__.py" in below
    assert not any(path.startswith(("..", "/")) or "__pycache__" in path for path in below)


def test_an_extra_is_packed_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--extra bench`` adds what plots need and nothing of the test tools; where it is not installed the command that
    installs it is named, and an extra that there is not is refused with those that there are."""
    if closure._is_here("matplotlib"):
        names = {dist.name.lower() for dist in requirement_closure("athanor", ("bench",))}
        assert "matplotlib" in names and "pytest" not in names
    monkeypatch.setattr(closure, "_is_here", lambda name: name != "matplotlib")
    with pytest.raises(ConfigError, match=r"matplotlib is not installed here; run: pip install 'athanor\[bench\]'"):
        requirement_closure("athanor", ("bench",))
    with pytest.raises(ConfigError, match="no extra plots; it has bench, build, dev"):
        requirement_closure("athanor", ("plots",))
    assert "matplotlib" not in {dist.name.lower() for dist in requirement_closure("athanor")}


def test_a_package_that_would_not_run_is_not_built(tmp_path: Path) -> None:
    """A tree without what ours needs is told by the name of what is missing; this Python's own tree is whole."""
    import sysconfig

    (tmp_path / "appliance").symlink_to(Path(deb.appliance.__path__[0]))
    with pytest.raises(ConfigError, match="No module named 'typer'"):
        deb.check_whole(tmp_path)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        (tmp_path / path.name).symlink_to(path)
    for name in ("isolation", "policy", "engine", "bench"):
        (tmp_path / name).symlink_to(Path(deb.appliance.__path__[0]).parent / name)
    deb.check_whole(tmp_path)
