"""The form of the state: brought forward with a backup, refused when it is newer, put back by the backup."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from appliance.common import backup, schema
from appliance.common.errors import ConfigError
from appliance.common.schema import Migration
from appliance.common.version import VERSION
from tests.appliance.operator.cli.conftest import Run, run

__all__ = ["run"]


@pytest.fixture
def installed(run: Run, tmp_path: Path) -> Path:
    """A root with an installation of this version, a keyring and a link in its folder."""
    result = run("install", "--systemd", "--prefix", str(tmp_path), "--command", "/usr/bin/athanor")
    assert result.exit_code == 0, result.output
    etc = tmp_path / "etc/athanor"
    (etc / "policy.d").mkdir()
    (etc / "policy.d/more.yaml").write_text("version: 1\n")
    (etc / "keyring").mkdir()
    (etc / "keyring/alpha").write_text("wrapped")
    (etc / "link").symlink_to("/etc/hostname")
    return tmp_path


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of the operator's folder with its mode."""
    etc = root / "etc/athanor"
    return {
        str(path.relative_to(etc)): (path.read_bytes(), path.stat().st_mode)
        for path in etc.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def rename(etc: Path) -> None:
    """A step: the policy moves."""
    (etc / "policy.yaml").rename(etc / "policy.d/all.yaml")


def note(etc: Path) -> None:
    """Another step, on top of it."""
    path = etc / "policy.d/all.yaml"
    path.write_text("# noted\n" + path.read_text())


def break_off(etc: Path) -> None:
    """A step that fails after it has changed something."""
    (etc / "policy.d/more.yaml").unlink()
    (etc / "athanor.yaml").write_text("half")
    raise OSError(28, "No space left on device")


def steps(monkeypatch: pytest.MonkeyPatch, *work) -> None:
    """As a later version with these steps would be."""
    monkeypatch.setattr(schema, "MIGRATIONS", tuple(Migration(one.__name__, one) for one in work))


def install(run: Run, root: Path):
    """Install again, by whatever version is there now."""
    return run("install", "--systemd", "--prefix", str(root), "--command", "/usr/bin/athanor")


def number(root: Path) -> int:
    """The form that the state says it has."""
    found = schema.read_schema(root / schema.STATE)
    assert found is not None and not found.migrating
    return found.number


def test_a_first_installation_says_its_form(installed: Path) -> None:
    """And what was installed before there were forms has the first one."""
    assert number(installed) == schema.known()
    schema.check(installed / schema.STATE)
    (installed / schema.STATE / schema.NAME).unlink()
    found = schema.plan(installed)
    assert (found.found.number, found.unmarked, found.idle) == (schema.FIRST, True, False)
    schema.migrate(installed, found)
    assert schema.plan(installed).idle


def test_forward_and_back(installed: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps at once, shown before they are done; the older version refuses what came of them, naming the newer one
    and the way back; restored, every file is as it was, the keyring untouched, and forward works again."""
    before = contents(installed)
    steps(monkeypatch, rename, note)
    dry = run("install", "--systemd", "--prefix", str(installed), "--command", "/usr/bin/athanor", "--dry-run")
    assert "rename" in dry.stdout and "note" in dry.stdout
    assert contents(installed) == before
    assert install(run, installed).exit_code == 0
    assert number(installed) == 3
    assert contents(installed)["policy.d/all.yaml"][0].startswith(b"# noted")
    assert "policy.yaml" not in contents(installed)
    (installed / "etc/athanor/keyring/alpha").write_text("rotated since")
    after = contents(installed)

    steps(monkeypatch)
    refused = install(run, installed)
    assert (refused.exit_code, "athanor state restore" in refused.stderr) == (1, True)
    with pytest.raises(ConfigError, match="has the form 3"):
        schema.check(installed / schema.STATE)
    assert contents(installed) == after
    assert run("state", "restore", "--prefix", str(installed)).exit_code == 0
    assert number(installed) == 1
    assert contents(installed) == before | {"keyring/alpha": after["keyring/alpha"]}
    assert install(run, installed).exit_code == 0
    assert backup.numbers(installed) == (1, 3)

    steps(monkeypatch, rename, note)
    with pytest.raises(ConfigError, match="brings it forward"):
        schema.check(installed / schema.STATE)
    assert install(run, installed).exit_code == 0
    assert number(installed) == 3


def test_a_step_that_fails_changes_nothing(installed: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the step and why; files, modes and form are those of before, also of the steps that went well."""
    before = contents(installed)
    steps(monkeypatch, rename, break_off)
    failed = install(run, installed)
    assert (failed.exit_code, "break_off" in failed.stderr) == (1, True)
    assert contents(installed) == before
    assert number(installed) == 1


def test_a_power_cut_is_made_good(installed: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off in the middle of a step, nothing serves from the state, and the next run begins from the backup."""
    before = contents(installed)

    def cut(etc: Path) -> None:
        rename(etc)
        raise KeyboardInterrupt

    steps(monkeypatch, cut)
    with pytest.raises(KeyboardInterrupt):
        schema.migrate(installed, schema.plan(installed))
    assert contents(installed) != before
    with pytest.raises(ConfigError):
        schema.check(installed / schema.STATE)
    steps(monkeypatch, rename)
    assert install(run, installed).exit_code == 0
    assert number(installed) == 2
    assert contents(installed)["policy.d/all.yaml"] == before["policy.yaml"]


def test_backups_are_roots_alone_and_hold_no_keyring(installed: Path) -> None:
    """They hold the pepper: nobody else reads them. Links are not followed, other folders not looked into."""
    taken = backup.take(installed, 1, VERSION)
    place = installed / backup.BACKUPS
    folder = place / taken.name
    assert place.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700
    names = [one[0] for one in json.loads((folder / backup.INDEX).read_text())["files"]]
    assert {"pepper", "policy.yaml", "credentials.json", "athanor.yaml", "policy.d/more.yaml"} == set(names)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    os.truncate(installed / "etc/athanor/policy.yaml", backup.MAX_TOTAL_BYTES + 1)
    with pytest.raises(ConfigError, match="has over"):
        backup.take(installed, 1, VERSION)
    assert backup.numbers(installed) == (1,)


def test_backups_are_named_by_what_and_when(installed: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's name and ``athanor state show`` say of which form and version a backup is and when it was taken; a
    later one of the same form takes its place; a restore names both backups and the version to install, which the state
    is of again. Control: one that an older version took, without version and time, is found and said to have none."""
    first = backup.take(installed, 1, "0.0.9", now=1_790_000_000)
    assert first.name == "form-1-of-0.0.9-20260921T141320Z"
    second = backup.take(installed, 1, "0.1.0", now=1_790_000_060)
    assert [path.name for path in (installed / backup.BACKUPS).iterdir()] == [second.name]
    steps(monkeypatch, rename)
    assert install(run, installed).exit_code == 0
    (name,) = (path.name for path in (installed / backup.BACKUPS).iterdir())
    assert name.startswith(f"form-1-of-{VERSION}-")
    shown = run("state", "show", "--prefix", str(installed), columns=200).stdout
    assert re.search(
        rf"^  {re.escape(name)}   form 1, athanor {VERSION}, taken \S+ \S+ UTC, 5 files$", shown, re.MULTILINE
    )
    restored = run("state", "restore", "--prefix", str(installed), columns=200)
    assert restored.exit_code == 0, restored.output
    assert f"what was there is kept as form-2-of-{VERSION}-" in restored.stdout
    assert f"in place again is {name}: form 1, athanor {VERSION}" in restored.stdout
    assert f"install athanor {VERSION} before the next start" in restored.stdout
    assert "before" not in (schema.read_schema(installed / schema.STATE) or schema.Schema(0, "before")).written_by
    folder = installed / backup.BACKUPS / name
    index = json.loads((folder / backup.INDEX).read_text())
    (folder / backup.INDEX).write_text(json.dumps({"written_by": "9.9.0", "files": index["files"]}))
    folder.rename(folder.with_name("schema-1"))
    found = backup.find(installed, 1)
    assert (found.name, found.state_of, found.taken_at) == ("schema-1", "", 0)
    assert found.about == "form 1, a version of athanor that is not recorded, 5 files"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": "1", "written_by": ""}',
        '{"schema": 0, "written_by": ""}',
        '{"schema": true, "written_by": ""}',
        "[" * 4_000,
    ],
)
def test_a_damaged_note_is_told(installed: Path, text: str) -> None:
    """Whatever is in it, nothing is served from a state of unknown form, and nothing is migrated."""
    (installed / schema.STATE / schema.NAME).write_text(text)
    for look in (lambda: schema.check(installed / schema.STATE), lambda: schema.plan(installed)):
        with pytest.raises(ConfigError, match="which form"):
            look()


def test_without_a_backup_there_is_no_way_back(installed: Path, run: Run) -> None:
    """It is said, and nothing changes."""
    before = contents(installed)
    refused = run("state", "restore", "--prefix", str(installed))
    assert (refused.exit_code, "no backup" in refused.stderr) == (1, True)
    assert contents(installed) == before
    shown = json.loads(run("state", "show", "--prefix", str(installed), "-o", "json").stdout)
    assert (shown["form"], shown["known"], shown["backups"]) == (schema.known(), schema.known(), [])
