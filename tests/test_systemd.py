"""The units: accepted by systemd without a word, their exposure bounded, and in agreement with each other."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from appliance.common.audit import files, names
from appliance.common.config_loader import load_config
from appliance.common.usage import book

UNITS = Path(__file__).resolve().parents[1] / "systemd"
NAMES = sorted(
    path.name for path in UNITS.iterdir() if path.suffix in {".service", ".slice", ".target", ".timer", ".socket"}
)
SYSTEM_UNITS = Path("/usr/lib/systemd/system")

EXPOSURE_BARS = {
    "athanor-carrier.service": 1.2,
    "athanor-fetch.service": 1.2,
    "athanor-gateway.service": 1.2,
    "athanor-operator.service": 1.5,
    "athanor-statements.service": 1.0,
    "athanor-supervisor.service": 2.5,
    "athanor-witness.service": 1.2,
}
"""Of ``systemd-analyze security``: 0 is safest; a unit without settings has 9.6, container daemons do too."""


def tool(name: str) -> str:
    """A program of systemd, or a skip."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine")
    return found


@pytest.fixture
def installed(tmp_path) -> Path:
    """A root with the machine's own units, ours, and a stand-in for the command that they run."""
    if not SYSTEM_UNITS.is_dir():
        pytest.skip("no systemd units on this machine")
    shutil.copytree(SYSTEM_UNITS, tmp_path / "usr/lib/systemd/system", symlinks=True)
    for name in NAMES:
        shutil.copy(UNITS / name, tmp_path / "usr/lib/systemd/system")
    command = tmp_path / "usr/bin/athanor"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    return tmp_path


def verify(root: Path, *names: str) -> str:
    """What ``systemd-analyze verify`` has to say."""
    argv = [tool("systemd-analyze"), "verify", "--man=no", f"--root={root}", *names]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_units_are_accepted_without_a_word(installed):
    """No unknown key, no missing unit, no command that is not there; a mistyped key would be told."""
    assert verify(installed, *NAMES) == ""
    unit = installed / "usr/lib/systemd/system/athanor-gateway.service"
    unit.write_text(unit.read_text().replace("KeyringMode=", "KeyringMoed="))
    assert "Unknown key" in verify(installed, "athanor-gateway.service")


@pytest.mark.parametrize("name", sorted(EXPOSURE_BARS))
def test_exposure_is_bounded(name):
    """What a taken-over service could reach on its host stays below the bar."""
    argv = [tool("systemd-analyze"), "security", "--offline=true", "--no-pager", str(UNITS / name)]
    text = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stdout
    match = re.search(r"Overall exposure level for \S+: ([\d.]+)", text)
    assert match, text
    print(f"{name}: exposure {match[1]}")
    assert float(match[1]) <= EXPOSURE_BARS[name], text


def read_unit(name: str) -> configparser.RawConfigParser:
    """A unit file; of keys that are given several times the last counts here."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(UNITS / name)
    return parser


def test_commands_and_directories_agree_with_the_configuration():
    """The shipped athanor.yaml names the directories that the units make and the credential that they load."""
    config = load_config(UNITS / "athanor.yaml")
    supervisor, gateway = (read_unit(f"athanor-{role}.service")["Service"] for role in ("supervisor", "gateway"))
    for role, unit in (("supervisor", supervisor), ("gateway", gateway)):
        assert unit["ExecStart"] == f"/usr/bin/athanor serve --role {role} --config /etc/athanor/athanor.yaml"
        assert (unit["Type"], unit["NotifyAccess"], unit["LimitCORE"]) == ("notify", "main", "0")
    assert gateway["ExecReload"] == f"/usr/bin/athanor reload --admin {config.listen.admin}"
    assert str(config.run_dir) == f"/run/{supervisor['RuntimeDirectory']}"
    assert config.listen.admin.startswith(f"unix:/run/{gateway['RuntimeDirectory']}/")
    credential, _, source = gateway["LoadCredential"].partition(":")
    assert str(config.pepper) == f"/run/credentials/athanor-gateway.service/{credential}"
    assert source == "/etc/athanor/pepper"


def test_neither_service_is_root_and_only_one_has_a_network():
    """No capability, no way to new rights; the supervisor has no network device but its own loopback."""
    supervisor, gateway = (read_unit(f"athanor-{role}.service")["Service"] for role in ("supervisor", "gateway"))
    for unit in (supervisor, gateway):
        assert unit["CapabilityBoundingSet"] == unit["AmbientCapabilities"] == ""
        assert unit["NoNewPrivileges"] == "yes"
        assert unit["Group"] == "athanor"
    assert supervisor["User"] != gateway["User"]
    assert supervisor["PrivateNetwork"] == "yes"
    assert "AF_INET" not in supervisor["RestrictAddressFamilies"]
    assert "LoadCredential" not in supervisor, "the pepper is the gateway's alone"


def test_the_downloader_has_a_network_and_its_own_folder_alone():
    """Its user, group and folders are its own; what the others have is hidden; systemd reads the configuration."""
    config = load_config(UNITS / "athanor.yaml")
    fetch, supervisor, gateway = (
        read_unit(f"athanor-{role}.service")["Service"] for role in ("fetch", "supervisor", "gateway")
    )
    assert fetch["CapabilityBoundingSet"] == fetch["AmbientCapabilities"] == ""
    assert "athanor" not in (fetch["User"], fetch["Group"], fetch.get("SupplementaryGroups", ""))
    assert fetch["User"] not in (supervisor["User"], gateway["User"])
    hidden = {path.lstrip("-") for path in fetch["InaccessiblePaths"].split()}
    made = {f"/run/{one['RuntimeDirectory']}" for one in (supervisor, gateway)}
    assert hidden >= made | {f"/var/lib/{supervisor['StateDirectory']}", "/var/lib/athanor"}
    name, _, source = fetch["LoadCredential"].partition(":")
    assert fetch["ExecStart"].endswith(f"--role fetch --config /run/credentials/athanor-fetch.service/{name}")
    assert source == "/etc/athanor/athanor.yaml"
    assert config.model_cache is not None
    assert str(config.model_cache.directory) == f"/var/lib/{fetch['StateDirectory']}"
    assert str(config.model_cache.socket).startswith(f"/run/{fetch['RuntimeDirectory']}/")
    assert str(config.model_cache.directory) in gateway["InaccessiblePaths"]


def test_the_carrier_has_a_network_and_one_socket_alone():
    """Its user and group are its own, what the others have is hidden, and the supervisor alone may connect to it, which
    has no network; the target does not start it."""
    carrier, supervisor = (read_unit(f"athanor-{role}.service")["Service"] for role in ("carrier", "supervisor"))
    assert carrier["CapabilityBoundingSet"] == carrier["AmbientCapabilities"] == ""
    assert carrier["User"] == carrier["Group"] == "athanor-carrier"
    assert "SupplementaryGroups" not in carrier and "StateDirectory" not in carrier
    hidden = {path.lstrip("-") for path in carrier["InaccessiblePaths"].split()}
    assert hidden >= {"/run/athanor", "/run/athanor-supervisor", "/var/lib/athanor", "/var/lib/athanor-supervisor"}
    socket = read_unit("athanor-carrier.socket")["Socket"]
    assert (socket["SocketUser"], socket["SocketMode"]) == (supervisor["User"], "0600")
    assert socket["FileDescriptorName"] == "carrier"
    assert "athanor-carrier" not in (UNITS / "athanor.target").read_text()


def test_the_operators_api_has_no_network_and_tells_users_apart():
    """Its socket lies in its own folder, it writes the operator's folder alone, and no user namespace hides the ids of
    its callers; the target does not start it."""
    unit = read_unit("athanor-operator.service")["Service"]
    assert unit["ExecStart"] == "/usr/bin/athanor serve --role operator --config /etc/athanor/athanor.yaml"
    assert (unit["PrivateNetwork"], unit["RestrictAddressFamilies"]) == ("yes", "AF_UNIX")
    assert unit["ReadWritePaths"] == "/etc/athanor" and "PrivateUsers" not in unit
    assert unit["RuntimeDirectory"] == "athanor-operator"
    assert "athanor-operator" not in (UNITS / "athanor.target").read_text()


def test_what_asks_witnesses_reads_the_log_and_no_key():
    """Its timer starts it; it writes its own folder alone, and what signs the log, the keys of pseudonyms, the usage
    book and the gateway's pepper are hidden. Control: these are where the log has them."""
    config, unit = load_config(UNITS / "athanor.yaml"), read_unit("athanor-witness.service")["Service"]
    text = (UNITS / "athanor-witness.service").read_text()
    hidden = {path.lstrip("-") for line in re.findall("^InaccessiblePaths=(.*)$", text, re.M) for path in line.split()}
    assert config.audit is not None
    folder = str(config.audit.directory)
    assert hidden >= {f"{folder}/{name}" for name in (files.SIGNING_KEY, names.FOLDER, book.FOLDER)}
    assert hidden >= {"/etc/athanor/pepper", "/run/athanor", "/run/athanor-supervisor", "/var/lib/athanor"}
    assert unit["ReadWritePaths"] == f"/var/lib/{unit['StateDirectory']}" and folder.startswith(unit["ReadOnlyPaths"])
    assert unit["ExecStart"] == "/usr/bin/athanor audit witness --config /etc/athanor/athanor.yaml"
    assert (unit["User"], unit["CapabilityBoundingSet"]) == ("athanor-supervisor", "")
    timer = read_unit("athanor-witness.timer")
    assert (timer["Timer"]["OnCalendar"], timer["Timer"]["Persistent"]) == ("hourly", "true")
    assert "athanor-witness" not in (UNITS / "athanor.target").read_text()


def test_users_and_directories(tmp_path):
    """The users and their group are made, and the directories' owners are among them; the downloader is in no group of
    the others."""
    (tmp_path / "etc").mkdir()
    argv = [tool("systemd-sysusers"), f"--root={tmp_path}", str(UNITS / "athanor.sysusers.conf")]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    users = {line.split(":")[0]: line.split(":") for line in (tmp_path / "etc/passwd").read_text().splitlines()}
    groups = {line.split(":")[0]: line.split(":")[3] for line in (tmp_path / "etc/group").read_text().splitlines()}
    assert set(users) == {"athanor-supervisor", "athanor-gateway", "athanor-fetch", "athanor-carrier"}
    assert all(user[6].endswith("nologin") for user in users.values())
    assert set(groups["athanor"].split(",")) == {"athanor-supervisor", "athanor-gateway"}
    named = set()
    for line in (UNITS / "athanor.tmpfiles.conf").read_text().splitlines():
        if line and not line.startswith("#"):
            kind, _, mode, user, group, _ = line.split()
            assert kind in {"d", "z"}
            assert int(mode, 8) & 0o022 == 0, "nobody else writes"
            named |= {user, group}
    assert named <= {"root", "athanor", *users}
