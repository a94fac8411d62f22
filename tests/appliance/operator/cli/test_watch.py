"""``status``, ``traces`` and ``reload`` against a real admin listener."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.json_codec import decode
from appliance.common.status import Alert, ApplianceStatus, ReloadOutcome, TenantTable
from appliance.gateway.telemetry.store import StoredTrace, TraceList, TraceStore
from appliance.operator.cli import admin_client, exits
from tests.appliance import golden
from tests.appliance.admin_server import STATUS, TENANTS, FakeAppliance, serve_admin
from tests.appliance.gateway.console.pictures import batch, card, queue
from tests.appliance.gateway.telemetry import samples
from tests.appliance.operator.cli.conftest import Run

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours after the appliance started."""
    monkeypatch.setattr("time.time", lambda: STATUS.started_at + 7_425)


@pytest.mark.parametrize("columns", [80, 120])
def test_status(run: Run, appliance: FakeAppliance, columns: int) -> None:
    """Sandboxes, tenants and policy, as agreed at both widths."""
    result = run("status", "--admin", appliance.url, columns=columns)
    assert result.exit_code == 0
    assert "NO SANDBOX" not in result.output
    golden.check(GOLDEN / f"status-{columns}.txt", result.stdout)


def test_status_without_a_sandbox_is_loud(run: Run, appliance: FakeAppliance) -> None:
    """No sandbox, a failed engine and a failed reload: each is in the operator's face."""
    model = STATUS.models[0]
    engine = replace(model.engine, state="failed", kind="none", pid=None, uptime_s=None)
    broken = replace(model, state="starting", engine=engine)
    appliance.status = replace(STATUS, sandbox="none", models=(broken,))
    appliance.break_policy("policy.yaml:6:7: tenants.alpha: unknown key")
    result = run("status", "--admin", appliance.url)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].startswith(" NO SANDBOX")
    golden.check(GOLDEN / "status-unsafe-80.txt", result.stdout)


@pytest.mark.parametrize("columns", [60, 120])
def test_status_shows_gpus(run: Run, appliance: FakeAppliance, columns: int) -> None:
    """A line for each that a model has, with whose engines are there, what models hold of it below; one that is lost
    has no numbers, and why it gets no engine is said."""
    why = "card 1 is lost: it has fallen off the bus"
    lost = card(index=1, state="lost", figures={}, models=(), engines=(), out=why)
    appliance.status = replace(STATUS, cards=(card(unknown_bytes=3 << 30), lost))
    result = run("status", "--admin", appliance.url, columns=columns)
    assert result.stdout.isascii()
    golden.check(GOLDEN / f"status-gpus-{columns}.txt", result.stdout)


@pytest.mark.parametrize("columns", [60, 120])
def test_status_shows_batches(run: Run, appliance: FakeAppliance, columns: int) -> None:
    """A line for each that is open, with what is left of it, and one for what is kept; none (control) where no files
    are."""
    still = batch(id="batch_8", tenant="beta", obstacle="limit", still_s=1_000.0, running=0, ended=0)
    appliance.status = replace(STATUS, batches=queue(still, batch()))
    result = run("status", "--admin", appliance.url, columns=columns)
    shown = " ".join(result.stdout.split())
    assert result.stdout.isascii()
    for words in ("BATCH OF", "400 of 400", "280 of 400", "680 lines left in 2 batches", "5.0 MiB of 16 GiB"):
        assert words in shown
    appliance.status = STATUS
    assert "BATCH OF" not in run("status", "--admin", appliance.url, columns=columns).stdout


@pytest.mark.parametrize("columns", [60, 80])
def test_status_says_first_what_is_wrong(run: Run, appliance: FakeAppliance, columns: int) -> None:
    """What the console's strip says stands above the tables: cause, who, what to do, what to type."""
    down = Alert(
        key="down/m",
        level="broken",
        what="The engine sandbox of athanor-mini is down: exit status 137",
        who="All 2 tenants that may use it",
        do="It is started again by itself.",
        command="athanor logs --level warning",
        since=STATUS.started_at + 7_300,
    )
    late = Alert(key="queue", level="degraded", what="7 requests wait for their turn", who="Whoever calls now.")
    elsewhere = Alert(key="unsafe", level="broken", what="said twice")
    appliance.status = replace(STATUS, alerts=(down, late, elsewhere))
    result = run("status", "--admin", appliance.url, columns=columns)
    assert "said twice" not in result.stdout
    golden.check(GOLDEN / f"status-alerts-{columns}.txt", result.stdout)


def test_where_to_ask_is_found_out(
    run: Run, appliance: FakeAppliance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without --admin the service's socket is asked where there is one, else loopback; where the service is installed
    and does not answer, the hint leads to it and not to a demo."""
    path = tmp_path / "admin.sock"
    monkeypatch.setattr(admin_client, "SERVICE_SOCKET", path)
    assert admin_client.default_admin() == admin_client.LOOPBACK_ADMIN
    with serve_admin(FakeAppliance(), path):
        assert run("status").exit_code == 0
        assert run("status", "--admin", "127.0.0.1:1").exit_code == exits.UNREACHABLE
    monkeypatch.setattr(admin_client, "SERVICE_CONFIG", tmp_path)
    result = run("status")
    assert result.exit_code == exits.UNREACHABLE
    assert f"nothing answers at unix:{path}" in result.stderr
    assert "athanor doctor" in result.stderr and "athanor demo" not in result.stderr


def test_one_unsafe_engine_is_enough(run: Run, appliance: FakeAppliance) -> None:
    """The warning appears when any single room runs without a sandbox."""
    text = replace(STATUS.models[0].text, kind="unsafe process")
    appliance.status = replace(STATUS, models=(replace(STATUS.models[0], text=text),))
    assert "NO SANDBOX" in run("status", "--admin", appliance.url).stdout


def test_a_null_runner_is_named(run: Run, appliance: FakeAppliance) -> None:
    """Nobody mistakes a benchmark's answers for a model's; a model is not accused."""
    appliance.status = replace(STATUS, models=(replace(STATUS.models[0], runner="null"),))
    assert "NULL RUNNER: athanor-mini" in run("status", "--admin", appliance.url).stdout
    appliance.status = STATUS
    assert "NULL RUNNER" not in run("status", "--admin", appliance.url).stdout


@pytest.mark.parametrize("columns", [80, 120])
def test_tenant_usage(run: Run, appliance: FakeAppliance, columns: int) -> None:
    """Every tenant that has called, those with the most tokens first, and the sums, as agreed at both widths."""
    result = run("tenant", "usage", "--admin", appliance.url, columns=columns)
    assert result.exit_code == 0
    golden.check(GOLDEN / f"tenant-usage-{columns}.txt", result.stdout)


def test_tenant_usage_json(run: Run, appliance: FakeAppliance) -> None:
    """-o json is the whole table as the listener gave it."""
    result = run("tenant", "usage", "--admin", appliance.url, "-o", "json")
    assert decode(TenantTable, json.loads(result.stdout)) == TENANTS


def test_status_json(run: Run, appliance: FakeAppliance) -> None:
    """-o json is the whole status as the listener gave it."""
    result = run("status", "--admin", appliance.url, "-o", "json")
    assert decode(ApplianceStatus, json.loads(result.stdout)) == STATUS


def test_over_a_unix_socket(run: Run, tmp_path: Path) -> None:
    """unix:PATH reaches the same listener on a socket."""
    path = tmp_path / "admin.sock"
    with serve_admin(FakeAppliance(), path):
        result = run("status", "--admin", f"unix:{path}")
    assert result.exit_code == 0
    assert "athanor-mini" in result.stdout


def test_the_console_s_address(run: Run, appliance: FakeAppliance, tmp_path: Path) -> None:
    """The address alone on standard output, to be pasted; beside it, how to come from another machine."""
    result = run("console", "--admin", appliance.url)
    port = appliance.url.rpartition(":")[2]
    assert (result.exit_code, result.stdout) == (0, f"{appliance.url}/console/\n")
    assert f"ssh -N -L {port}:127.0.0.1:{port} HOST" in result.stderr
    assert run("console", "--admin", "127.0.0.1:1").exit_code == exits.UNREACHABLE
    path = tmp_path / "admin.sock"
    with serve_admin(FakeAppliance(), path):
        result = run("console", "--admin", f"unix:{path}")
        assert (result.exit_code, result.stdout) == (0, f"ssh -N -L 8082:{path} HOST\n")
        assert "http://localhost:8082/console/" in result.stderr
        assert run("console", "--open", "--admin", f"unix:{path}").exit_code == exits.USAGE
        told = json.loads(run("console", "-o", "json", "--admin", f"unix:{path}").stdout)
    assert told["direct"] is False


def test_the_console_is_opened_where_there_is_a_browser(
    run: Run, appliance: FakeAppliance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--open hands the address to the machine's browser; without one it says how to get there."""
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: not opened.append(url))
    assert run("console", "--open", "--admin", appliance.url).exit_code == 0
    assert opened == [f"{appliance.url}/console/"]
    monkeypatch.setattr(webbrowser, "open", lambda _url: False)
    result = run("console", "--open", "--admin", appliance.url)
    assert (result.exit_code, "no browser" in result.stderr) == (exits.REFUSED, True)


@pytest.mark.parametrize("columns", [80, 120])
def test_traces_list(run: Run, appliance: FakeAppliance, columns: int) -> None:
    """The last requests, newest first."""
    result = run("traces", "--admin", appliance.url, columns=columns)
    assert result.exit_code == 0
    golden.check(GOLDEN / f"traces-{columns}.txt", result.stdout)


def test_traces_limit_and_json(run: Run, appliance: FakeAppliance) -> None:
    """--limit bounds the list, -o json gives it to programs."""
    result = run("traces", "-n", "2", "-o", "json", "--admin", appliance.url)
    assert len(decode(TraceList, json.loads(result.stdout)).traces) == 2


def test_no_traces_yet(run: Run) -> None:
    """A fresh appliance has nothing to list, which is no error."""
    fake = FakeAppliance()
    fake.traces = TraceStore()
    with serve_admin(fake) as address:
        result = run("traces", "--admin", address)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no requests yet\n")


def test_one_trace_is_a_waterfall(run: Run, appliance: FakeAppliance) -> None:
    """An id's first digits show that request phase by phase."""
    result = run("traces", "7f3a9c", "--admin", appliance.url)
    assert result.exit_code == 0
    for word in ("policy", "text", "queue", "prefill", "decode", "tenants.alpha", "88.5 tokens/s"):
        assert word in result.stdout
    result = run("traces", "7f3a9c", "-o", "json", "--admin", appliance.url)
    assert decode(StoredTrace, json.loads(result.stdout)) == samples.answered()


def test_an_id_of_several_lists_them(run: Run, appliance: FakeAppliance) -> None:
    """An ambiguous id ends with 1 and shows what it could have meant."""
    result = run("traces", samples.SUMMARY.trace_id, "--admin", appliance.url)
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 4
    assert "several requests" in result.stderr


@pytest.mark.parametrize("wanted", ["ffffff", "../status", "7f3a9", "a b", "%2e%2e"])
def test_an_unknown_id(run: Run, appliance: FakeAppliance, wanted: str) -> None:
    """An id that names nothing ends with 1; it cannot wander to another route."""
    result = run("traces", wanted, "--admin", appliance.url)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "error: " in result.stderr


def test_reload(run: Run, appliance: FakeAppliance) -> None:
    """A reload that succeeds says what is in force and ends with 0."""
    appliance.outcome = ReloadOutcome(ok=True, digest="d" * 64, message="policy dddd is in force")
    result = run("reload", "--admin", appliance.url)
    assert (result.exit_code, result.stdout) == (0, "reloaded policy dddd is in force\n")
    assert appliance.reloads == 1


def test_reload_with_warnings(run: Run, appliance: FakeAppliance) -> None:
    """What is worth a look is said below what is in force; the end is still 0."""
    appliance.outcome = ReloadOutcome(ok=True, digest="d", message="in force", warnings=("policy.d/1.yml: not read",))
    result = run("reload", "--admin", appliance.url)
    assert (result.exit_code, result.stdout) == (0, "reloaded in force\nwarning: policy.d/1.yml: not read\n")


def test_reload_of_the_configuration(run: Run, appliance: FakeAppliance) -> None:
    """What is applied, what needs a restart, and the command for that."""
    appliance.outcome = ReloadOutcome(
        ok=True,
        digest="d",
        message="in force",
        applied=("sandbox.step_timeout_s (300 -> 60)",),
        restart=("sandbox.cores (0 -> 2)",),
        restart_command="systemctl restart athanor.target",
    )
    result = run("reload", "--admin", appliance.url)
    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        [
            "reloaded in force",
            "applied sandbox.step_timeout_s (300 -> 60)",
            "needs a restart: sandbox.cores (0 -> 2)",
            "> systemctl restart athanor.target",
        ],
    )


def test_reload_refused(run: Run, appliance: FakeAppliance) -> None:
    """A reload that changed nothing ends with 1 and repeats every problem, also as JSON."""
    problems = ("policy.yaml:3:1: tenants: this key is required", "policy.yaml:4:1: x")
    appliance.outcome = ReloadOutcome(ok=False, digest="d", message="not usable", problems=problems)
    result = run("reload", "--admin", appliance.url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines() == ["error: not usable", *(f"       {one}" for one in problems)]
    result = run("reload", "-o", "json", "--admin", appliance.url)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"] == list(problems)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        *((command, exits.UNREACHABLE) for command in (["status"], ["traces"], ["traces", "7f3a9c"])),
        (["reload"], exits.NOT_RUNNING),
    ],
)
def test_nobody_listens(run: Run, command: list[str], status: int, tmp_path: Path) -> None:
    """Without an appliance each command ends with 3, and a reload, of which scripts ask it, with a status of its own;
    each says how to start one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address in (f"http://127.0.0.1:{port}", f"127.0.0.1:{port}", f"unix:{tmp_path}/none"):
        result = run(*command, "--admin", address)
        assert result.exit_code == status
        assert result.stdout == ""
        assert result.stderr.startswith(f"error: nothing answers at {address}: ")
        assert "hint:  start the appliance with `athanor demo`" in result.stderr


@pytest.mark.parametrize("address", ["ftp://x", "http://", "http://h:port", "http://h:1/path", ""])
def test_an_impossible_address_is_a_usage_error(run: Run, address: str) -> None:
    """An address of another kind ends with 2 and says which kinds there are."""
    result = run("status", "--admin", address)
    assert result.exit_code == 2
    assert "http://HOST:PORT or unix:PATH" in result.stderr


@contextmanager
def stranger(answer: bytes) -> Iterator[str]:
    """Something else that listens: it takes one request and answers with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "no admin listener"),
        (b"SSH-2.0-OpenSSH_9\r\n", "nothing answers"),
        (b"", "nothing answers"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "version: field required"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "should be an object"),
    ],
)
def test_somebody_else_listens(run: Run, answer: bytes, message: str) -> None:
    """What is no admin listener is told apart from one, and nothing is made up from it."""
    with stranger(answer) as address:
        result = run("status", "--admin", address)
    assert result.exit_code == 3
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_listener_that_never_answers(run: Run) -> None:
    """A reload gives up after its timeout and says so."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        result = run("reload", "--timeout", "0.2", "--admin", address)
    assert result.exit_code == 3
    assert "no answer within 0.2 s" in result.stderr
    assert "something listens there" in result.stderr


def test_a_hostile_answer_cannot_steer_the_terminal(run: Run, appliance: FakeAppliance) -> None:
    """Control characters in what the listener tells are shown as question marks."""
    appliance.outcome = ReloadOutcome(ok=False, digest="", message="\x1b[2Jx", problems=("\x07y",))
    tenant = replace(STATUS.tenants[0], id="\x1b[2J[red]t")
    appliance.status = replace(STATUS, tenants=(tenant,))
    text = run("reload", "--admin", appliance.url).output
    text += run("status", "--admin", appliance.url).output
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "?[2J[red]t" in text


def test_an_ascii_locale(appliance: FakeAppliance) -> None:
    """Where the terminal has ASCII only, lists and waterfalls still come out, without a traceback."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    for args in (["traces"], ["traces", "7f3a9c"], ["status"]):
        ended = subprocess.run(
            [sys.executable, "-m", "appliance.operator.cli", *args, "--admin", appliance.url],
            cwd=Path(__file__).resolve().parents[4],
            env=environment,
            capture_output=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.isascii()
        assert ended.stdout
