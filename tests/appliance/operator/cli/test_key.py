"""``key create``: the key works, is shown once, and the table is never half written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from appliance.common.credentials import read_key_table
from appliance.operator.cli.key import create_key
from tests.appliance.operator.cli.conftest import Run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def created(run: Run, *args: str) -> dict[str, str]:
    """Create a key in the working directory; gives what ``-o json`` tells."""
    result = run("key", "create", *args, "--credentials", "credentials.json", "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def verified(folder: Path, key: str) -> str | None:
    """The id that the gateway would find for this key."""
    table = read_key_table(folder / "credentials.json", folder / "pepper")
    return table.verify(key, datetime.now(UTC))


def test_a_created_key_is_taken(run: Run, folder: Path) -> None:
    """The first key makes table and pepper, the second joins it; both verify, a wrong one not."""
    first = created(run, "acme")
    second = created(run, "acme", "--id", "acme-ci")
    assert first["id"].startswith("acme-")
    assert second == {"tenant": "acme", "id": "acme-ci", "key": second["key"], "credential": "key:acme-ci"}
    assert verified(folder, first["key"]) == first["id"]
    assert verified(folder, second["key"]) == "acme-ci"
    assert verified(folder, second["key"][:-1] + "g") is None


def test_files_are_private_and_hold_no_key(run: Run, folder: Path) -> None:
    """Both files have mode 0600, no draft is left, and the plain key is in none of them."""
    key = created(run, "acme")["key"]
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["credentials.json", "pepper"]
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o600
        assert key.rpartition("_")[2].encode() not in file.read_bytes()


def test_what_is_printed(run: Run, folder: Path) -> None:
    """The key stands alone on its line, unwrapped, and the policy lines to add are beside it."""
    result = run("key", "create", "acme", "--id", "acme-1", "--credentials", "credentials.json", columns=60)
    assert result.exit_code == 0
    lines = [line.strip() for line in result.stdout.splitlines()]
    (key,) = [line for line in lines if line.startswith("ath_acme-1_")]
    assert len(key) == len("ath_acme-1_") + 64
    assert 'credentials: ["key:acme-1"]' in lines
    assert 'models: ["*"]' in lines
    assert "acme:" in lines


def test_the_default_is_the_demos_folder(run: Run, folder: Path) -> None:
    """Without --credentials the key goes to .athanor, which has to be there."""
    result = run("key", "create", "acme")
    assert result.exit_code == 1
    assert "there is no folder .athanor; run `athanor demo` first" in result.stderr
    (folder / ".athanor").mkdir()
    assert run("key", "create", "acme").exit_code == 0
    assert (folder / ".athanor" / "credentials.json").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("acme", "--id", "taken"), "there is a key taken already"),
        (("acme", "--id", "-bad"), "key id is not usable"),
        (("acme", "--id", "x" * 64), "key id is not usable"),
        (("Acme Inc",), "'Acme Inc' is no tenant id"),
        (("acme\n", "--id", "x"), "is no tenant id"),
        (("acme", "--id", "../x"), "key id is not usable"),
    ],
)
def test_refusals_change_nothing(run: Run, folder: Path, args: tuple[str, ...], message: str) -> None:
    """A taken or unusable id ends with 1 and leaves the table as it was."""
    created(run, "acme", "--id", "taken")
    before = (folder / "credentials.json").read_bytes()
    result = run("key", "create", *args, "--credentials", "credentials.json")
    assert result.exit_code == 1
    assert message in result.stderr
    assert (folder / "credentials.json").read_bytes() == before


def test_a_pepper_or_table_alone_is_refused(run: Run, folder: Path) -> None:
    """Half of the pair is a mistake to be told, never a reason to write over the other half."""
    created(run, "acme")
    (folder / "pepper").rename(folder / "elsewhere")
    result = run("key", "create", "acme", "--credentials", "credentials.json")
    assert result.exit_code == 1
    assert "cannot read pepper" in result.stderr
    (folder / "elsewhere").rename(folder / "pepper")
    (folder / "credentials.json").unlink()
    result = run("key", "create", "acme", "--credentials", "credentials.json")
    assert result.exit_code == 1
    assert "pepper but no key table" in result.stderr.replace("\n", " ")


def test_a_table_open_to_all_is_refused(run: Run, folder: Path) -> None:
    """The command does not quietly go on with a pepper that every user may read."""
    created(run, "acme")
    (folder / "pepper").chmod(0o644)
    result = run("key", "create", "acme", "--credentials", "credentials.json")
    assert result.exit_code == 1
    assert "open to every user" in result.stderr


def test_two_at_once_lose_no_key(folder: Path) -> None:
    """Commands that run at the same time each find their key in the table afterwards."""
    code = (
        "import sys; from pathlib import Path; from appliance.operator.cli.key import create_key\n"
        "for n in range(5):\n"
        "    name = f'{sys.argv[1]}-{n}'\n"
        "    create_key('acme', name, Path('credentials.json'), Path('pepper'))\n"
    )
    root = str(Path(__file__).resolve().parents[4])
    commands = [
        subprocess.Popen([sys.executable, "-c", code, name], env=os.environ | {"PYTHONPATH": root}, cwd=folder)
        for name in ("a", "b", "c")
    ]
    assert [command.wait(60) for command in commands] == [0, 0, 0]
    table = read_key_table(folder / "credentials.json", folder / "pepper")
    assert set(table.records) == {f"{name}-{n}" for name in "abc" for n in range(5)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_leaves_the_files_to_their_owner(folder: Path) -> None:
    """When root adds a key, the service that reads the table still owns it."""
    os.chown(folder, 12_345, 23_456)
    create_key("acme", "acme-1", folder / "credentials.json", folder / "pepper")
    create_key("acme", "acme-2", folder / "credentials.json", folder / "pepper")
    for name in ("credentials.json", "pepper"):
        owner = (folder / name).stat()
        assert (owner.st_uid, owner.st_gid) == (12_345, 23_456)
