"""``athanor install`` and ``uninstall`` below a root: what appears, what is left alone, what is gone afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from appliance.common.config_loader import load_config
from appliance.common.credentials import read_key_table
from appliance.operator.install.rendering import PACKAGE_PLACE, hidden, is_untouched, render, seal
from appliance.operator.install.sources import read_sources, source_folder
from policy.files import read_sources as read_policy
from policy.loader import load_policy
from tests.appliance.operator.cli.conftest import Run, run

__all__ = ["run"]

COMMAND = "/usr/bin/athanor"
GATEWAY = "etc/systemd/system/athanor-gateway.service"


@pytest.fixture
def install(run: Run, tmp_path: Path) -> Run:
    """``athanor install --systemd --prefix ROOT`` with more arguments."""
    return lambda *more: run("install", "--systemd", "--prefix", str(tmp_path), "--command", COMMAND, *more)


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a root."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_first_installation_is_whole(install: Run, tmp_path: Path) -> None:
    """Units, users, directories, a configuration and a policy that load, keys that can be added to, a model."""
    result = install()
    assert result.exit_code == 0, result.output
    units = {path.name for path in (tmp_path / "etc/systemd/system").iterdir()}
    kinds = (".service", ".slice", ".target", ".timer", ".socket")
    assert units == {path.name for path in source_folder().iterdir() if path.suffix in kinds}
    assert (tmp_path / "etc/sysusers.d/athanor.conf").is_file()
    assert (tmp_path / "etc/tmpfiles.d/athanor.conf").is_file()
    etc = tmp_path / "etc/athanor"
    config = load_config(etc / "athanor.yaml")
    assert (tmp_path / str(config.models[0].path)[1:] / "model.safetensors").is_file()
    assert load_policy(read_policy(etc / "policy.yaml")).tenants == {}
    assert read_key_table(etc / "credentials.json", etc / "pepper").records == {}
    assert (etc / "pepper").stat().st_mode & 0o777 == 0o600


def test_again_changes_nothing(install: Run, tmp_path: Path) -> None:
    """A second run touches no file and says so."""
    install()
    before = contents(tmp_path)
    result = install()
    assert (result.exit_code, contents(tmp_path) == before) == (0, True)
    assert "nothing to do" in result.stdout


def test_dry_run_changes_nothing(install: Run, tmp_path: Path) -> None:
    """The whole plan is shown, and nothing is there afterwards."""
    result = install("--dry-run")
    assert (result.exit_code, contents(tmp_path)) == (0, {})
    assert result.stdout.count("new ") >= 11


def test_an_upgrade_shows_the_difference(run: Run, install: Run, tmp_path: Path) -> None:
    """Units of an older version are replaced, with the lines that differ; the operator's files are not looked at."""
    install()
    policy = tmp_path / "etc/athanor/policy.yaml"
    policy.write_text("# mine\nversion: 1\ntenants: {}\n")
    moved = run("install", "--systemd", "--prefix", str(tmp_path), "--command", "/opt/athanor/bin/athanor")
    assert moved.exit_code == 0, moved.output
    assert f"-ExecStart={COMMAND} serve --role gateway" in moved.stdout
    assert "+ExecStart=/opt/athanor/bin/athanor serve --role gateway" in moved.stdout
    assert "sha256" not in moved.stdout
    assert "ExecReload=/opt/athanor/bin/athanor reload" in (tmp_path / GATEWAY).read_text()
    assert policy.read_text().startswith("# mine")


def test_edits_by_hand_are_not_lost_in_silence(install: Run, tmp_path: Path, run: Run) -> None:
    """A unit that somebody has changed is neither replaced nor removed, unless that is said."""
    install()
    unit = tmp_path / GATEWAY
    edited = unit.read_text().replace("CPUWeight=1000", "CPUWeight=900")
    unit.write_text(edited)
    before = contents(tmp_path)
    for refused in (install(), run("uninstall", "--prefix", str(tmp_path), "--purge")):
        assert refused.exit_code == 1
        assert "systemctl edit" in refused.stderr
        assert contents(tmp_path) == before
    assert "-CPUWeight=900" in install("--dry-run").stdout
    assert install("--force").exit_code == 0
    assert "CPUWeight=1000" in unit.read_text()


def test_uninstall_keeps_keys_and_purge_does_not(run: Run, install: Run, tmp_path: Path) -> None:
    """The services go; configuration, policy, keys and models stay until a purge leaves nothing at all."""
    install()
    wants = tmp_path / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir()
    (wants / "athanor.target").symlink_to("/etc/systemd/system/athanor.target")
    (tmp_path / "var/lib/athanor-supervisor/audit").mkdir(parents=True)
    drop_in = tmp_path / f"{GATEWAY}.d/override.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\n")
    assert run("uninstall", "--prefix", str(tmp_path), "--dry-run").exit_code == 0
    assert (tmp_path / GATEWAY).exists()
    assert run("uninstall", "--prefix", str(tmp_path)).exit_code == 0
    left = set(contents(tmp_path))
    assert {"etc/athanor/pepper", "etc/athanor/policy.yaml", f"{GATEWAY}.d/override.conf"} < left
    assert not any(name.endswith((".target", ".slice", ".service", "athanor.conf")) for name in left)
    assert run("uninstall", "--prefix", str(tmp_path), "--purge").exit_code == 0
    assert [path for path in tmp_path.rglob("*") if "athanor" in path.name or path.is_symlink()] == []
    assert "nothing to do" in run("uninstall", "--prefix", str(tmp_path), "--purge").stdout


def test_a_purge_follows_no_link(run: Run, install: Run, tmp_path: Path) -> None:
    """A link in place of the state directory is removed, and what it leads to is not."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    (root / "var/lib").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    (root / "var/lib/athanor").symlink_to(elsewhere)
    assert run("uninstall", "--prefix", str(root), "--purge").exit_code == 0
    assert not (root / "var/lib/athanor").is_symlink()
    assert (elsewhere / "precious").exists()


def test_half_a_pair_of_secrets_is_refused(install: Run, tmp_path: Path) -> None:
    """A key table whose pepper is gone is no reason to make a new pepper: every key would be void."""
    install()
    (tmp_path / "etc/athanor/pepper").unlink()
    result = install()
    assert result.exit_code == 1
    assert "only one is there" in result.stderr
    assert not (tmp_path / "etc/athanor/pepper").exists()


def test_packaged_units_are_left_to_the_package(run: Run, install: Run, tmp_path: Path) -> None:
    """Where a package brought the units, only what is missing of the first configuration is made."""
    for file in render(read_sources(source_folder()), COMMAND, PACKAGE_PLACE):
        (tmp_path / file.path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file.path).write_text(file.content)
    assert install().exit_code == 0
    assert not (tmp_path / "etc/systemd").exists()
    assert (tmp_path / "etc/athanor/pepper").exists()
    refused = run("uninstall", "--prefix", str(tmp_path))
    assert (refused.exit_code, "apt remove athanor" in refused.stderr) == (1, True)


def test_commands_that_services_cannot_run(run: Run, tmp_path: Path) -> None:
    """Relative or with spaces: refused; hidden by the units: known."""
    for wrong in ("bin/athanor", "/opt/my programs/athanor"):
        result = run("install", "--systemd", "--prefix", str(tmp_path), "--command", wrong)
        assert (result.exit_code, "absolute path" in result.stderr) == (1, True)
    assert contents(tmp_path) == {}
    seen = [Path("/opt/athanor"), Path("/homestead/x")]
    unseen = [Path("/", *parts) for parts in (("home", "x", "venv"), ("root", "x"), ("tmp",), ("run", "user", "7"))]
    assert hidden([*seen, *unseen]) == tuple(unseen)


def test_one_must_say_systemd_and_be_root(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is guessed, and the refusal comes before the work."""
    assert run("install").exit_code == 2
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for words in (("install", "--systemd"), ("uninstall",)):
        result = run(*words)
        assert (result.exit_code, "needs root" in result.stderr) == (1, True)


def test_seals() -> None:
    """What we wrote is known as ours until a byte of it changes."""
    text = seal("[Unit]\n")
    assert is_untouched(text)
    assert not is_untouched(text + "#")
    assert not is_untouched("[Unit]\n")


def test_rendered_units_are_accepted_by_systemd(install: Run, tmp_path: Path) -> None:
    """``systemd-analyze verify`` has nothing to say about what was written."""
    program, system = shutil.which("systemd-analyze"), Path("/usr/lib/systemd/system")
    if program is None or not system.is_dir():
        pytest.skip("no systemd on this machine")
    shutil.copytree(system, tmp_path / "usr/lib/systemd/system", symlinks=True)
    install()
    command = tmp_path / COMMAND[1:]
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    names = [path.name for path in (tmp_path / "etc/systemd/system").iterdir()]
    argv = [program, "verify", "--man=no", f"--root={tmp_path}", *names]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout + done.stderr == ""
