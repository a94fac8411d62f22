"""Our units with their drop-ins, and what their users may do: real users, files, folders and sockets."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.config import ApplianceConfig
from appliance.common.config_loader import load_config
from appliance.operator import demo
from appliance.operator.doctor.facts import Refusal, Running, ServiceFacts, ServiceUnit
from appliance.operator.doctor.finding import Finding, Severity
from appliance.operator.doctor.service_checks import check_port
from appliance.operator.doctor.service_facts import look_at_service
from appliance.operator.doctor.unit_checks import check_refusal, check_units
from appliance.operator.doctor.units import credentials_of, environment_of, has_unread_drop_in, parse_units

SHOWN = """\
Id=athanor-gateway.service
LoadState=loaded
ActiveState=activating
NeedDaemonReload=yes
FragmentPath=/lib/systemd/system/athanor-gateway.service
DropInPaths=/etc/systemd/system/athanor-gateway.service.d/trace.conf
User=athanor-gateway
Group=athanor
SupplementaryGroups=render
ExecStart={ argv[]=/bin/athanor serve --role gateway --config /a.yaml --set sandbox.cores=4 ; ignore_errors=no }
Environment=PYTHONMALLOC=malloc "OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318" ATHANOR_SANDBOX__CORES=2
EnvironmentFiles={file} (ignore_errors=yes)
NFileDescriptorStore=1
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=no
InaccessiblePaths=-/var/lib/athanor
RuntimeDirectory=athanor

Id=athanor-supervisor.service
LoadState=not-found
"""

RUNNING = Running(admin="127.0.0.1:0")
NOBODY = pwd.getpwuid(65534).pw_name
THEIRS = grp.getgrgid(pwd.getpwuid(65534).pw_gid).gr_name
GATEWAY = ServiceUnit(name="athanor-gateway.service", user=NOBODY)
SUPERVISOR = ServiceUnit(name="athanor-supervisor.service", user=NOBODY)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")


@pytest.fixture
def state() -> Iterator[Path]:
    """A demo's state directory whose files belong to the user of the units, in a folder that everybody may pass: those
    that pytest makes are closed."""
    with tempfile.TemporaryDirectory(prefix="athanor-units-") as name:
        folder = Path(name)
        demo.claim(folder)
        demo.prepare_keys(folder)
        demo.prepare_policy(folder)
        options = demo.DemoOptions(http_port=0, grpc_port=0, admin_port=0)
        demo.write_config(folder, options, demo.choose_models(()))
        for path in (folder, *folder.rglob("*")) if os.geteuid() == 0 else ():
            os.chown(path, 65534, -1, follow_symlinks=False)
        yield folder


def read(state: Path, **changes: object) -> ApplianceConfig:
    """The configuration of the state directory, with the model in a folder that every user may read."""
    config = load_config(state / "athanor.yaml")
    model = config.models[0].model_copy(update={"path": state / "model"})
    model.path.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model.path / name).write_text("{}")
        (model.path / name).chmod(0o644)
    model.path.chmod(0o755)
    sandbox = config.sandbox.model_copy(update={"kernels": None, "runsc": ""})
    run_dir = state / "run"
    return config.model_copy(update={"models": (model,), "sandbox": sandbox, "run_dir": run_dir, **changes})


def refused(state: Path, *units: ServiceUnit, **changes: object) -> list[Refusal]:
    """What the users of units cannot use, of a configuration with these changes."""
    path = state / "athanor.yaml"
    mine = tuple(replace(unit, command=("athanor", "serve", "--config", str(path))) for unit in units)
    found = look_at_service(read(state, **changes), path, RUNNING, units=mine)
    assert found.tried > 0
    return list(found.refusals)


def test_systemds_words_are_understood(tmp_path: Path) -> None:
    """User, groups, command, variables with quotes and those of a file, kept sockets and folders of a loaded unit; one
    that is not there is left out."""
    file = tmp_path / "otel.env"
    file.write_text("# traces\nOTEL_TRACES_EXPORTER=none\nOTEL_RESOURCE_ATTRIBUTES='a=b c'\n")
    (unit,) = parse_units(SHOWN.replace("{file}", str(file)))
    assert (unit.user, unit.group, unit.groups) == ("athanor-gateway", "athanor", ("render",))
    assert (unit.stale, unit.active, unit.kept) == (True, False, 1)
    assert unit.command[-2:] == ("--set", "sandbox.cores=4")
    assert environment_of(unit) == {
        "PYTHONMALLOC": "malloc",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
        "ATHANOR_SANDBOX__CORES": "2",
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_RESOURCE_ATTRIBUTES": "a=b c",
    }
    assert unit.made == ("/run/athanor",)
    assert "/var/lib/athanor" in unit.hidden
    assert "/home" in unit.hidden
    assert "/dev" not in unit.hidden


def test_credentials_come_from_the_files_of_a_unit() -> None:
    """Those of drop-ins are added; an empty assignment takes away what was there."""
    main, more = "[Service]\nLoadCredential=pepper:/etc/athanor/pepper\n", "LoadCredentialEncrypted=root-key:/x\n"
    assert credentials_of([main, more]) == {"pepper": "/etc/athanor/pepper", "root-key": "/x"}
    assert credentials_of([main, f"LoadCredential=\n{more}"]) == {"root-key": "/x"}


@as_root
def test_a_service_that_can_use_everything_has_no_findings(state: Path) -> None:
    """Control: both users may use all that the demo's configuration names, and what is to be made can be made."""
    assert refused(state, GATEWAY, SUPERVISOR) == []


@as_root
@pytest.mark.parametrize("name", ["policy.yaml", "credentials.json", "pepper"])
def test_a_file_that_only_root_can_read_is_found(state: Path, name: str) -> None:
    """Root reads it and the service does not: told with path, user, owner and mode, and the mend that is typed makes it
    usable."""
    file = state / name
    os.chown(file, 0, 0)
    file.chmod(0o600)
    (found,) = refused(state, GATEWAY)
    assert (found.path, found.culprit, found.user, found.use) == (str(file), str(file), NOBODY, "read")
    assert (found.reason, found.owner, found.mode) == ("permission denied", "root:root", 0o600)
    finding = check_refusal(found)
    assert finding.level is Severity.PROBLEM
    assert finding.mend == f"chgrp {THEIRS} '{file}' && chmod g+rX '{file}'"
    assert os.system(finding.mend) == 0
    assert refused(state, GATEWAY) == []


@as_root
def test_a_folder_on_the_way_is_named(state: Path) -> None:
    """A file of the right owner in a folder that may not be passed: the folder is told, and its mend."""
    folder = state / "closed"
    folder.mkdir()
    (state / "policy.yaml").rename(folder / "policy.yaml")
    folder.chmod(0o700)
    policy = folder / "policy.yaml"
    found = refused(state, GATEWAY, policy=policy)
    assert {one.culprit for one in found} == {str(folder)}
    mend = check_refusal(found[0]).mend.partition("    #")[0]
    assert mend == f"chmod o+x '{folder}'"
    assert os.system(mend) == 0
    assert refused(state, GATEWAY, policy=policy) == []


@as_root
def test_a_file_that_root_left_in_a_folder_of_the_service_is_found(state: Path) -> None:
    """The audit log's folder belongs to the service; one file in it does not, as after a command of root's there."""
    folder = read(state).audit.directory
    folder.mkdir(exist_ok=True)
    os.chown(folder, 65534, -1)
    left = folder / "00000001.log"
    left.write_text("x")
    left.chmod(0o600)
    (found,) = refused(state, SUPERVISOR)
    assert (found.purpose, found.culprit, found.use) == ("audit log", str(left), "write to")
    assert os.system(check_refusal(found).mend) == 0
    assert refused(state, SUPERVISOR) == []


@as_root
def test_a_socket_that_cannot_be_opened_is_found(state: Path) -> None:
    """The gateway cannot open the supervisor's control socket. Control: with its rights it can."""
    run_dir = read(state).run_dir
    run_dir.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(run_dir / "control.sock"))
        run_dir.chmod(0o755)
        (run_dir / "control.sock").chmod(0o600)
        (found,) = refused(state, GATEWAY)
        assert (found.purpose, found.use) == ("control socket", "open")
        (run_dir / "control.sock").chmod(0o666)
        assert refused(state, GATEWAY) == []


@as_root
def test_what_a_unit_withholds_is_found(state: Path) -> None:
    """Its user might, and the unit's own mounts forbid it: a folder that is read-only in the unit, one that it does not
    see. A folder that systemd makes for it is neither."""
    strict = replace(SUPERVISOR, protect_system="strict")
    told = {one.purpose: one for one in refused(state, strict)}
    assert set(told) >= {"audit log", "run directory"}
    assert "model athanor-mini" not in told
    assert "ReadWritePaths=" in check_refusal(told["audit log"]).mend
    assert refused(state, replace(strict, writable=(str(state),))) == []
    hidden = refused(state, replace(SUPERVISOR, hidden=(str(state / "model"),)))
    assert {one.withheld for one in hidden} == {"InaccessiblePaths="}
    assert "InaccessiblePaths=" in check_refusal(hidden[0]).what


@as_root
def test_a_folder_that_systemd_gives_to_the_user_is_no_problem(state: Path) -> None:
    """A state directory that root has put in place, as from a backup: at the next start systemd gives it to the unit's
    user, with all that is in it. Controls: of a unit that runs, and of a folder that no unit makes, it is told."""
    folder = read(state).audit.directory
    folder.mkdir(exist_ok=True)
    os.chown(folder, 0, 0)
    folder.chmod(0o700)
    assert "audit log" in {one.purpose for one in refused(state, SUPERVISOR)}
    made = replace(SUPERVISOR, made=(str(folder),))
    assert "audit log" not in {one.purpose for one in refused(state, made)}
    assert "audit log" in {one.purpose for one in refused(state, replace(made, active=True))}


@as_root
def test_a_user_or_a_credential_that_is_nowhere_is_found(state: Path) -> None:
    """A drop-in that names another user, and a credential that the unit does not load or whose file is gone."""
    (found,) = refused(state, replace(GATEWAY, user="nobody-of-that-name"))
    assert "nobody-of-that-name" in check_refusal(found).what
    pepper = Path("/run/credentials/athanor-gateway.service/pepper")
    (found,) = refused(state, GATEWAY, pepper=pepper)
    assert "loads no credential 'pepper'" in check_refusal(found).what
    (found,) = refused(state, replace(GATEWAY, credentials=(("pepper", str(state / "gone")),)), pepper=pepper)
    assert "no such file" in check_refusal(found).what
    assert refused(state, replace(GATEWAY, credentials=(("pepper", str(state / "pepper")),)), pepper=pepper) == []


def worse(findings: list[Finding]) -> list[Finding]:
    """Warnings and problems."""
    return [one for one in findings if one.level in (Severity.WARNING, Severity.PROBLEM)]


def look(
    state: Path, unit: ServiceUnit, config: ApplianceConfig | None = None, options: tuple[str, ...] = ()
) -> ServiceFacts:
    """Facts about a service with this unit."""
    path = state / "athanor.yaml"
    return look_at_service(config or read(state), path, RUNNING, units=(unit,), options=options)


def test_a_drop_in_that_traces_or_starts_otherwise_is_seen(state: Path) -> None:
    """Variables of the unit name the collector, not those of this shell; another --config, a --set and ATHANOR_*
    variables are told without their values. Control: what was looked at with the same options is not told."""
    path = str(state / "athanor.yaml")
    tracing = (
        ("OTEL_EXPORTER_OTLP_HEADERS", "collector.example"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1"),
        ("ATHANOR_SANDBOX__CORES", "2"),
    )
    command = ("athanor", "serve", "--config", path, "--set", "sandbox.cores=4")
    unit = replace(GATEWAY, command=command, environment=tracing, drop_ins=("/x.conf",), stale=True)
    found = look(state, unit)
    assert "collector.example" not in repr(found.units), "values of variables are not kept"
    assert [one.endpoint for one in found.exporters] == ["http://127.0.0.1:1"] * 2
    told = "\n".join(one.what for one in worse(list(check_units(replace(found, refusals=())))))
    assert "sets sandbox.cores on its command line" in told
    assert "sets ATHANOR_SANDBOX__CORES" in told
    assert "has changed on disk" in told
    plain = replace(GATEWAY, command=command)
    assert look(state, plain, options=("sandbox.cores=4",)).own_settings == ()
    other = replace(GATEWAY, command=("athanor", "serve", "--config=/other.yaml", path))
    assert "starts with /other.yaml" in look(state, other).own_settings[0]


def test_a_drop_in_that_systemd_has_not_read_is_found(tmp_path: Path) -> None:
    """A drop-in on disk that the loaded unit does not have, also in a folder that is new, of which systemd's own
    NeedDaemonReload says nothing. Control: one that is read, one that such a one hides, one that masks, and none."""
    etc, lib = tmp_path / "etc", tmp_path / "lib"
    assert not has_unread_drop_in(GATEWAY, (etc, lib))
    for folder in (etc, lib):
        (folder / f"{GATEWAY.name}.d").mkdir(parents=True)
    tracing, hidden = (folder / f"{GATEWAY.name}.d/tracing.conf" for folder in (etc, lib))
    tracing.write_text("[Service]\n")
    assert has_unread_drop_in(GATEWAY, (etc, lib))
    read = replace(GATEWAY, drop_ins=(str(tracing),))
    assert not has_unread_drop_in(read, (etc, lib))
    hidden.write_text("[Service]\n")
    (lib / f"{GATEWAY.name}.d/masked.conf").symlink_to("/dev/null")
    assert not has_unread_drop_in(read, (etc, lib))
    assert has_unread_drop_in(read, (lib, etc))


def test_the_socket_that_systemd_keeps_is_our_own(state: Path) -> None:
    """While the gateway is down its HTTP address is taken: by systemd, for us. Control: with nothing kept, or by
    another process, it is somebody else's."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        config = read(state)
        address = f"127.0.0.1:{held.getsockname()[1]}"
        listen = config.listen.model_copy(update={"http": address})
        unit = replace(GATEWAY, command=(str(state / "athanor.yaml"),), kept=1)
        port = look(state, unit, config.model_copy(update={"listen": listen})).ports[0]
        assert (port.in_use, port.kept) == (True, False), "the holder is this process, not systemd"
    systemds = replace(port, holder="process 1 (systemd)", kept=True)
    assert check_port(systemds, running=False).level is Severity.OK
    assert check_port(replace(systemds, kept=False), running=False).level is Severity.PROBLEM
