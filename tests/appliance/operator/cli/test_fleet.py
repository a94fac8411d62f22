"""``fleet status``, ``diff`` and ``drain`` against real admin listeners: over loopback, a Unix socket, and TLS."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.config_text import ConfigText
from appliance.common.fleet_file import read_fleet
from appliance.common.fleet_hosts import HostState, compare
from appliance.common.fleet_status import FleetStatus
from appliance.common.listen_config import ListenConfig
from appliance.operator.cli import exits
from tests.appliance import golden
from tests.appliance.admin_server import STATUS, FakeAppliance, serve_admin
from tests.appliance.gateway.front.pki import Authority, Pki
from tests.appliance.operator.cli.conftest import Run

GOLDEN = Path(__file__).parent / "golden"
MODELS = {"athanor-mini": "a" * 64}


@contextlib.contextmanager
def two_hosts(**second: object) -> Iterator[tuple[Path, FakeAppliance, FakeAppliance]]:
    """Two appliances, the first at a Unix socket, the second on loopback; gives the list of hosts too. ``second``: what
    the second's status has differently."""
    with tempfile.TemporaryDirectory() as name:
        folder, one, other = Path(name), FakeAppliance(), FakeAppliance()
        one.status = replace(STATUS, fleet=FleetStatus(key="f00d", models=MODELS))
        other.status = replace(one.status, **second)  # type: ignore[arg-type]  # as the status has them
        with serve_admin(one, folder / "a.sock"), serve_admin(other) as address:
            listed = {"hosts": [{"name": "a", "admin": "unix:a.sock"}, {"name": "b", "admin": address}]}
            (folder / "fleet.yaml").write_text(json.dumps(listed))
            yield folder / "fleet.yaml", one, other


def test_status_shows_each_host(run: Run) -> None:
    """A line a host with state, policy and load, as agreed; one that drains says so, and one that does not answer has
    its reason below and makes the exit status 3. As JSON the whole status is there."""
    with two_hosts(fleet=FleetStatus(key="f00d", models=MODELS, draining=True)) as (path, _, _):
        shown = run("fleet", "status", "--hosts", str(path))
        assert shown.exit_code == exits.OK
        golden.check(GOLDEN / "fleet-status-80.txt", shown.stdout)
        listed = json.loads(path.read_text())
        listed["hosts"].append({"name": "c", "admin": "unix:nothing.sock"})
        path.write_text(json.dumps(listed))
        shown = run("fleet", "status", "--hosts", str(path), "-o", "json")
        assert shown.exit_code == exits.UNREACHABLE
        told = json.loads(shown.stdout)
        assert [one["state"] for one in told] == ["serving", "draining", "silent"]
        assert told[0]["status"]["policy"]["digest"] == STATUS.policy.digest and "nothing answers" in told[2]["problem"]


def test_equal_hosts_do_not_differ(run: Run) -> None:
    """The exit status is 0, whatever they are doing."""
    with two_hosts(load=replace(STATUS.load, running=0)) as (path, _, _):
        shown = run("fleet", "diff", "--hosts", str(path))
        assert (shown.exit_code, "2 hosts have the same" in shown.stdout) == (exits.OK, True)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"version": "0.2.0"}, "version"),
        ({"policy": replace(STATUS.policy, digest="0" * 32)}, "policy"),
        ({"fleet": FleetStatus(key="beef", models=MODELS)}, "fleet key"),
        ({"fleet": FleetStatus(models=MODELS)}, "fleet key"),
        ({"fleet": FleetStatus(key="f00d", models=MODELS, hosts=("a", "b"))}, "list of hosts"),
        ({"fleet": FleetStatus(key="f00d", models={"athanor-mini": "b" * 64})}, "model athanor-mini"),
        ({"fleet": FleetStatus(key="f00d", models={"athanor-mini": ""})}, "model athanor-mini"),
        ({"fleet": FleetStatus(key="f00d", models={**MODELS, "other": "c" * 64})}, "model other"),
    ],
)
def test_a_difference_is_named_and_makes_the_exit_status_1(run: Run, changed: dict[str, object], what: str) -> None:
    """Version, policy, key of the fleet, list of hosts, and models: other files, not pinned on one host, or served on
    one alone."""
    with two_hosts(**changed) as (path, _, _):
        shown = run("fleet", "diff", "--hosts", str(path))
        assert (shown.exit_code, shown.stdout.splitlines()[0]) == (exits.REFUSED, f"{what} differs")
        (found,) = json.loads(run("fleet", "diff", "--hosts", str(path), "-o", "json").stdout)["differences"]
        assert found["what"] == what and sorted(found["values"].values()) == [["a"], ["b"]]


def test_what_cannot_be_compared_is_no_success(run: Run) -> None:
    """A model that no host pins makes the exit status 5; a host that does not answer makes it 3."""
    with two_hosts() as (path, one, other):
        one.status = other.status = replace(STATUS, fleet=FleetStatus(models={"m": ""}))
        shown = run("fleet", "diff", "--hosts", str(path))
        assert (shown.exit_code, "no host pins a digest: m" in shown.stdout) == (exits.INCOMPLETE, True)
    found = compare([HostState(name="a", admin="", status=STATUS), HostState(name="b", admin="", problem="gone")])
    assert (found.differences, found.silent) == ((), ("b",))


def test_a_drain_waits_until_nothing_runs(run: Run) -> None:
    """One with requests that run ends with status 1 after the wait, and the host drains all the same; without any it is
    done at once; --resume ends it."""
    with two_hosts() as (path, _, other):
        line = "fleet", "drain", "b", "--hosts", str(path)
        shown = run(*line, "--wait", "0")
        assert (shown.exit_code, other.draining) == (exits.REFUSED, True) and "1 request still on b" in shown.stderr
        other.live = []
        assert run(*line).exit_code == exits.OK
        assert run(*line, "--resume").exit_code == exits.OK and not other.draining


def test_the_last_host_is_not_drained_by_mistake(run: Run) -> None:
    """Where no other host takes requests, the order is refused and nothing drains, but for --last."""
    with two_hosts(fleet=FleetStatus(key="f00d", models=MODELS, draining=True)) as (path, one, _):
        one.live = []
        shown = run("fleet", "drain", "a", "--hosts", str(path))
        assert (shown.exit_code, one.draining) == (exits.REFUSED, False) and "no other host" in shown.stderr
        assert run("fleet", "drain", "a", "--hosts", str(path), "--last").exit_code == exits.OK and one.draining


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts: []", "fleet.yaml:1:8: hosts: "),
        ("hosts: [{name: a, admin: 'http://10.0.0.1:8082'}]", "not on loopback"),
        ("hosts: [{name: a, admin: 'https://h:8443'}]", "no section tls"),
        ("hosts: [{name: a, admin: here}]", "no admin address"),
        ("hosts: [{name: a, admin: 'unix:x'}, {name: a, admin: 'unix:y'}]", "one name"),
        ("hosts: [{name: a, admin: 'unix:x'}]\ntls: {ca: ca.pem, certificate: c.pem, key: k.pem}", "cannot read"),
        ("hosts: [{name: a, admin: 'unix:x', port: 3}]", "port"),
        ("- a", "must be a mapping"),
    ],
)
def test_a_list_with_a_mistake_is_refused(run: Run, tmp_path: Path, text: str, said: str) -> None:
    """Before any host is asked, with the place and the reason."""
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    shown = run("fleet", "status", "--hosts", str(path))
    assert (shown.exit_code, said in shown.stderr) == (exits.USAGE, True), shown.stderr


def test_the_recipes_files_are_understood(root: Path) -> None:
    """The list of hosts, and the section that each host has: it gives a notice longer than two failed looks of the
    routers, whose recipes say how often they look."""
    fleet = read_fleet(root / "deploy/fleet/fleet.yaml")
    assert [host.name for host in fleet.hosts] == ["host-a", "host-b"] and fleet.tls is not None
    written = ConfigText(root / "deploy/fleet/athanor.listen.yaml").values["listen"]
    listen = ListenConfig.model_validate(written)
    assert listen.fleet_key is not None and listen.metrics_token is not None
    for name, pattern in (
        ("haproxy.cfg", r"inter (\d+)s fall (\d+)"),
        ("envoy.yaml", r"interval: (\d+)s\n *unhealthy_threshold: (\d+)"),
    ):
        (times, *_) = re.findall(pattern, (root / "deploy/fleet" / name).read_text())
        assert listen.drain_notice_s > int(times[0]) * int(times[1])


@contextlib.contextmanager
def tls_in_front(pki: Pki, backend: int) -> Iterator[int]:
    """A proxy that ends TLS, demands a certificate of the authority, and passes bytes on to the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki.files.certificate, pki.files.key)
    context.load_verify_locations(pki.files.client_ca)
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry() -> None:
            while True:
                try:
                    taken, _ = listener.accept()
                except OSError:
                    return
                with taken, contextlib.suppress(OSError), context.wrap_socket(taken, server_side=True) as client:
                    asked = client.recv(65_536).replace(b"Host: 127.0.0.1", b"Host: localhost")
                    with socket.create_connection(("127.0.0.1", backend)) as server:
                        server.sendall(asked.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                        while piece := server.recv(65_536):
                            client.sendall(piece)

        thread = threading.Thread(target=carry)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_beyond_loopback_both_sides_prove_themselves(run: Run, tmp_path: Path, appliance: FakeAppliance) -> None:
    """Over https the operator shows a certificate and verifies the host's. Control: with a certificate of another
    authority, or trusting another, nothing is told."""
    pki, stranger = Pki.create(tmp_path), Authority.create("stranger")
    for name, authority in (("operator", pki.authority), ("stranger", stranger)):
        key, certificate = authority.issue()
        (tmp_path / f"{name}.key").write_bytes(key)
        (tmp_path / f"{name}.pem").write_bytes(certificate)
    (tmp_path / "stranger-ca.pem").write_bytes(stranger.pem)
    with tls_in_front(pki, int(appliance.url.rsplit(":", 1)[1])) as port:
        for who, trusted, code in (
            ("operator", "ca.pem", exits.OK),
            ("stranger", "ca.pem", exits.UNREACHABLE),
            ("operator", "stranger-ca.pem", exits.UNREACHABLE),
        ):
            tls = {"ca": trusted, "certificate": f"{who}.pem", "key": f"{who}.key"}
            listed = {"hosts": [{"name": "a", "admin": f"https://127.0.0.1:{port}"}], "tls": tls}
            (tmp_path / "fleet.yaml").write_text(json.dumps(listed))
            assert run("fleet", "status", "--hosts", str(tmp_path / "fleet.yaml")).exit_code == code, (who, trusted)
