"""``athanor policy history``, ``apply`` and ``rollback`` over real files, against a real admin listener."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from appliance.common.policy_history import PolicyHistory, relative
from appliance.common.policy_signature import check_signed
from appliance.common.shadow_status import ShadowRow, ShadowStatus
from appliance.common.status import ReloadOutcome
from appliance.operator.placement import ASIDE, Placement
from policy.files import read_sources
from policy.loader import load_policy
from tests.appliance.admin_server import FakeAppliance
from tests.appliance.operator.cli.conftest import Run

TENANT = "version: 1\ntenants: {%s: {credentials: ['key:%s'], models: ['*'], weight: %d}}\n"
NOBODY = "http://127.0.0.1:9"
"""Nothing answers there."""


class Place:
    """A configuration with a policy, a drop-in, and an audit folder with a history."""

    def __init__(self, folder: Path, policy: str = "policy.yaml") -> None:
        self.folder = folder
        self.policy = folder / policy
        self.config = folder / "athanor.yaml"
        model = {"name": "m", "path": str(folder)}
        values = {"run_dir": str(folder / "run"), "policy": policy, "models": [model], "audit": {"directory": "audit"}}
        values |= {"credentials": "keys", "pepper": "pepper"}
        self.config.write_text(json.dumps(values))
        self.history = PolicyHistory(folder / "audit")
        (folder / "audit").mkdir()
        (folder / "policy.d").mkdir()
        self.write("b", 1, "policy.d/b.yaml")

    def write(self, tenant: str, weight: int, name: str = "policy.yaml") -> Path:
        """Write a file with one tenant."""
        path = self.folder / name
        path.write_text(TENANT % (tenant, tenant, weight))
        return path

    def keep(self, now: int) -> str:
        """Keep what is there as the supervisor does; gives its digest."""
        sources = read_sources(self.policy)
        digest = load_policy(sources).digest
        self.history.record(digest, *relative(sources, self.policy), now)
        return digest

    def digest(self) -> str:
        """Digest of what is there."""
        return load_policy(read_sources(self.policy)).digest

    def texts(self) -> dict[str, str]:
        """All policy files."""
        paths = [self.folder / "policy.yaml", *(self.folder / "policy.d").iterdir()]
        return {path.name: path.read_text() for path in paths if path.exists()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A place with two versions: alpha with weight 1, then with 5."""
    place = Place(tmp_path)
    for now, weight in ((1_790_000_000_000, 1), (1_790_000_060_000, 5)):
        place.write("a", weight)
        place.keep(now)
    return place


def test_history_lists_versions_and_tells_what_one_changed(run: Run, place: Place) -> None:
    """The newest first with their times; one version in sentences with its files; JSON has the texts; an unknown one is
    refused, and so is a configuration without an audit log."""
    config = ("--config", str(place.config))
    table = run("policy", "history", *config, columns=120).stdout.splitlines()
    assert [line.split()[0] for line in table[:3]] == ["VERSION", "2", "1"]
    assert "2026-09-21 14:14 UTC" in table[1]
    assert "policy.yaml, policy.d/b.yaml" in table[1]
    told = run("policy", "history", "2", *config)
    assert "a weight of 5 parts in fair service instead of 1" in " ".join(told.stdout.split())
    assert "# policy.d/b.yaml" in told.stdout
    found = json.loads(run("policy", "history", "1", *config, "-o", "json").stdout)
    assert (found["version"], found["texts"]["policy.yaml"]) == (1, TENANT % ("a", "a", 1))
    assert [
        row["version"] for row in json.loads(run("policy", "history", *config, "-o", "json").stdout)["versions"]
    ] == [2, 1]
    unknown = run("policy", "history", "9", *config)
    assert (unknown.exit_code, "there is no version 9" in f"{unknown.stderr}{unknown.exception}") == (1, True)
    values = json.loads(place.config.read_text())
    place.config.write_text(json.dumps({name: value for name, value in values.items() if name != "audit"}))
    assert "kept beside the audit log" in run("policy", "history", *config).stderr


def test_history_since_tells_what_changed(run: Run, place: Place) -> None:
    """One command tells the changes of a time, the oldest first, with their rules; none before it, and an end of the
    line where nothing is older. Control: a time without changes has none."""
    place.write("a", 7)
    place.keep(1_790_000_120_000)
    config = ("--config", str(place.config))
    told = " ".join(run("policy", "history", "--since", "2026-09-21T14:14:10Z", *config).stdout.split())
    assert "version 2 2026-09-21 14:14 UTC a + has a weight of 5 parts" in told
    assert told.index("a weight of 5") < told.index("a weight of 7 parts in fair service instead of 5")
    assert "version 1" not in told
    assert "oldest version that is kept" in run("policy", "history", "--since", "2026-09", *config).stdout
    found = json.loads(run("policy", "history", "--since", "2026-09-21T14:15:10Z", *config, "-o", "json").stdout)
    (only,) = found["versions"]
    assert (only["version"], only["changes"][0]["rule"]) == (3, "tenants.a.weight")
    assert "no policy came into force" in run("policy", "history", "--since", "2026-10", *config).stdout
    assert run("policy", "history", "2", "--since", "7d", *config).exit_code == 2


def test_apply_replaces_the_file_and_reloads(run: Run, place: Place, appliance: FakeAppliance) -> None:
    """The changes are told, the file has the new text and the old mode, drop-ins stay, and the appliance was asked."""
    place.policy.chmod(0o604)
    new = place.write("a", 9, "new.yaml")
    told = run("policy", "apply", str(new), "--config", str(place.config), "--admin", appliance.url, "--yes")
    assert told.exit_code == 0, told.output
    assert "a weight of 9 parts in fair service instead of 5" in " ".join(told.stdout.split())
    assert "in force" in told.stdout
    assert appliance.reloads == 1
    assert place.texts() == {"policy.yaml": TENANT % ("a", "a", 9), "b.yaml": TENANT % ("b", "b", 1)}
    assert place.policy.stat().st_mode & 0o777 == 0o604


def test_apply_that_is_refused_changes_nothing(run: Run, place: Place, appliance: FakeAppliance) -> None:
    """A policy with problems is told at its own file and never written; one that the appliance refuses is put back."""
    before = place.texts()
    bad = place.folder / "bad.yaml"
    bad.write_text("version: 1\ntenants: {a: {credentials: ['key:a'], modles: ['*']}}\n")
    arguments = ("--config", str(place.config), "--admin", appliance.url, "--yes")
    told = run("policy", "apply", str(bad), *arguments)
    assert told.exit_code == 1
    assert "bad.yaml:2:" in "".join(told.stdout.split("\n"))
    assert (appliance.reloads, place.texts()) == (0, before)
    clash = place.write("b", 1, "clash.yaml")
    told = run("policy", "apply", str(clash), *arguments)
    assert (told.exit_code, "stands in" in told.stdout, place.texts()) == (1, True, before)
    appliance.outcome = ReloadOutcome(ok=False, digest="d", problems=("the pool is too small",), message="no")
    told = run("policy", "apply", str(place.write("a", 9, "new.yaml")), *arguments)
    assert told.exit_code == 1
    assert "everything is as before" in told.stderr
    assert "the pool is too small" in told.stderr
    assert (appliance.reloads, place.texts()) == (1, before)


def test_apply_without_an_appliance_is_for_the_next_start(run: Run, place: Place) -> None:
    """Nothing answers: the file is written, and the answer says when it is in force."""
    told = run(
        "policy",
        "apply",
        str(place.write("a", 9, "new.yaml")),
        "--config",
        str(place.config),
        "--admin",
        NOBODY,
        "--yes",
    )
    assert told.exit_code == 0
    assert "in force at the next start" in " ".join(told.stdout.split())
    assert place.texts()["policy.yaml"] == TENANT % ("a", "a", 9)


def test_apply_that_nobody_waits_for_returns_at_once(run: Run, place: Place, appliance: FakeAppliance) -> None:
    """The file is written and the appliance asked, which carries it out for a caller that has left; one that never
    answers keeps nobody waiting. `--wait` is the default and says so."""
    arguments = ("--config", str(place.config), "--yes", "--no-wait")
    told = run("policy", "apply", str(place.write("a", 9, "new.yaml")), "--admin", appliance.url, *arguments)
    assert told.exit_code == 0, told.output
    assert f"athanor status shows {place.digest()[:12]} once" in " ".join(told.stdout.split())
    assert place.texts()["policy.yaml"] == TENANT % ("a", "a", 9)
    until = time.monotonic() + 10
    while appliance.reloads == 0 and time.monotonic() < until:
        time.sleep(0.01)
    assert appliance.reloads == 1
    with socket.create_server(("127.0.0.1", 0)) as silent:
        admin = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        told = run("policy", "apply", str(place.write("a", 3, "new.yaml")), "--admin", admin, *arguments)
        assert (told.exit_code, time.monotonic() - began < 5) == (0, True)
    told = run("policy", "apply", str(place.write("a", 4, "new.yaml")), "--admin", NOBODY, *arguments)
    assert "in force at the next start" in " ".join(told.stdout.split())
    waits = run("policy", "apply", str(place.write("a", 5, "new.yaml")), "--admin", NOBODY, *arguments[:-1], "--wait")
    assert waits.exit_code == 0


@pytest.mark.parametrize("waits", ["--wait", "--no-wait"])
def test_apply_that_may_not_ask_leaves_the_files(
    run: Run, place: Place, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """Who may not ask whether an appliance runs writes nothing that it could read at its next start: status 3, and the
    old policy. Control: where nothing listens the new one is left."""
    before = place.texts()["policy.yaml"]
    arguments = ("--config", str(place.config), "--admin", NOBODY, "--yes", waits)

    def refuse(*_: object, **_given: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr("http.client.HTTPConnection.request", refuse)
        told = run("policy", "apply", str(place.write("a", 9, "new.yaml")), *arguments)
    assert (told.exit_code, place.texts()["policy.yaml"]) == (3, before)
    assert "the files are as before" in " ".join(told.stderr.split())
    told = run("policy", "apply", str(place.write("a", 9, "new.yaml")), *arguments)
    assert (told.exit_code, place.texts()["policy.yaml"] == before) == (0, False)


def test_the_listener_is_that_of_a_configuration(run: Run, place: Place, appliance: FakeAppliance) -> None:
    """`athanor reload --config` asks the listener that the file names; a second address beside it is a mistake."""
    values = json.loads(place.config.read_text()) | {"listen": {"admin": appliance.url.removeprefix("http://")}}
    place.config.write_text(json.dumps(values))
    told = run("reload", "--config", str(place.config))
    assert (told.exit_code, appliance.reloads) == (0, 1)
    assert run("reload", "--config", str(place.config), "--admin", NOBODY).exit_code == 2
    assert run("reload", "--config", str(place.folder / "none.yaml")).exit_code == 1


def test_a_reload_tells_what_does_not_run_from_what_does_not_answer(run: Run, tmp_path: Path) -> None:
    """Where nobody listens, on loopback or at a socket that is there or not, the exit code is 6. What takes a
    connection and says nothing, or leaves, may have read the files: 3. Other commands have 3 for all."""
    left = tmp_path / "left"
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(left))
    for nobody in (NOBODY, f"unix:{left}", f"unix:{tmp_path / 'none'}"):
        told = run("reload", "--admin", nobody)
        assert told.exit_code == 6 and "nothing answers at" in told.stderr, nobody
        assert run("status", "--admin", nobody).exit_code == 3
    with socket.create_server(("127.0.0.1", 0)) as silent:
        admin = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert run("reload", "--admin", admin, "--timeout", "0.1").exit_code == 3
        silent.accept()[0].close()
        leaving = threading.Thread(target=lambda: silent.accept()[0].close())
        leaving.start()
        assert run("reload", "--admin", admin).exit_code == 3
        leaving.join(20)


def test_apply_that_gets_no_answer_claims_nothing(run: Run, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload that takes too long: the files are as before, and the answer says what is not known."""
    monkeypatch.setattr("appliance.operator.cli.policy_versions.RELOAD_S", 0.1)
    before = place.texts()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        admin = f"http://127.0.0.1:{silent.getsockname()[1]}"
        new = str(place.write("a", 9, "new.yaml"))
        told = run("policy", "apply", new, "--config", str(place.config), "--admin", admin, "--yes")
    assert told.exit_code == 3
    assert "what is in force is not known" in " ".join(told.stderr.split())
    assert place.texts() == before


def test_apply_takes_no_other_kind(run: Run, place: Place) -> None:
    """The configured policy itself and a folder in place of a file are mistakes of the command line."""
    for new in (place.policy, place.folder / "policy.d"):
        told = run("policy", "apply", str(new), "--config", str(place.config), "--admin", NOBODY, "--yes")
        assert told.exit_code == 2, told.output


def test_rollback_puts_every_file_back(run: Run, place: Place, appliance: FakeAppliance) -> None:
    """File and changed drop-in are as they were, a drop-in that came since is kept aside and not read, and the digest
    is that of the version; without a number it is the one before."""
    first = place.history.read(1).digest
    place.write("b", 7, "policy.d/b.yaml")
    place.write("c", 1, "policy.d/c.yaml")
    arguments = ("--config", str(place.config), "--admin", appliance.url, "--yes")
    told = run("policy", "rollback", *arguments)
    assert told.exit_code == 0, told.output
    assert place.digest() == first
    assert place.texts() == {
        "policy.yaml": TENANT % ("a", "a", 1),
        "b.yaml": TENANT % ("b", "b", 1),
        f"c.yaml{ASIDE}": TENANT % ("c", "c", 1),
    }
    assert run("policy", "rollback", "2", *arguments).exit_code == 0
    assert place.digest() == place.history.read(2).digest
    appliance.outcome = ReloadOutcome(ok=False, digest="d", problems=("no",), message="no")
    before = place.texts()
    assert run("policy", "rollback", "1", *arguments).exit_code == 1
    assert place.texts() == before


def test_a_version_without_texts_is_told_and_passed_over(run: Run, place: Place) -> None:
    """A policy whose files were replaced before they were read is in the list, with its digest; what it changed is
    not known, nobody goes back to it, and the version before the newest is one with texts. Control: that one is put
    back."""
    before = place.history.read(2)
    place.history.record_unread("ab" * 32, 1_790_000_120_000, "somebody")
    place.write("a", 7)
    place.keep(1_790_000_180_000)
    listed = run("policy", "history", "--config", str(place.config))
    assert (listed.exit_code, "not read in time" in listed.stdout) == (0, True)
    shown = run("policy", "history", "3", "--config", str(place.config))
    assert "nothing but the digest is kept" in " ".join(shown.stdout.split())
    told = run("policy", "rollback", "3", "--config", str(place.config), "--admin", NOBODY, "--yes")
    assert (told.exit_code, "nothing but the digest is kept" in told.stderr) == (1, True)
    assert run("policy", "rollback", "--config", str(place.config), "--admin", NOBODY, "--yes").exit_code == 0
    assert place.digest() == before.digest, "the control"


def test_a_version_that_cannot_be_read_hides_no_other(run: Run, place: Place) -> None:
    """A damaged file of the history is told beside the list, which has the others, and the way back to one of them is
    open. The version before the newest is nobody's guess: where it is the damaged one, the command ends with its name.
    Control: undamaged, nothing is told."""
    arguments = ("--config", str(place.config))
    place.write("a", 7)
    place.keep(1_790_000_180_000)
    assert run("policy", "history", *arguments).stderr == ""
    (damaged,) = place.history._folder.glob("000002-*.json")
    damaged.write_text("{")
    for more in ((), ("--since", "2020-01-01")):
        listed = run("policy", "history", *arguments, "-o", "json", *more)
        assert [one["version"] for one in json.loads(listed.stdout)["versions"]] in ([3, 1], [1, 3])
        assert listed.exit_code == 0 and damaged.name in listed.stderr
    before = place.texts()
    told = run("policy", "rollback", *arguments, "--admin", NOBODY, "--yes")
    assert (told.exit_code, damaged.name in told.stderr, place.texts()) == (1, True, before)
    assert run("policy", "rollback", "1", *arguments, "--admin", NOBODY, "--yes").exit_code == 0
    assert place.digest() == place.history.read(1).digest


def test_rollback_without_a_history_says_so(run: Run, tmp_path: Path) -> None:
    """There is nothing before the first version."""
    place = Place(tmp_path)
    place.write("a", 1)
    place.keep(1)
    told = run("policy", "rollback", "--config", str(place.config), "--admin", NOBODY, "--yes")
    assert (told.exit_code, "no policy before this one" in told.stderr) == (1, True)


def test_folders_are_replaced_by_folders(run: Run, tmp_path: Path, appliance: FakeAppliance) -> None:
    """Where the policy is a folder the new one is too: its files, those of public prefixes, and nothing of the old."""
    place = Place(tmp_path, "policy.d")
    new = tmp_path / "draft"
    (new / "public").mkdir(parents=True)
    (new / "public" / "hello.txt").write_text("Hello")
    prefix = "public_prefixes: {p: {model: m, tenants: all, file: hello.txt}}\n"
    (new / "z.yaml").write_text(TENANT % ("z", "z", 1) + prefix)
    told = run("policy", "apply", str(new), "--config", str(place.config), "--admin", appliance.url, "--yes")
    assert told.exit_code == 0, told.output
    assert set(load_policy(read_sources(place.policy)).tenants) == {"z"}
    assert (place.policy / "public" / "hello.txt").read_text() == "Hello"
    assert (place.policy / f"b.yaml{ASIDE}").exists()


def test_a_disk_that_takes_no_more_leaves_everything_as_it_was(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two files cannot be written: the first is put back."""
    from appliance.operator import placement as module

    before, write = place.texts(), module.write_whole

    def full(path: Path, data: bytes, mode: int) -> None:
        if path.name == "b.yaml":
            raise OSError(28, "No space left on device")
        write(path, data, mode)

    monkeypatch.setattr(module, "write_whole", full)
    placing = Placement(place.folder, {"policy.yaml": "new", "policy.d/b.yaml": "new"}, [])
    with pytest.raises(Exception, match="cannot write the policy"):
        placing.put()
    assert place.texts() == before


def test_a_policy_is_signed_checked_and_applied(run: Run, place: Place, appliance: FakeAppliance) -> None:
    """`sign` prints the public key and writes the signature beside the policy; `check` warns of what the appliance will
    refuse; `apply` takes the signature along, and a folder of a policy with mistakes is not signed."""
    key = place.folder / "policy.key"
    done = run("policy", "sign", str(place.policy), "--key", str(key))
    public = done.stdout.strip()
    assert (done.exit_code, len(public), key.stat().st_mode & 0o777) == (0, 64, 0o600)
    values = json.loads(place.config.read_text()) | {"policy_keys": [public]}
    place.config.write_text(json.dumps(values))
    (place.folder / "keys").write_text('{"keys": {}}')
    (place.folder / "keys").chmod(0o600)
    check = ("policy", "check", str(place.policy), "--config", str(place.config))
    assert "not signed" not in run(*check, columns=200).stdout
    place.write("a", 7)
    assert "not signed as it is now" in " ".join(run(*check, columns=200).stdout.split())
    drafts = place.folder / "drafts"
    (drafts / "new.d").mkdir(parents=True)
    (drafts / "new.d" / "b.yaml").write_text((place.folder / "policy.d" / "b.yaml").read_text())
    new = place.write("a", 9, "drafts/new.yaml")
    found = json.loads(run("policy", "sign", str(new), "--key", str(key), "-o", "json").stdout)
    assert (found["signed_by"], found["public_key"]) == ([public], public)
    told = run("policy", "apply", str(new), "--config", str(place.config), "--admin", appliance.url, "--yes")
    assert told.exit_code == 0, told.stdout
    check_signed(read_sources(place.policy), place.policy, [public])
    new.write_text("version: 2\n")
    assert run("policy", "sign", str(new), "--key", str(key)).exit_code == 1


def test_a_policy_is_tried_without_effect(run: Run, place: Place, appliance: FakeAppliance) -> None:
    """Checked, written beside the policy with its mode, reloaded, shown; a policy with problems is not written; `--off`
    removes it. The table names tenants, what would be done and the rule."""
    arguments = ("--config", str(place.config), "--admin", appliance.url)
    new, shadow = place.write("a", 9, "new.yaml"), place.folder / "policy.shadow.yaml"
    row = ShadowRow("a", "refuses", "tenants.a.models", 7)
    appliance.shadow = ShadowStatus(
        file=str(shadow), digest="ab" * 32, since=1_790_000_000.0, verdicts={"agrees": 3, "refuses": 7}, rows=(row,)
    )
    told = run("policy", "shadow", str(new), *arguments, columns=100)
    assert (told.exit_code, appliance.reloads, shadow.read_text()) == (0, 1, new.read_text()), told.stdout
    assert "it agrees on 3 of 10 requests" in " ".join(told.stdout.split())
    assert "would be refused by tenants.a.models" in told.stdout
    assert json.loads(run("policy", "shadow", *arguments, "-o", "json").stdout)["rows"][0]["requests"] == 7
    new.write_text("version: 2\n")
    assert run("policy", "shadow", str(new), *arguments).exit_code == 1
    assert shadow.read_text() == TENANT % ("a", "a", 9)
    assert run("policy", "shadow", str(new), "--off", *arguments).exit_code == 2
    done = run("policy", "shadow", "--off", *arguments)
    assert (done.exit_code, shadow.exists(), appliance.reloads) == (0, False, 2)
    appliance.shadow = ShadowStatus(file=str(shadow), problems=("policy.shadow.yaml:1:1: version: no",))
    broken = run("policy", "shadow", *arguments)
    assert (broken.exit_code, "has problems" in broken.stdout) == (1, True)
    appliance.shadow = ShadowStatus(file=str(shadow))
    assert "no policy is tried" in run("policy", "shadow", *arguments).stdout


def test_a_folder_is_tried_with_its_texts(run: Run, tmp_path: Path, appliance: FakeAppliance) -> None:
    """Of a folder, texts of public prefixes come along, and what reads the policy finds them. A trial with fewer files
    leaves none of the trial before; one that cannot be written leaves that trial; `--off` leaves no folder."""
    configured, tried = Place(tmp_path, "rules"), tmp_path / "rules.shadow"
    new = tmp_path / "new"
    for folder in (tmp_path / "rules", new, new / "public"):
        folder.mkdir()
    configured.write("a", 1, "rules/a.yaml")
    configured.write("a", 2, "new/a.yaml")
    configured.write("c", 2, "new/c.yaml")
    (new / "a.yaml").write_text(
        (new / "a.yaml").read_text() + "public_prefixes: {help: {model: m, file: help.txt, tenants: [a]}}\n"
    )
    (new / "public" / "help.txt").write_text("You help.\n")
    arguments = ("--config", str(configured.config), "--admin", appliance.url)
    told = run("policy", "shadow", str(new), *arguments)
    assert told.exit_code == 0, told.stdout
    assert load_policy(read_sources(tried)).digest == load_policy(read_sources(new)).digest
    (new / "c.yaml").unlink()
    (tried / "a.yaml.lock").mkdir()  # Not ours, and stays.
    assert run("policy", "shadow", str(new), *arguments).exit_code == 0
    assert sorted(file.name for file in tried.rglob("*")) == ["a.yaml", "a.yaml.lock", "help.txt", "public"]
    (tried / "a.yaml.lock").rmdir()
    configured.write("d", 1, "new/0.yaml")
    (tried / "0.yaml").mkdir()  # Nothing can be written there.
    assert run("policy", "shadow", str(new), *arguments).exit_code == 1
    assert (tried / "a.yaml").read_text() == (new / "a.yaml").read_text()
    (tried / "0.yaml").rmdir()
    assert run("policy", "shadow", "--off", *arguments).exit_code == 0
    assert not tried.exists()


def editor(place: Place, monkeypatch: pytest.MonkeyPatch, *commands: str) -> None:
    """An editor that runs one of these commands of sed at each call."""
    script, calls = place.folder / "editor", place.folder / "calls"
    cases = "".join(f"{number}) sed -i '{command}' \"$1\";;\n" for number, command in enumerate(commands))
    script.write_text(
        f"#!/bin/sh\nn=$(cat {calls} 2>/dev/null || echo 0)\necho $((n + 1)) > {calls}\ncase $n in\n{cases}esac\n"
    )
    script.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(script))


def test_a_file_is_edited_checked_and_put_in_force(
    run: Run, place: Place, appliance: FakeAppliance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake is shown and edited again; the mended text is in force, its comment too; an editor that changes nothing
    changes nothing; a drop-in can be edited, another file cannot. What the appliance refuses is kept for its writer."""
    arguments = ("--config", str(place.config), "--admin", appliance.url, "--yes")
    editor(place, monkeypatch, "s/weight: 5/weight: none/", "s/weight: none/weight: 7/; $ a # on friday")
    told = run("policy", "edit", *arguments, typed="y\n")
    assert told.exit_code == 0, told.stdout
    assert "weight" in told.stdout and place.policy.read_text().endswith("# on friday\n")
    assert (appliance.reloads, "weight: 7" in place.policy.read_text()) == (1, True)
    assert "nothing was changed" in run("policy", "edit", *arguments).stdout
    drop_in = place.folder / "policy.d" / "b.yaml"
    editor(place, monkeypatch, *["p"] * 3, "s/weight: 1/weight: 2/")
    assert run("policy", "edit", str(drop_in), *arguments).exit_code == 0
    assert "weight: 2" in drop_in.read_text()
    assert run("policy", "edit", str(place.folder / "else.yaml"), *arguments).exit_code == 2
    appliance.outcome = ReloadOutcome(ok=False, digest="", message="no", problems=("no",))
    editor(place, monkeypatch, *["p"] * 4, "s/weight: 2/weight: 3/")
    refused = run("policy", "edit", str(drop_in), *arguments)
    kept = Path(" ".join(refused.stderr.split()).partition("kept in ")[2].partition(";")[0])
    assert (refused.exit_code, "weight: 2" in drop_in.read_text(), "weight: 3" in kept.read_text()) == (1, True, True)
    kept.unlink()
