"""What Makefile and ``requirements/debian_parts.py`` do where a set-up was cut off, or a package is not what it was."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from images.runsc import StepError
from requirements import debian_parts
from requirements.debian_parts import unpack


def dry_run(folder: Path, target: str) -> str:
    """What `make` would run for a target."""
    line = ["make", "--dry-run", "--no-builtin-rules", target]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_environment_that_was_cut_off_is_made_again(root: Path, tmp_path: Path) -> None:
    """`make` was killed after the environment's Python was there and before pip was: the next one makes it again, and
    what of pip may be there in part goes first. Control: a whole one is left alone."""
    if shutil.which("make") is None:
        pytest.skip("no make here")
    shutil.copy(root / "Makefile", tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    told = dry_run(tmp_path, ".venv/bin/python")
    assert "-m venv .venv" in told and told.index("rm -rf") < told.index("-m venv .venv")
    (tmp_path / ".venv/bin/pip").touch()
    assert "venv" not in dry_run(tmp_path, ".venv/bin/python").replace(".venv/bin/python", "")


@pytest.fixture
def package(tmp_path: Path) -> Callable[[str], Path]:
    """Makes Debian's package of a program, which is at this place in it."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg-deb here")

    def made(place: str) -> Path:
        root = tmp_path / f"package-{place.replace('/', '-')}"
        (root / "DEBIAN").mkdir(parents=True)
        fields = ("Package: nothing-has-this", "Version: 1", "Architecture: all", "Maintainer: a <a@b.example>")
        (root / "DEBIAN/control").write_text("\n".join((*fields, "Description: x", "")))
        (root / place).parent.mkdir(parents=True)
        (root / place).write_text("#!/bin/sh\necho it runs\n")
        (root / place).chmod(0o755)
        target = tmp_path / f"{root.name}.deb"
        subprocess.run(["dpkg-deb", "--build", str(root), str(target)], capture_output=True, check=True)
        return target

    return made


def test_a_package_without_the_program_is_told(
    package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another release's package of that name has the program elsewhere: nothing is put in its place, so that tests are
    skipped and do not fail, and the next `make` tries again. Control: with the program there it runs."""
    for number, place in enumerate(("usr/share/doc/x/readme", "usr/sbin/x")):
        scratch, deb = tmp_path / f"scratch-{number}", package(place)
        (scratch / "cache/archives").mkdir(parents=True)
        get = f"cp {deb} {scratch}/cache/archives/"
        monkeypatch.setattr(debian_parts, "debian", lambda _scratch, get=get: ["sh", "-c", get])
        target = tmp_path / "env/bin/nothing-has-this"
        target.parent.mkdir(parents=True, exist_ok=True)
        if number == 0:
            with pytest.raises(StepError, match="has no usr/sbin/x"):
                unpack(target.parent, scratch, {"nothing-has-this": "usr/sbin/x"}, target)
            assert not target.exists() and not list((tmp_path / "env/share").glob("*"))
        else:
            unpack(target.parent, scratch, {"nothing-has-this": "usr/sbin/x"}, target)
            assert subprocess.run([target], capture_output=True, text=True, check=True).stdout == "it runs\n"


def test_a_link_to_a_program_that_is_gone_is_replaced(tmp_path: Path) -> None:
    """The machine's own program was moved: the link to its old place is no reason to be without it."""
    target = tmp_path / "bin/sh"
    target.parent.mkdir()
    target.symlink_to(tmp_path / "nowhere")
    unpack(target.parent, tmp_path, {"sh": "bin/sh"}, target)
    assert target.exists() and not list(target.parent.glob(".*"))
