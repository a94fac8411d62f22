"""The operator's day: reload, keys, status, traces, without root, without a sandbox, without runsc."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from appliance.common.catalog import embedded_model
from appliance.operator.demo import DemoOptions, choose_ports, prepare_keys, prepare_policy, write_config
from tests.system.commands import athanor
from tests.system.conftest import ATHANOR, PLAIN, Appliance, running, start_demo

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]


def installed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed program."""
    return subprocess.run([ATHANOR, *arguments], capture_output=True, text=True, check=False, timeout=60)


def ask(appliance: Appliance, tenant: str = "alpha", key: str | None = None) -> int:
    """Status code of a small request."""
    client = appliance.openai(tenant) if key is None else appliance.openai(tenant).with_options(api_key=key)
    try:
        client.completions.create(model="athanor-mini", prompt="hello", max_tokens=1)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


@pytest.fixture
def governed(appliance: Appliance) -> Iterator[Appliance]:
    """The shared demo, whose policy is afterwards what it was."""
    policy = appliance.state / "policy.yaml"
    good = policy.read_text()
    yield appliance
    policy.write_text(good)
    assert athanor("reload", "--admin", appliance.ready["admin"]).returncode == 0


def test_a_reload_takes_effect_and_a_bad_one_changes_nothing(governed: Appliance) -> None:
    """A tenant taken out is refused after `athanor reload`; a broken file is refused with its place and changes
    nothing; SIGHUP does the same as the command."""
    policy = governed.state / "policy.yaml"
    good = policy.read_text()
    admin = ("--admin", governed.ready["admin"])
    assert ask(governed, "beta") == 200

    policy.write_text(good.replace("concurrency: 256", "concurrency: -3", 1))
    bad = athanor("reload", *admin)
    assert bad.returncode != 0 and "policy.yaml:" in bad.stdout + bad.stderr
    assert ask(governed, "beta") == 200
    assert governed.status()["policy"]["last_error"]

    policy.write_text(good[: good.index("  beta:")])
    assert athanor("reload", *admin).returncode == 0
    assert (ask(governed, "alpha"), ask(governed, "beta")) == (200, 401)

    policy.write_text(good)
    digest = governed.status()["policy"]["digest"]
    governed.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 10
    while governed.status()["policy"]["digest"] == digest:
        assert time.monotonic() < deadline
    assert ask(governed, "beta") == 200


def test_a_reload_reads_the_configuration(governed: Appliance) -> None:
    """An edited athanor.yaml: a live key is applied, another is told to need a restart, a wrong one is refused with its
    place, also where the launcher read the file and the gateway is its child. Requests are answered all the time."""
    path, admin = governed.state / "athanor.yaml", ("--admin", governed.ready["admin"])
    good = path.read_text()
    values = json.loads(good.partition("\n")[2])
    sandbox = values.get("sandbox", {})
    try:
        path.write_text(json.dumps({**values, "sandbox": {**sandbox, "step_timeout_s": 250, "own_texts": 3}}))
        done = athanor("reload", *admin)
        assert done.returncode == 0, done.stderr
        assert "applied sandbox.step_timeout_s (300 -> 250)" in done.stdout
        assert "needs a restart: sandbox.own_texts (4 -> 3)" in done.stdout
        path.write_text(json.dumps({**values, "sandbox": {**sandbox, "step_timeout": 250}}))
        bad = athanor("reload", *admin)
        assert (bad.returncode, f"{path}:" in bad.stderr, "step_timeout_s" in bad.stderr) == (1, True, True)
        assert ask(governed) == 200
    finally:
        path.write_text(good)
    done = athanor("reload", *admin)
    assert "applied sandbox.step_timeout_s (250 -> 300)" in done.stdout
    assert "needs a restart" not in done.stdout


@pytest.mark.full
def test_drop_ins_of_the_policy_work_after_a_reload(governed: Appliance) -> None:
    """A tenant of a drop-in is served once it is reloaded, a stray file is told, and both are gone with the files."""
    made = athanor("key", "create", "delta", "--credentials", str(governed.state / "credentials.json"))
    key = next(word for word in made.stdout.split() if word.startswith("ath_"))
    drop_ins = governed.state / "policy.d"
    drop_ins.mkdir()
    tenant = f'version: 1\ntenants:\n  delta:\n    credentials: ["key:{key.split("_")[1]}"]\n    models: ["*"]\n'
    (drop_ins / "10-delta.yaml").write_text(tenant)
    (drop_ins / "20-more.yml").write_text(tenant)
    try:
        assert ask(governed, key=key) == 401
        done = athanor("reload", "--admin", governed.ready["admin"])
        assert done.returncode == 0, done.stderr
        assert "20-more.yml: not read" in done.stdout
        assert ask(governed, key=key) == 200
    finally:
        shutil.rmtree(drop_ins)
    assert athanor("reload", "--admin", governed.ready["admin"]).returncode == 0
    assert ask(governed, key=key) == 401


def test_a_new_tenant_and_key_work_after_a_reload(governed: Appliance) -> None:
    """What the help desk says about adding a tenant is true."""
    made = athanor("key", "create", "gamma", "--credentials", str(governed.state / "credentials.json"))
    assert made.returncode == 0, made.stderr
    key = next(word for word in made.stdout.split() if word.startswith("ath_"))
    key_id = key.split("_")[1]
    policy = governed.state / "policy.yaml"
    policy.write_text(
        policy.read_text() + f'  gamma:\n    credentials: ["key:{key_id}"]\n    models: ["athanor-mini"]\n'
    )
    checked = athanor("policy", "check", str(policy))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert ask(governed, key=key) == 401
    assert athanor("reload", "--admin", governed.ready["admin"]).returncode == 0
    assert ask(governed, key=key) == 200


def test_status_and_traces_show_what_is_there(appliance: Appliance) -> None:
    """`athanor status` names models and sandbox kind, `athanor traces` lists requests, with an id it draws one."""
    assert ask(appliance) == 200
    admin = ("--admin", appliance.ready["admin"])
    status = athanor("status", *admin)
    assert status.returncode == 0 and "athanor-mini" in status.stdout and "gvisor/systrap" in status.stdout
    listing = athanor("traces", *admin)
    assert listing.returncode == 0 and "alpha" in listing.stdout
    newest = httpx.get(appliance.ready["admin"] + "/traces", verify=PLAIN).json()["traces"][0]["trace_id"]
    drawn = athanor("traces", newest, *admin)
    assert drawn.returncode == 0 and "prefill" in drawn.stdout and "decode" in drawn.stdout


def test_without_a_sandbox_it_is_loud(tmp_path: Path) -> None:
    """`--unsafe-no-sandbox` serves, and says so in the ready line, in status, in spans and in the log."""
    with running(tmp_path / "state", "--unsafe-no-sandbox") as appliance:
        assert appliance.ready["sandbox"] == "unsafe/none"
        assert ask(appliance) == 200
        assert appliance.status()["sandbox"] == "unsafe/none"
        status = athanor("status", "--admin", appliance.ready["admin"])
        assert "NO SANDBOX" in (status.stdout + status.stderr).upper()
        newest = httpx.get(appliance.ready["admin"] + "/traces", verify=PLAIN).json()["traces"][0]
        assert newest["sandbox"] == "unsafe/none"
        assert "NO SANDBOX" in appliance.log.read_text()


def test_without_runsc_it_refuses_and_says_how_to_get_one(tmp_path: Path) -> None:
    """No runsc, no service: the status is not zero and the message has the mend."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    prepare_keys(state)
    prepare_policy(state)
    options = DemoOptions(*choose_ports((0, 0, 0)), state_dir=state)
    config = write_config(state, options, {"athanor-mini": embedded_model()})
    comment, _, text = config.read_text().partition("\n")
    values = json.loads(text)
    values["sandbox"] = {**values.get("sandbox", {}), "runsc": f"{tmp_path}/none"}
    config.write_text(f"{comment}\n{json.dumps(values)}")
    done = installed("serve", "--config", str(config))
    assert done.returncode == 4
    assert "runsc" in done.stderr and "images/runsc.py" in done.stderr


def test_without_root_it_serves_from_the_same_sandbox(tmp_path: Path, runsc_path: Path) -> None:
    """An unprivileged user gets gVisor too: own user namespace, same answers, nothing left."""
    if os.geteuid() != 0:
        pytest.skip("already without root: every other test shows it")
    with tempfile.TemporaryDirectory(prefix="athanor-nobody-") as home:
        python = reachable_python(Path(home), runsc_path)
        os.chown(home, 65_534, 65_534)
        who = {"user": 65_534, "group": 65_534, "extra_groups": []}
        command = (str(python), "-m", "appliance.operator.cli")
        appliance = start_demo(Path(home) / "state", command=command, cwd=home, env={"HOME": home}, **who)
        try:
            assert appliance.ready["sandbox"] == "gvisor/systrap"
            assert ask(appliance) == 200
            assert uid_of(appliance.process.pid) == 65_534
            assert uid_of(appliance.sandbox_pid("engine")) == 65_534
        finally:
            assert appliance.stop() == 0


def reachable_python(home: Path, runsc: Path) -> Path:
    """An environment with our packages whose interpreter an unprivileged user can run: the distribution's, since ours
    may lie below a private home directory."""
    base = Path(f"/usr/bin/python3.{sys.version_info.minor}")
    if not base.exists():
        pytest.skip(f"no {base}, and this interpreter may be out of an unprivileged user's reach")
    subprocess.run([str(base), "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    library = home / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    root = Path(__file__).resolve().parents[2]
    (library / "ours.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")
    (home / "venv" / "bin" / "runsc").symlink_to(runsc)
    return home / "venv" / "bin" / "python"


def uid_of(pid: int) -> int:
    """The user of a process."""
    return os.stat(f"/proc/{pid}").st_uid


def test_a_port_in_use_is_a_clear_error(appliance: Appliance, tmp_path: Path) -> None:
    """The second appliance on the same port ends at once and says which port."""
    port = appliance.ready["http"].rpartition(":")[2]
    done = installed(
        "demo",
        "--json",
        "--http-port",
        port,
        "--grpc-port",
        "0",
        "--admin-port",
        "0",
        "--state-dir",
        str(tmp_path / "state"),
    )
    assert done.returncode == 4
    assert port in done.stderr and "Traceback" not in done.stderr
