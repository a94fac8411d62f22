"""``athanor doctor`` as an operator meets it: its looks, its formats, its exit codes."""

from __future__ import annotations

import io
import json
import re
import socket
from pathlib import Path

import pytest
from rich.console import Console
from ruamel.yaml import YAML

from appliance.operator import demo
from appliance.operator.cli.doctor_view import doctor_view
from appliance.operator.doctor.examine import judge
from tests.appliance import golden
from tests.appliance.admin_server import FakeAppliance, serve_admin
from tests.appliance.operator.cli.conftest import Run
from tests.appliance.operator.doctor.test_checks import FAULTS, service

GOLDEN = Path(__file__).parent / "golden"
SHOWN = ("clock adrift", "no systrap", "model over its limit", "certificate ends soon", "secret readable")


@pytest.mark.parametrize("columns", [80, 120])
def test_looks(columns: int) -> None:
    """Good findings are one quiet line, bad ones say what they mean and what to type."""
    findings = list(judge(service()))
    for name in SHOWN:
        _, _, check, _ = FAULTS[name]
        changed = next(one for one in judge(FAULTS[name][0]) if one.check == check)
        findings = [changed if one.check == check else one for one in findings]
        if changed not in findings:
            findings.append(changed)
    text = io.StringIO()
    Console(file=text, width=columns, highlight=False).print(doctor_view(tuple(findings)))
    assert text.getvalue().isascii()
    golden.check(GOLDEN / f"doctor-{columns}.txt", text.getvalue())


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A demo's configuration on free ports."""
    demo.claim(tmp_path)
    demo.prepare_keys(tmp_path)
    demo.prepare_policy(tmp_path)
    options = demo.DemoOptions(http_port=0, grpc_port=0, admin_port=0)
    return demo.write_config(tmp_path, options, demo.choose_models(()))


def test_formats_and_exit_codes(run: Run, config: Path) -> None:
    """0 while nothing is a problem, 1 as soon as something is; JSON and YAML hold the same."""
    result = run("doctor", "--config", str(config), "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["summary"]["problem"]) == (0, 0), result.stdout
    (config.parent / "pepper").chmod(0o604)
    result = run("doctor", "--config", str(config), "-o", "yaml")
    assert result.exit_code == 1
    findings = YAML(typ="safe").load(result.stdout)["findings"]
    pepper = next(one for one in findings if one["check"] == "pepper")
    assert pepper["level"] == "problem"
    assert pepper["mend"] == f"chmod o= '{config.parent / 'pepper'}'"
    assert set(pepper) == set(document["findings"][0])


def test_no_configuration(run: Run, tmp_path: Path) -> None:
    """The machine alone is looked at, which is no failure."""
    result = run("doctor", "--config", str(tmp_path / "none.yaml"))
    assert result.exit_code == 0, result.stdout
    assert "only the machine was looked at" in result.stdout


def test_a_wrong_configuration_is_shown_with_its_place(run: Run, tmp_path: Path) -> None:
    """File, line and column of the first fault, and how many there are."""
    path = tmp_path / "athanor.yaml"
    path.write_text("models: []\npolicie: x\n")
    result = run("doctor", "--config", str(path), columns=200)
    assert result.exit_code == 1
    assert f"{path}:" in result.stdout
    assert "more" in result.stdout


def test_a_running_appliance_is_asked(run: Run, config: Path) -> None:
    """What is in force is compared with what lies on disk; ports in use are then its own."""
    with serve_admin(FakeAppliance(), Path(socket_path := f"{config.parent}/a.sock")):
        values = config.read_text().splitlines()[1:]
        document = json.loads("\n".join(values))
        document["listen"]["admin"] = f"unix:{socket_path}"
        config.write_text(json.dumps(document))
        findings = json.loads(run("doctor", "-c", str(config), "--json").stdout)["findings"]
    found = {one["check"]: one for one in findings}
    assert found["appliance"]["level"] == "ok"
    assert found["policy"]["means"] == "the edited policy is not in force"


def test_a_gateway_that_hangs_is_told_from_none(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway listens on the admin address and says nothing: it hangs, and its ports are not another program's."""
    monkeypatch.setattr("appliance.operator.cli.doctor.ADMIN_S", 0.2)
    monkeypatch.setattr("appliance.operator.doctor.service_facts.holder", lambda port: "process 7 (athanor gateway)")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = re.sub(r'"admin": "[^"]*"', f'"admin": "127.0.0.1:{port}"', config.read_text())
        config.write_text(text)
        result = run("doctor", "--config", str(config), columns=200)
    assert result.exit_code == 1
    assert "does not answer within 0.2 s" in result.stdout
    assert "is taken by" not in result.stdout
