"""What an installation brings to read: nothing of the repository is missing, its links lead somewhere, its examples are
valid, and an installation without a package puts the same files below /usr/local/share."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import tomllib
from pathlib import Path, PurePosixPath

import pytest
import typer

from appliance.common.config_loader import load_config
from appliance.operator.cli.app import app
from appliance.operator.install import deb, share
from policy.files import read_sources
from policy.loader import load_policy
from tests.appliance.operator.cli.conftest import Run, run

__all__ = ["run"]

DOC, DATA, MAN = "usr/share/doc/athanor", "usr/share/athanor/monitoring", "usr/share/man"

LEFT_OUT = ("docs/monitoring/*.py",)
"""Files below docs/ and examples/ that are programs of development."""


def wanted(root: Path) -> dict[str, bytes]:
    """What a package has to bring, by where it belongs: every document, example, dashboard and rule of a repository."""
    found = {f"{DOC}/{name}": (root / name).read_bytes() for name in ("README.md", "ARCHITECTURE.md", "SECURITY.md")}
    for folder in ("docs", "examples", "deploy", "bench"):
        for path in (root / folder).rglob("*"):
            name = path.relative_to(root)
            skipped = "__pycache__" in name.parts or any(name.match(pattern) for pattern in LEFT_OUT)
            if path.is_file() and not skipped and (folder != "bench" or path.suffix == ".md"):
                place = DATA if name.parts[:2] == ("docs", "monitoring") else f"{DOC}/{name.parent}"
                found[f"{place}/{name.name}"] = path.read_bytes()
    return found


def lacking(root: Path, files: share.Files) -> list[str]:
    """Files of the repository that an installation does not bring, or brings with other content."""
    return [name for name, data in wanted(root).items() if files.get(PurePosixPath(name)) != data]


@pytest.fixture(scope="module")
def files(root: Path) -> share.Files:
    """What a package brings to read."""
    return share.share_files(root, app, share.PACKAGE_SHARE)


def test_nothing_of_the_repository_is_missing(root: Path, files: share.Files, tmp_path: Path) -> None:
    """Every document, example, dashboard and rule is there with its content, beside what Debian asks for. Control: a
    document in a folder that the package does not know is told as missing."""
    assert len(wanted(root)) > 50
    assert lacking(root, files) == []
    assert gzip.decompress(files[PurePosixPath(DOC, "changelog.gz")]) == (root / "CHANGELOG.md").read_bytes()
    assert (root / "LICENSE").read_bytes() in files[PurePosixPath(DOC, "copyright")]
    assert b'id="athanordown"' in files[PurePosixPath(DOC, "runbooks.html")]
    for name in ("README.md", "ARCHITECTURE.md", "SECURITY.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    for folder in ("docs", "examples", "deploy", "bench"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    (tmp_path / "docs/deeper").mkdir()
    (tmp_path / "docs/deeper/new.md").write_text("# New\n")
    (tmp_path / "docs/new.md").write_text("# New\n")
    assert lacking(tmp_path, share.share_files(tmp_path, app, share.PACKAGE_SHARE)) == [f"{DOC}/docs/deeper/new.md"]


def test_a_wheel_brings_what_an_installation_needs(root: Path) -> None:
    """Each file that ``athanor install`` looks for is put by a wheel where it looks without the sources, at the same
    path below share/athanor. Control: a file that the project does not name is not."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    shared = project["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]

    def brought(name: str) -> bool:
        return any(
            (name == place or name.startswith(f"{place}/")) and target == f"share/athanor/{place}"
            for place, target in shared.items()
        )

    names = [
        path.relative_to(root).as_posix()
        for pattern in (*share.PATTERNS, *share.MONITORED)
        for path in root.glob(pattern)
    ]
    assert len(names) > 50
    assert [name for name in names if not brought(name)] == []
    assert not brought("Makefile")


def test_every_command_has_a_page_and_every_shell_a_completion(files: share.Files) -> None:
    """The command line is walked: each command has its manual page, as have the program and both kinds of files."""
    names = {path.name.removesuffix(".gz") for path in files if str(path).startswith(MAN)}
    expected = {"athanor.1", "athanor.yaml.5", "athanor-policy.5"}
    walked = [("athanor", typer.main.get_command(app))]
    while walked:
        name, command = walked.pop()
        below = getattr(command, "commands", None)
        walked += [(f"{name}-{word}", one) for word, one in (below or {}).items()]
        expected |= set() if below is not None else {f"{name}.1"}
    assert "athanor-key-create.1" in expected and len(expected) > 40
    assert names == expected
    completions = {str(path) for path in files if "complet" in str(path)}
    assert len(completions) == 3


def test_links_of_installed_documents_lead_somewhere(files: share.Files, tmp_path: Path) -> None:
    """Each relative link of an installed document names an installed file. Control: without one document, its links are
    dead."""
    share.apply_share(tmp_path, share.find_share_changes(tmp_path, share.PACKAGE_SHARE, files))
    assert dead(tmp_path / DOC) == []
    (tmp_path / DOC / "docs/runsc.md").unlink()
    assert dead(tmp_path / DOC) == ["docs/install.md: runsc.md", "docs/operate.md: runsc.md"]


def dead(folder: Path) -> list[str]:
    """Links that lead nowhere."""
    found = []
    for path in sorted(folder.rglob("*.md")):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
            if "://" not in target and not (path.parent / target).exists():
                found.append(f"{path.relative_to(folder)}: {target}")
    return found


def test_examples_are_valid(root: Path, run: Run, tmp_path: Path) -> None:
    """Every policy of examples/ passes ``athanor policy check`` and every configuration loads; the page of the examples
    names them all. Control: with a mistyped key neither does."""
    names = {path.name for path in (root / "examples").glob("*.yaml")}
    assert names == set(re.findall(r"^\| `([\w-]+\.yaml)`", (root / "examples/README.md").read_text(), re.MULTILINE))
    policies = [name for name in sorted(names) if name.startswith("policy-")]
    assert len(policies) >= 4 and len(names) - len(policies) >= 4
    for name in sorted(names):
        path = root / "examples" / name
        words = ("policy", "check", str(path)) if name in policies else ("config", "show", "--config", str(path))
        result = run(*words)
        assert result.exit_code == 0, result.output
        wrong = tmp_path / name
        wrong.write_text(path.read_text().replace("models:", "modles:", 1))
        assert run(*words[:-1], str(wrong)).exit_code == 1


def test_configurations_of_the_examples_are_the_shipped_one_with_changes(root: Path) -> None:
    """Each example keeps its state where the units have their directories, so that it can take the place of the first
    configuration; each policy is read as tenants."""
    shipped = load_config(root / "systemd/athanor.yaml")
    for path in (root / "examples").glob("athanor-*.yaml"):
        config = load_config(path)
        for key in ("policy", "credentials", "pepper", "run_dir", "state", "audit"):
            assert getattr(config, key) == getattr(shipped, key), (path, key)
    for path in (root / "examples").glob("policy-*.yaml"):
        assert load_policy(read_sources(path)).tenants


@pytest.mark.runsc
@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb on this machine")
def test_the_package_has_all_of_it(
    root: Path, run: Run, files: share.Files, runsc_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that is built and unpacked holds these files, byte for byte, for everybody to read."""
    monkeypatch.setattr(deb, "OUR_PACKAGES", ("policy",))
    result = run("package", "deb", str(tmp_path / "dist"), "--slim")
    assert result.exit_code == 0, result.output
    (package,) = (tmp_path / "dist").iterdir()
    subprocess.run(["dpkg-deb", "-x", str(package), str(tmp_path / "root")], check=True, timeout=60)
    assert {path: (tmp_path / "root" / path).read_bytes() for path in files} == dict(files)
    assert lacking(root, {path: (tmp_path / "root" / path).read_bytes() for path in files}) == []
    assert {(tmp_path / "root" / path).stat().st_mode & 0o777 for path in files} == {0o644}


def test_man_finds_the_pages(files: share.Files, tmp_path: Path) -> None:
    """The system's man shows the page of a command with two words from the installed folder; control: none of a
    command that there is not."""
    man = shutil.which("man")
    if man is None:
        pytest.skip("no man on this machine")
    share.apply_share(tmp_path, share.find_share_changes(tmp_path, share.PACKAGE_SHARE, files))
    environment = {"PATH": "/usr/bin:/bin", "MANPATH": str(tmp_path / MAN), "MANWIDTH": "100", "LC_ALL": "C"}
    for name, found in (("athanor-key-create", True), ("athanor-policy", True), ("athanor-nothing", False)):
        done = subprocess.run(
            [man, name], env=environment, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
        )
        assert (done.returncode == 0) is found, done.stderr
        assert (name.replace("-", " ") in done.stdout or name in done.stdout) is found


def test_an_installation_without_a_package_has_them_too(run: Run, root: Path, tmp_path: Path) -> None:
    """``athanor install`` writes the same files below /usr/local/share, which they name; a second run touches nothing,
    a file that differs is replaced, one of an older version is removed, and an uninstall leaves others' files alone."""
    words = ("install", "--systemd", "--prefix", str(tmp_path), "--command", "/usr/bin/athanor")
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert re.search(r"new +\S+usr/local/share/man +manual pages: \d+ files", result.stdout)
    place = tmp_path / "usr/local/share"
    assert (place / "doc/athanor/docs/operate.md").read_bytes() == (root / "docs/operate.md").read_bytes().replace(
        b"/usr/share/", b"/usr/local/share/"
    )
    rules = (place / "athanor/monitoring/alerts.yaml").read_text()
    assert "file:///usr/local/share/doc/athanor/runbooks.html" in rules and "file:///usr/share" not in rules
    unit = (tmp_path / "etc/systemd/system/athanor-gateway.service").read_text()
    assert "Documentation=file:///usr/local/share/doc/athanor/README.md" in unit
    assert (place / "zsh/site-functions/_athanor").is_file()
    assert "nothing to do" in run(*words).stdout
    (place / "doc/athanor/README.md").write_text("edited")
    (place / "man/man1/athanor-gone.1.gz").write_bytes(b"of an older version")
    (place / "man/man1/other.1.gz").write_bytes(b"of another program")
    again = run(*words).stdout
    assert re.search(r"changed +\S+doc/athanor +documents and examples: 1 file\n", again)
    assert (place / "doc/athanor/README.md").read_text().startswith("# Athanor")
    assert not (place / "man/man1/athanor-gone.1.gz").exists()
    removed = run("uninstall", "--prefix", str(tmp_path))
    assert re.search(r"removed +\S+usr/local/share/athanor ", removed.stdout)
    left = [path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()]
    assert left == ["man/man1/other.1.gz"]
    assert not (place / "doc/athanor").exists() and not (place / "athanor").exists()
