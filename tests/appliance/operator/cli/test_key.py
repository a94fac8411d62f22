"""The ``key`` commands: the key works, is shown once, and the table is never half written."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from appliance.common.credentials import read_key_table
from appliance.common.key_uses import write_uses
from appliance.common.keys import issue, secret_name, serialise_records
from appliance.common.status import KeysStatus
from appliance.operator.cli.key import create_key
from tests.appliance.admin_server import FakeAppliance
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


def listed(run: Run, *args: str) -> list[dict[str, object]]:
    """Rows of ``key list``."""
    result = run("key", "list", *args, "--credentials", "credentials.json", "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["keys"]


def test_a_key_has_an_end_and_scopes(run: Run, folder: Path) -> None:
    """What is asked for is in the table and in the list; without (control) there is neither."""
    created(run, "acme", "--id", "acme-1", "--expires", "90d", "--scope", "embeddings", "--scope", "models")
    created(run, "acme", "--id", "acme-2")
    first, second = listed(run)
    assert first["scopes"] == ["embeddings", "models"] and second["scopes"] is None
    days = (datetime.fromisoformat(str(first["expires"])) - datetime.now(UTC)) / timedelta(days=1)
    assert 89.9 < days <= 90 and second["expires"] is None
    assert (first["tenant"], first["state"], first["last_used"]) == ("acme", "active", None)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--expires", "yesterday"), "is no time"),
        (("--expires", "2020-01-01"), "is past"),
        (("--expires", "2030-01-01T00:00"), "has no zone"),
        (("--expires", "0d"), "is no time"),
        (("--scope", "everything"), "is no scope; take generate"),
    ],
)
def test_bad_limits_are_refused(run: Run, folder: Path, args: tuple[str, ...], message: str) -> None:
    """No table is made for a key that cannot be."""
    result = run("key", "create", "acme", *args, "--credentials", "credentials.json")
    assert result.exit_code == 1 and message in result.stderr
    assert not (folder / "credentials.json").exists()


def test_a_rotation_leaves_two_secrets(run: Run, folder: Path) -> None:
    """The id stays, old and new secret hold, and the list has both. A second rotation is refused until the older one
    has ended, or with --replace ends it now."""
    old = created(run, "acme", "--id", "acme-1", "--scope", "models")["key"]
    rotate = ("key", "rotate", "acme-1", "--credentials", "credentials.json", "-o", "json")
    new = json.loads(run(*rotate, "--overlap", "12h").stdout)
    assert verified(folder, old) == verified(folder, new["key"]) == "acme-1"
    assert new["credential"] == "key:acme-1" and new["old_until"]
    assert [(row["state"], row["scopes"]) for row in listed(run)] == [("active", ["models"]), ("old", ["models"])]
    refused = run(*rotate)
    assert refused.exit_code == 1 and "has two secrets until" in refused.stderr
    third = json.loads(run(*rotate, "--replace", "--overlap", "0").stdout)
    assert third["old_until"] is None
    assert (verified(folder, old), verified(folder, new["key"]), verified(folder, third["key"])) == (
        None,
        None,
        "acme-1",
    )


def test_revoking_names_keys_or_a_tenant(run: Run, folder: Path) -> None:
    """Keys by id, or all that were made for a tenant; others hold (control). An unknown one changes nothing."""
    keys = {name: created(run, name[:4], "--id", name)["key"] for name in ("acme-1", "acme-2", "beta-1")}
    revoke = ("key", "revoke", "--credentials", "credentials.json", "-o", "json")
    before = (folder / "credentials.json").read_bytes()
    for args, message in ((("nobody",), "no key nobody"), (("acme-1", "nobody"), "no key nobody")):
        result = run(*revoke, *args)
        assert result.exit_code == 1 and message in result.stderr
    assert (folder / "credentials.json").read_bytes() == before
    assert run(*revoke).exit_code == 2
    assert json.loads(run(*revoke, "acme-1").stdout) == {"revoked": ["acme-1"]}
    assert verified(folder, keys["acme-1"]) is None and verified(folder, keys["acme-2"]) == "acme-2"
    assert json.loads(run(*revoke, "--tenant", "acme").stdout) == {"revoked": ["acme-2"]}
    assert [verified(folder, key) for key in keys.values()] == [None, None, "beta-1"]
    assert {row["id"]: row["state"] for row in listed(run)} == {
        "acme-1": "revoked",
        "acme-2": "revoked",
        "beta-1": "active",
    }
    result = run(*revoke, "--tenant", "gamma")
    assert result.exit_code == 1 and "was made for the tenant gamma" in result.stderr


def test_many_keys_are_imported_at_once(run: Run, folder: Path) -> None:
    """Fresh keys are printed; whole ones that were made elsewhere are taken and not printed again."""
    moved, _ = issue("moved-1", b"another pepper of thirty-two byte")
    lines = [
        {"tenant": "acme"},
        {"tenant": "acme", "id": "acme-ci", "expires": "4w", "scopes": ["generate"]},
        {"tenant": "beta", "id": "moved-1", "key": moved},
    ]
    (folder / "new.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    result = run("key", "import", "new.jsonl", "--credentials", "credentials.json", "-o", "json")
    assert result.exit_code == 0, result.output
    first, second, third = json.loads(result.stdout)["keys"]
    assert verified(folder, first["key"]) == first["id"]
    assert verified(folder, second["key"]) == "acme-ci"
    assert (third["key"], verified(folder, moved)) == ("", "moved-1")
    assert [row["tenant"] for row in listed(run, "--tenant", "beta")] == ["beta"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ('{"tenant": "acme", "tenant": "beta"}', "line 2: not valid JSON"),
        ("[]", "line 2: expected an object"),
        ('{"tenant": "acme", "limit": 1}', "line 2: expected an object"),
        ('{"tenant": "A"}', "line 2: 'A' is no tenant id"),
        ('{"tenant": "acme", "id": 1}', "line 2: id must be a text"),
        ('{"tenant": "acme", "key": "ath_a_b"}', "needs its id"),
        ('{"tenant": "acme", "scopes": "models"}', "line 2: scopes must be a list"),
        ('{"tenant": "acme", "scopes": ["root"]}', "line 2: 'root' is no scope"),
        ('{"tenant": "acme", "expires": "1970-01-01"}', "line 2: '1970-01-01' is past"),
        ('{"tenant": "acme", "id": "a", "key": "secret"}', "the key is not of the form"),
        ('{"tenant": "acme", "id": "first"}', "there is a key first already"),
    ],
)
def test_one_bad_line_refuses_all(run: Run, folder: Path, line: str, message: str) -> None:
    """Nothing of a list is taken when a line of it cannot be, and no key is repeated in the message."""
    created(run, "acme", "--id", "there")
    before = (folder / "credentials.json").read_bytes()
    (folder / "new.jsonl").write_text('{"tenant": "acme", "id": "first"}\n' + line)
    result = run("key", "import", "new.jsonl", "--credentials", "credentials.json")
    assert result.exit_code == 1 and message in result.stderr.replace("\n", " ")
    assert "ath_a_b" not in result.stderr and "secret" not in result.stderr.replace("the key is", "")
    assert (folder / "credentials.json").read_bytes() == before


def test_the_last_use_is_shown(run: Run, folder: Path) -> None:
    """From the folder of the audit log; each secret has its own."""
    created(run, "acme", "--id", "acme-1")
    record = read_key_table(folder / "credentials.json", folder / "pepper").records["acme-1"]
    (folder / "audit").mkdir()
    write_uses(folder / "audit", {secret_name("acme-1", record.created): 1_800_000_000})
    (row,) = listed(run)
    assert row["last_used"] == "2027-01-15T08:00:00+00:00"
    shown = run("key", "list", "--credentials", "credentials.json")
    assert "2027-01-15 08:00" in shown.stdout and "LAST USED" in shown.stdout


def test_a_change_is_said_to_be_in_force(run: Run, folder: Path, appliance: FakeAppliance) -> None:
    """The command waits for the appliance that has this table, and says when its digest is in force, or why it is not.
    One that has another table is named; none at all is no mistake."""
    created(run, "acme", "--id", "acme-1")
    table = read_key_table(folder / "credentials.json", folder / "pepper")
    gone = serialise_records({"acme-1": table.records["acme-1"].revoke()}).encode()
    status = KeysStatus(file=str(folder / "credentials.json"), digest="", keys=1, loaded_at=0.0)
    appliance.keys = replace(status, digest=hashlib.sha256(gone).hexdigest())
    revoke = ("key", "revoke", "acme-1", "--credentials", "credentials.json", "--admin")
    assert "in force after" in run(*revoke, appliance.url).stdout
    appliance.keys = replace(status, problem="credentials.json: line 3: broken")
    assert "not in force: credentials.json: line 3: broken" in run(*revoke, appliance.url).stderr
    appliance.keys = replace(status, file="/etc/athanor/credentials.json")
    assert "another key table, /etc/athanor" in run(*revoke, appliance.url).stdout.replace("\n", " ")
    assert "no appliance answers" in run(*revoke, "http://127.0.0.1:1").stdout
