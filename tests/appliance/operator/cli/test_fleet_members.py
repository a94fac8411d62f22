"""``fleet member-key`` and ``sign-members``: from a host's keys to a list that the host accepts."""

from __future__ import annotations

import json
from pathlib import Path

from appliance.common.kv_store_config import MembersConfig
from appliance.common.members import read_members
from appliance.operator.cli import exits
from appliance.supervisor.fleet_keys.membership import join
from tests.appliance.operator.cli.conftest import Run


def line(run: Run, folder: Path, host: str) -> str:
    """The line that a host prints."""
    shown = run("fleet", "member-key", host, "--key", str(folder / f"{host}.key"))
    assert shown.exit_code == exits.OK, shown.output
    return shown.stdout


def test_hosts_accept_what_was_signed_of_their_lines(run: Run, tmp_path: Path) -> None:
    """Two hosts print their lines, twice the same; the authority signs them; both hosts are members. The next list has
    the next version and the fleet and key server of the last one. The public key is the one for the configuration."""
    lines, out, key = (str(tmp_path / name) for name in ("lines", "members", "authority.key"))
    first = line(run, tmp_path, "host-a")
    assert line(run, tmp_path, "host-a") == first
    Path(lines).write_text(first + line(run, tmp_path, "host-b"))
    signed = run(
        "fleet", "sign-members", lines, "--fleet", "edge", "--key-server", "host-a", "--key", key, "--out", out
    )
    assert signed.exit_code == exits.OK, signed.output
    authority = signed.stdout.strip()
    values = {"file": out, "authority": authority, "key": tmp_path / "host-b.key", "accepted": tmp_path / "accepted"}
    found = join(MembersConfig.model_validate({"host": "host-b", **values}))
    assert (found.members.version, found.is_key_server, found.members.fleet) == (1, False, "edge")
    Path(lines).write_text(first + line(run, tmp_path, "host-b") + "\n" + line(run, tmp_path, "host-c"))
    signed = run("fleet", "sign-members", lines, "--key", key, "--out", out, "-o", "json")
    told = json.loads(signed.stdout)
    assert (told["version"], told["key_server"], told["authority"]) == (2, "host-a", authority)
    assert told["members"] == ["host-a", "host-b", "host-c"]
    assert read_members(Path(out).read_bytes(), bytes.fromhex(authority)).version == 2


def test_what_cannot_be_signed_is_refused(run: Run, tmp_path: Path) -> None:
    """A first list without its fleet, a version that does not grow, one host twice, what is no line, a list of another
    authority in the way, and a name that no host has: refused, and the list that is there stays."""
    lines, out, key = tmp_path / "lines", tmp_path / "members", tmp_path / "authority.key"
    first = line(run, tmp_path, "host-a") + line(run, tmp_path, "host-b")
    lines.write_text(first)
    command = ["fleet", "sign-members", str(lines), "--key", str(key), "--out", str(out)]

    def refused(words: str, *more: str) -> None:
        done = run(*command, *more)
        assert done.exit_code == exits.REFUSED and words in " ".join(done.output.split())

    refused("name --fleet and --key-server")
    named = ("--fleet", "edge", "--key-server", "host-a")
    assert run(*command, *named, "--version", "5").exit_code == exits.OK
    data = out.read_bytes()
    refused("versions only grow", "--version", "5")
    lines.write_text(first + first.splitlines()[0].replace("member host-a", "member host-z"))
    refused("two members have one key of X25519")
    lines.write_text("member host-a\n")
    refused("no line of")
    lines.write_text(first)
    refused("not signed by the authority", "--key", str(tmp_path / "other.key"))
    refused("the key server host-z is none of", "--key-server", "host-z")
    named_wrong = run("fleet", "member-key", "Host A", "--key", str(tmp_path / "x.key"))
    assert named_wrong.exit_code == exits.REFUSED and "names no host" in " ".join(named_wrong.output.split())
    assert not (tmp_path / "x.key").exists(), "no key for a name that no list can have"
    assert out.read_bytes() == data
