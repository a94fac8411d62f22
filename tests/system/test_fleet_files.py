"""``deploy/files/athanor-files.sh``: a fleet's files come by a configuration manager, here a copy, and each host puts
them in force. Two appliances whose APIs speak TLS; ``athanor fleet`` asks them on loopback, and over TLS through nginx
with the recipe of ``deploy/fleet``."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.host import POLICY, Served, null_appliance
from tests.system.routers import Certificates, free_port, nginx, recipe

pytestmark = [pytest.mark.runsc, pytest.mark.full, pytest.mark.timeout(600)]

FILES = ("athanor.yaml", "policy.yaml", "credentials.json")
OTHER = POLICY.replace("concurrency: 512", "concurrency: 511")
BROKEN = POLICY.replace("concurrency: 512", "concurency: 511")
IN_FORCE_S = 20.0
"""Until changed keys are in force, on a busy machine."""


def deliver(etc: Path, name: str, files: dict[str, str]) -> Path:
    """What a configuration manager does: a revision with these files, the others as they are in force, and its sums."""
    folder = etc / "revisions" / name
    folder.mkdir(parents=True)
    for one in FILES:
        (folder / one).write_text(files.get(one) or (etc / one).read_text())
        (folder / one).chmod(0o600)
    sums = "".join(f"{hashlib.sha256((folder / one).read_bytes()).hexdigest()}  {one}\n" for one in FILES)
    (folder / "SHA256SUMS").write_text(sums)
    return folder


def adopt(etc: Path) -> None:
    """The first revision, before the start: the host's own files with absolute paths."""
    config = json.loads((etc / "athanor.yaml").read_text())
    config |= {name: str(etc / config[name]) for name in ("policy", "credentials", "pepper")}
    (etc / "athanor.yaml").write_text(json.dumps(config))
    deliver(etc, "base", {})
    for name in FILES:
        (etc / name).unlink()
        (etc / name).symlink_to(f"current/{name}")
    (etc / "current").symlink_to("revisions/base")


@dataclass(frozen=True)
class Fleet:
    """Two hosts, and lists of them for ``athanor fleet``."""

    served: tuple[Served, Served]
    root: Path
    hosts: Path
    one_away: Path
    """The list with the second host at an address where nobody listens."""

    def run(self, number: int, *words: str) -> subprocess.CompletedProcess[str]:
        """The script on one host."""
        served = self.served[number]
        line = [str(self.root / "deploy/files/athanor-files.sh"), "--etc", str(served.state)]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(self.root)}
        line += ["--admin", served.ready["admin"], *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=180, env=environment, check=False)

    def switched(self, name: str, *numbers: int) -> None:
        """A revision in force on these hosts."""
        for number in numbers:
            done = self.run(number, "switch", name)
            assert done.returncode == 0 and f"{name} is in force" in done.stderr, done.stderr

    def deliver(self, name: str, **files: str) -> None:
        """A revision on both hosts, not in force; names of files have `_` for the point."""
        for served in self.served:
            deliver(served.state, name, {one.replace("_", "."): text for one, text in files.items()})

    def current(self, number: int) -> str:
        """The revision to which a host's link leads."""
        return os.readlink(self.served[number].state / "current").removeprefix("revisions/")

    def digests(self) -> tuple[str, str]:
        """Digests of the policies in force."""
        one, other = (httpx.get(each.ready["admin"] + "/status").json()["policy"]["digest"] for each in self.served)
        return one, other

    def asked(self, number: int, key: int = 0) -> int:
        """Status of a request over TLS."""
        served = self.served[number]
        headers, url = {"authorization": f"Bearer {served.keys[key]}"}, served.ready["http"] + "/v1/models"
        return httpx.get(url, headers=headers, verify=False, timeout=30).status_code

    def diff(self, hosts: Path) -> tuple[int, dict[str, Any]]:
        """Status and words of ``athanor fleet diff``."""
        line = [sys.executable, "-m", "appliance.operator.cli", "fleet", "diff", "--hosts", str(hosts), "-o", "json"]
        done = subprocess.run(line, cwd=self.root, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, json.loads(done.stdout)


SAME = 5
"""Status of ``athanor fleet diff`` where hosts do not differ, and no model is pinned."""


def listed(folder: Path, name: str, addresses: list[str], tls: bool) -> Path:
    """A list of hosts."""
    hosts: dict[str, Any] = {"hosts": [{"name": name, "admin": one} for name, one in zip("ab", addresses, strict=True)]}
    if tls:
        hosts["tls"] = {"ca": "ca.pem", "certificate": "operator.pem", "key": "operator.key"}
    (folder / name).write_text(json.dumps(hosts))
    return folder / name


@pytest.fixture(scope="module", params=["loopback", "tls"])
def fleet(request: pytest.FixtureRequest, runsc_path: Path, root: Path) -> Iterator[Fleet]:
    """Two hosts whose files are links to a first revision."""
    tls, port = request.param == "tls", free_port()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="athanor-fleet-")))
        certificates = Certificates.create(folder)
        key = folder / "fleet.key"
        key.write_text("0123456789abcdef" * 4)
        pair = {"certificate": str(folder / "host.pem"), "key": str(folder / "host.key")}
        listen = {"tls": pair, "fleet_key": str(key)}
        one = stack.enter_context(null_appliance(2_000, listen=listen, prepare=adopt))
        other = stack.enter_context(null_appliance(2_000, listen=listen, like=one, prepare=adopt))
        addresses = [str(served.ready["admin"]) for served in (one, other)]
        if tls:
            ports, text = [free_port(), port], recipe(root, "admin.nginx.conf")
            own = [
                {"listen 8443": f"listen {at}", "http://unix:/run/athanor/admin.sock:": to}
                for at, to in zip(ports, addresses, strict=True)
            ]
            stack.enter_context(nginx("".join(certificates.adapted(text, **each) for each in own), port))
            addresses = [f"https://localhost:{at}" for at in ports]
        away = addresses[0].rpartition(":")[0] + f":{free_port()}"
        hosts = listed(folder, "fleet.yaml", addresses, tls)
        yield Fleet((one, other), root, hosts, listed(folder, "away.yaml", [addresses[0], away], tls))


def test_a_revision_is_in_force_on_one_host_after_the_other(fleet: Fleet) -> None:
    """Until the second host has it, ``athanor fleet diff`` names the policy; then hosts do not differ. Back again is
    the first policy."""
    first = fleet.digests()
    assert first[0] == first[1] and fleet.diff(fleet.hosts)[0] == SAME
    fleet.deliver("limits", policy_yaml=OTHER)
    assert fleet.run(0, "check", "limits").returncode == 0 and fleet.digests() == first
    fleet.switched("limits", 0)
    status, told = fleet.diff(fleet.hosts)
    assert status == 1 and "policy" in json.dumps(told["differences"]), told
    fleet.switched("limits", 1)
    new = fleet.digests()
    assert new[0] == new[1] != first[0] and fleet.diff(fleet.hosts)[0] == SAME
    assert [fleet.asked(0), fleet.asked(1)] == [200, 200]
    assert [fleet.run(number, "back").returncode for number in (0, 1)] == [0, 0]
    assert fleet.digests() == first and fleet.run(0, "show").stdout.split() == ["base", "limits"]


def test_a_broken_policy_changes_nothing(fleet: Fleet) -> None:
    """It is refused by its word and place before anything is swapped, and so are a copy that is not whole, a file that
    the sums do not list, relative paths, and a file that somebody wrote on the host."""
    before = fleet.digests()
    fleet.deliver("broken", policy_yaml=BROKEN)
    fleet.deliver("cut")
    fleet.deliver("more")
    fleet.deliver(
        "relative",
        athanor_yaml=(fleet.served[0].state / "athanor.yaml")
        .read_text()
        .replace(f"{fleet.served[0].state}/policy", "policy"),
    )
    state = fleet.served[0].state
    with (state / "revisions/cut/policy.yaml").open("a") as file:
        file.write("#")
    (state / "revisions/more/policy.d").mkdir()
    (state / "revisions/more/policy.d/gamma.yaml").write_text(POLICY)
    told = {
        "broken": "concurency",
        "cut": "SHA256SUMS",
        "more": "does not list",
        "relative": "relative paths",
        "none": "not there",
    }
    for name, word in told.items():
        done = fleet.run(0, "switch", name)
        assert done.returncode == 1 and word in done.stderr, (name, done.stderr)
        assert fleet.current(0) == "base" and fleet.digests() == before
    (state / "policy.yaml").unlink()
    (state / "policy.yaml").write_text(POLICY)
    done = fleet.run(0, "check", "base")
    assert done.returncode == 1 and "somebody wrote it here" in done.stderr, done.stderr
    (state / "policy.yaml").unlink()
    (state / "policy.yaml").symlink_to("current/policy.yaml")
    assert fleet.run(0, "check", "base").returncode == 0
    assert fleet.asked(0) == 200 and not list(state.glob(".trial*"))


def test_what_only_the_appliance_refuses_is_taken_back(fleet: Fleet) -> None:
    """A pepper that cannot be read passes the checks and not the reload: the revision before stays in force,
    policy and all, although the new one had another."""
    before = fleet.digests()
    config = json.loads((fleet.served[0].state / "athanor.yaml").read_text())
    config["pepper"] = "/nowhere/pepper"
    fleet.deliver("unread", athanor_yaml=json.dumps(config), policy_yaml=OTHER)
    done = fleet.run(0, "switch", "unread")
    assert done.returncode == 1 and "the appliance refused unread: base stays in force" in done.stderr, done.stderr
    assert fleet.current(0) == "base" and fleet.digests() == before and fleet.asked(0) == 200


def test_a_host_that_is_away_gets_it_later(fleet: Fleet) -> None:
    """``athanor fleet diff`` names the silent host with status 3, and the difference once it is back; the same revision
    then makes them equal. On a host where nothing serves the script says so, with status 3."""
    before = fleet.digests()
    fleet.deliver("later", policy_yaml=OTHER)
    fleet.switched("later", 0)
    status, told = fleet.diff(fleet.one_away)
    assert status == 3 and told["silent"] == ["b"], told
    assert fleet.diff(fleet.hosts)[0] == 1
    fleet.switched("later", 1)
    assert fleet.diff(fleet.hosts)[0] == SAME and fleet.digests()[0] != before[0]
    done = fleet.run(1, "--admin", f"http://127.0.0.1:{free_port()}", "switch", "base")
    assert done.returncode == 3 and fleet.current(1) == "base", done.stderr
    fleet.switched("base", 0, 1)
    assert fleet.digests() == before


def test_a_revoked_key_comes_with_a_revision(fleet: Fleet) -> None:
    """Without one of the two keys: it gets 401 on both hosts, the other goes on."""
    table = json.loads((fleet.served[0].state / "credentials.json").read_text())
    kept = {name: one for name, one in table["keys"].items() if not name.startswith("alpha")}
    assert 0 < len(kept) < len(table["keys"]) and fleet.asked(0) == 200
    policy = "version: 1\ntenants:\n" + POLICY[POLICY.index("  beta:") :]
    fleet.deliver("revoked", credentials_json=json.dumps({**table, "keys": kept}), policy_yaml=policy)
    fleet.switched("revoked", 0, 1)
    until = time.monotonic() + IN_FORCE_S
    while [fleet.asked(0), fleet.asked(1)] != [401, 401]:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert [fleet.asked(0, 1), fleet.asked(1, 1)] == [200, 200]
    fleet.switched("base", 0, 1)
