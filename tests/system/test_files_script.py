"""``deploy/files/athanor-files.sh`` where something goes wrong: names, links, a kill between any two steps, an
appliance that does not answer. What a reload comes to is the test's word, and where a test is about links and not about
checks the command takes every file: the script runs it five times, a second each. ``test_fleet_files`` runs it on
appliances that serve."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.common.keys import serialise_records

SCRIPT = "deploy/files/athanor-files.sh"
POLICY = "version: 1\ntenants: {}\n"
NO_KEYS = serialise_records({})

ATHANOR = """\
#!/bin/sh
# The command, but for what a reload comes to: the line of the file `reload`. Without the file `checks` it takes all.
cd {root}
case $1 in
    reload) echo x >> {folder}/reloads; . {folder}/reload; exit ;;
esac
[ -e {folder}/checks ] || case $1 in
    config) exec grep -o '"policy": "[^"]*"' "$4" ;;
    *) exit 0 ;;
esac
exec {python} -m appliance.operator.cli "$@"
"""

LN = """\
#!/bin/sh
[ ! -e {folder}/full ] || {{ echo "ln: no space left on device" >&2; exit 1; }}
exec {ln} "$@"
"""


SYSTEMCTL = """\
#!/bin/sh
# State of the gateway's unit: the line of the file `unit`; nothing without it, as without systemd.
cat {folder}/unit 2>/dev/null
"""


STEP = """\
#!/bin/sh
# The command, and a number for each call of one; the call whose number is in the file `kill` ends all before it.
n=$(($(cat {folder}/count) + 1))
echo $n > {folder}/count
[ "$n" != "$(cat {folder}/kill)" ] || kill -9 0
exec {command} "$@"
"""


class Host:
    """One host's folder of files."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root, self.etc = folder, root, folder / "etc"
        (self.etc / "revisions").mkdir(parents=True)
        (folder / "bin").mkdir()
        text = ATHANOR.format(root=root, folder=folder, python=sys.executable)
        (folder / "bin/athanor").write_text(text)
        (folder / "bin/athanor").chmod(0o755)
        (folder / "bin/ln").write_text(LN.format(folder=folder, ln=shutil.which("ln")))
        (folder / "bin/ln").chmod(0o755)
        (folder / "bin/systemctl").write_text(SYSTEMCTL.format(folder=folder))
        (folder / "bin/systemctl").chmod(0o755)
        self.answer("exit 0")

    def answer(self, line: str) -> None:
        """What a reload comes to from now on."""
        (self.folder / "reload").write_text(line + "\n")

    def reloads(self) -> int:
        """How often the appliance was asked to reload."""
        path = self.folder / "reloads"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def deliver(self, name: str, **more: str) -> Path:
        """A revision, not in force; names of files have `_` for the point. Gives its folder."""
        folder = self.etc / "revisions" / name
        folder.mkdir()
        config: dict[str, Any] = {one: f"{self.etc}/{one}.json" for one in ("credentials", "pepper")}
        config |= {"models": [{"name": "m", "path": "/srv/m"}], "run_dir": "/run/x"}
        config["policy"] = f"{self.etc}/policy.yaml"
        texts = {"athanor.yaml": json.dumps(config), "policy.yaml": f"# {name}\n{POLICY}", "credentials.json": NO_KEYS}
        texts |= {one.replace("_", "."): text for one, text in more.items()}
        for one, text in texts.items():
            (folder / one).write_text(text)
            (folder / one).chmod(0o600)
        self.sum(folder)
        return folder

    def sum(self, folder: Path) -> None:
        """Write the sums, as docs/fleet.md says."""
        files = sorted(one for one in folder.rglob("*") if one.is_file() and not one.is_symlink())
        lines = [
            f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.relative_to(folder)}\n"
            for one in files
            if one.name != "SHA256SUMS"
        ]
        (folder / "SHA256SUMS").write_text("".join(lines))

    def begin(self, *words: str, before: str = ":") -> subprocess.Popen[str]:
        """Begin the script; ``before`` is what a shell does first under the same process number."""
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        line = ["sh", "-c", f'cd {self.etc} && {before} && exec "$@"', "sh"]
        line += [str(self.root / SCRIPT), "--etc", str(self.etc), *words]
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(self.root)}
        pipe = subprocess.PIPE
        return subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True)

    def run(self, *words: str) -> tuple[int, str]:
        """Status and words of the script."""
        with self.begin(*words) as process:
            out, errors = process.communicate(timeout=60)
        return process.returncode, out + errors

    def switched(self, name: str) -> None:
        """A revision is in force."""
        status, told = self.run("switch", name)
        assert status == 0 and f"{name} is in force" in told, told

    def count_steps(self) -> None:
        """Count the commands of the script from now on, and end all before one of them (``STEP``)."""
        for name in ("athanor", "ln", "mv", "rm", "mktemp"):
            tool, real = self.folder / "bin" / name, self.folder / "bin" / f"{name}.real"
            if tool.exists():
                tool.rename(real)
            else:
                real.symlink_to(str(shutil.which(name)))
            tool.write_text(STEP.format(folder=self.folder, command=real))
            tool.chmod(0o755)

    def shown(self) -> list[str]:
        """The revision in force, and the one before."""
        return self.run("show")[1].split()

    def left(self) -> set[str]:
        """Names beside those that a revision has."""
        every = {"revisions", "current", "previous", "athanor.yaml", "policy.yaml", "credentials.json"}
        return {one.name for one in self.etc.iterdir()} - every


@pytest.fixture
def host(tmp_path: Path, root: Path) -> Host:
    """A host on which nothing is in force."""
    return Host(tmp_path, root)


def test_what_the_sums_do_not_cover_is_refused(host: Host, tmp_path: Path) -> None:
    """A link in a revision, to a file of the host or of another revision, has no sum, and a name with a blank, a star
    or a line's end is no name that can be linked; `current` and its like would take the place of the links that swap.
    Nothing is changed. Control: the same revision without them is taken."""
    (tmp_path / "other.yaml").write_text(POLICY)
    first = host.deliver("good")
    wrong = {"a b": "letters", "*": "letters", "a\nb": "letters", "current": "a file current"}
    for number, (name, word) in enumerate(wrong.items()):
        folder = host.deliver(f"named{number}")
        (folder / name).write_text("x")
        if "\n" not in name:
            host.sum(folder)
        status, told = host.run("switch", folder.name)
        assert status == 1 and word in told, (name, told)
    for number, to in enumerate((tmp_path / "other.yaml", first / "policy.yaml", first / "nowhere")):
        folder = host.deliver(f"link{number}")
        (folder / "policy.yaml").unlink()
        host.sum(folder)
        (folder / "policy.yaml").symlink_to(to)
        status, told = host.run("switch", folder.name)
        assert status == 1 and "no file" in told, told
    os.mkfifo(host.deliver("pipe") / "policy.d")
    assert host.run("switch", "pipe")[0] == 1
    assert host.left() == set() and not (host.etc / "current").exists() and host.reloads() == 0
    host.switched("good")


def test_a_first_revision_that_the_appliance_refuses_is_taken_back(host: Host) -> None:
    """There is none to go back to: no link leads to it, and the same again is refused in the same words. Control: the
    revision is taken where the appliance takes it."""
    host.deliver("first")
    host.answer("exit 1")
    for _ in range(2):
        status, told = host.run("switch", "first")
        assert status == 1 and "there was none before" in told, told
        assert {one.name for one in host.etc.iterdir()} == {"revisions"} and host.shown() == []
    host.answer("exit 0")
    host.switched("first")


@pytest.mark.parametrize("option", ["--etc", "--admin", "--wait"])
def test_an_option_without_its_value_is_wrong_use(host: Host, option: str) -> None:
    """Status 2, with the option's name."""
    status, told = host.run("switch", "first")
    assert status == 1, told  # Control: with all values it is the revision that is missing.
    with host.begin(option) as process:
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and f"{option} needs a value" in errors


@pytest.mark.full
def test_a_policy_that_would_not_be_checked_is_refused(host: Host) -> None:
    """The configuration of a revision names another policy than the revision's."""
    (host.folder / "checks").touch()
    folder = host.deliver("other")
    text = (folder / "athanor.yaml").read_text()
    (folder / "athanor.yaml").write_text(text.replace("policy.yaml", "tenants.yaml"))
    host.sum(folder)
    status, told = host.run("check", "other")
    assert status == 1 and "does not name" in told, told


@pytest.mark.full
def test_a_folder_behind_a_link_is_checked_by_its_name(host: Host, tmp_path: Path) -> None:
    """ETC is a link, and the configuration names files by it: the files that are checked are the revision's. Control: a
    policy with a mistake is refused there. Models of `models.d` in a revision are no relative paths."""
    (host.folder / "checks").touch()
    (tmp_path / "real").mkdir()
    host.etc.rename(tmp_path / "real/etc")
    host.etc.symlink_to(tmp_path / "real/etc")
    good = host.deliver("good")
    (good / "models.d").mkdir()
    (good / "models.d/n.yaml").write_text("models: [{name: n, path: /srv/n}]\n")
    host.sum(good)
    broken = host.deliver("broken")
    (broken / "policy.yaml").write_text("version: 1\ntenant: {}\n")
    host.sum(broken)
    status, told = host.run("check", "good")
    assert status == 0, told
    status, told = host.run("check", "broken")
    assert status == 1 and "tenant" in told, told


def kill_in_reload(host: Host, name: str) -> None:
    """Begin a switch, and kill it without a word while the appliance reloads."""
    reached = host.folder / "reached"
    host.answer(f"echo > {reached}; sleep 60")
    with host.begin("switch", name) as process:
        until = time.monotonic() + 60
        while not reached.exists():
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
    reached.unlink()


def test_a_switch_that_was_killed_is_known_by_the_next(host: Host) -> None:
    """Killed between the swap and the answer, a switch has left files of which nobody knows whether the appliance takes
    them. The same again, refused, goes back to what was in force; `back` does so too, and taken it is in force, with
    the right one before it. What a killed run has left goes."""
    for name in ("a", "b", "c"):
        host.deliver(name, **({"extra_yaml": "x"} if name == "b" else {}))
    host.switched("a")
    kill_in_reload(host, "b")
    assert host.shown() == ["b"]
    (host.etc / ".trial.abcdef").mkdir()
    host.answer("exit 1")
    status, told = host.run("switch", "b")
    assert status == 1 and "a stays in force" in told, told
    assert host.shown() == ["a"] and host.left() == set()
    kill_in_reload(host, "b")
    host.answer("exit 0")
    assert host.run("back")[0] == 0 and host.shown()[0] == "a" and host.left() == set()
    kill_in_reload(host, "b")
    host.answer("exit 0")
    host.switched("b")
    assert host.shown() == ["b", "a"] and host.left() == {"extra.yaml"}
    host.switched("c")
    assert host.shown() == ["c", "b"] and host.left() == set()


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "second", "words", "in_force"),
    [
        ("exit 0", "exit 0", ("switch", "b"), "b"),
        ("exit 0", "exit 1", ("switch", "b"), "ab"),
        ("exit 0", "exit 0", ("back",), "az"),
        ("exit 1", "exit 1", ("switch", "b"), "a"),
        ("exit 6", "exit 6", ("switch", "c"), "c"),
    ],
)
def test_a_kill_before_any_step(
    tmp_path: Path, root: Path, first: str, second: str, words: tuple[str, ...], in_force: str
) -> None:
    """A switch is killed before each command that it runs, and another run goes on: one revision is in force, its names
    and no others lead to its files, and nothing else is left. What a reader finds in between is whole as well. A reload
    comes to ``first`` in the run that is killed and to ``second`` behind it; a refused one leaves a revision in force
    that was so before. Control: the last run is killed nowhere."""
    host = Host(tmp_path, root)
    for name, old in (("z", "zed"), ("a", "old"), ("b", "extra"), ("c", "third")):
        host.deliver(name, **{f"{old}_yaml": "x"})
    host.switched("z")
    host.switched("a")
    host.count_steps()
    shutil.copytree(host.etc, tmp_path / "before", symlinks=True)
    for step in range(1, 60):
        shutil.rmtree(host.etc)
        shutil.copytree(tmp_path / "before", host.etc, symlinks=True)
        host.answer(first)
        (host.folder / "count").write_text("0")
        (host.folder / "kill").write_text(str(step))
        killed = host.run("switch", "b")[0] == -signal.SIGKILL
        assert all((host.etc / name).exists() for name in ("athanor.yaml", "policy.yaml", "credentials.json"))
        (host.folder / "kill").write_text("none")
        host.answer(second)
        told = host.run(*words)
        shown = host.shown()[0]
        assert shown in in_force, (step, told)
        names = {one.name for one in (host.etc / "revisions" / shown).iterdir()} - {"SHA256SUMS"}
        assert {one.name for one in host.etc.iterdir()} == names | {"revisions", "current", "previous"}, (step, told)
        assert all((host.etc / name).samefile(host.etc / "revisions" / shown / name) for name in names)
        if not killed:
            assert step > 15
            return
    pytest.fail("a switch has more steps than these")


def test_what_a_killed_run_left_is_not_put_in_force(host: Host) -> None:
    """A run that was killed between the making of a link and its rename has left one under the name that a run of the
    same process number takes, as every run in a container has: the revision that was asked for is in force, and no
    revision gets a link into its folder."""
    for name in ("a", "b"):
        host.deliver(name)
    host.switched("a")
    before = "ln -s revisions/a .new && ln -s revisions/a current.new.$$"
    with host.begin("switch", "b", before=before) as process:
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0 and "b is in force" in told, told
    assert os.readlink(host.etc / "current") == "revisions/b"
    assert not any(one.is_symlink() for one in (host.etc / "revisions/a").iterdir())


def test_a_full_disk_does_not_keep_a_refused_revision(host: Host) -> None:
    """The appliance refuses what was swapped, and by then nothing can be made on the disk: the way back is a rename."""
    host.deliver("a", other_yaml="x")
    host.deliver("b", extra_yaml="x")
    host.switched("a")
    host.answer(f"echo > {host.folder}/full; exit 1")
    status, told = host.run("switch", "b")
    assert status == 1 and "a stays in force" in told, told
    assert host.shown() == ["a"] and host.left() == {"other.yaml"} and (host.etc / "other.yaml").exists()


@pytest.fixture
def silent() -> Any:
    """The address of an admin listener that takes a connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[Any] = []
        threading.Thread(target=lambda: taken.append(server.accept()), daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_an_appliance_that_does_not_answer_in_time_has_not_put_it_in_force(host: Host, silent: str) -> None:
    """It may refuse later what is on the disk: status 4 and not 3, and the same again goes back where it is refused.
    Control: where nothing listens the next start reads it, with status 3."""
    for name in ("a", "b"):
        host.deliver(name)
    host.switched("a")
    host.answer(f'exec {sys.executable} -m appliance.operator.cli "$@"')
    status, told = host.run("--admin", silent, "--wait", "0.3", "switch", "b")
    assert status == 4 and "not known" in told and "next start" not in told, told
    host.answer("exit 1")
    assert host.run("switch", "b")[0] == 1 and host.shown() == ["a"]
    host.answer(f'exec {sys.executable} -m appliance.operator.cli "$@"')
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    status, told = host.run("--admin", nobody, "switch", "b")
    assert status == 3 and "the next start reads b" in told, told
    assert host.shown() == ["b", "a"]


@pytest.mark.parametrize(
    ("unit", "expected"), [("activating", 4), ("active", 4), ("reloading", 4), ("inactive", 3), ("failed", 3)]
)
def test_an_appliance_that_starts_may_have_read_what_was_before(host: Host, unit: str, expected: int) -> None:
    """A gateway reads its files seconds before it listens: swapped in between, nothing listens, and what is in force is
    the revision before. So it is not known, and the same again puts it in force. Control: where no gateway starts the
    next start reads it."""
    for name in ("a", "b"):
        host.deliver(name)
    host.switched("a")
    host.answer("exit 6")
    (host.folder / "unit").write_text(unit + "\n")
    status, told = host.run("switch", "b")
    assert (status, "the next start reads b" in told) == (expected, expected == 3), told
    host.answer("exit 0")
    host.switched("b")
    assert host.shown() == ["b", "a"] and host.left() == set()


@pytest.mark.parametrize("swapped", [False, True])
def test_what_nobody_expects_has_the_status_of_where_it_stands(host: Host, swapped: bool) -> None:
    """A command of the script fails with a status that the script has a meaning for, as `sed` and `sort` do where the
    disk is full: before the swap it is refused, behind it not known, and the same again finishes it."""
    for name in ("a", "b"):
        host.deliver(name, **({"extra_yaml": "x"} if name == "a" else {}))
    host.switched("a")
    name = "rm" if swapped else "mktemp"
    broken = host.folder / "bin" / name
    broken.write_text(f'#!/bin/sh\ncase "$*" in *extra.yaml | -d*) exit 3 ;; esac\nexec {shutil.which(name)} "$@"\n')
    broken.chmod(0o755)
    status, told = host.run("switch", "b")
    assert (status, host.shown()[0]) == ((4, "b") if swapped else (1, "a")) and "failed (status 3)" in told, told
    broken.unlink()
    host.switched("b")
    assert host.shown()[0] == "b" and host.left() == set()


@pytest.mark.parametrize("name", ["", ".", "..", "../etc", "a/b", "-a b", "x#y", "x&y"])
def test_a_revision_is_the_name_of_one_folder(host: Host, name: str) -> None:
    """Anything else is wrong use, before a lock is taken or a file is read."""
    status, told = host.run("switch", name)
    assert status == 2 and "REVISION is the name" in told, told
