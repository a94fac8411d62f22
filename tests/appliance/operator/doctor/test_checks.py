"""Judgements: each fault is found, named with what it means and how it is mended, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.common.model_memory import Memory
from appliance.common.status import Alert
from appliance.operator.doctor.examine import counts, judge
from appliance.operator.doctor.facts import (
    Access,
    Certificate,
    Cgroups,
    Clock,
    Disk,
    DoctorFacts,
    Exporter,
    Gpu,
    Image,
    Kernels,
    Model,
    Policy,
    Port,
    ProcessLimits,
    Running,
    Runsc,
    UserNamespaces,
)
from appliance.operator.doctor.finding import Finding, Severity, worst
from appliance.operator.doctor.service_checks import check_port
from tests.appliance.gateway.console.pictures import batch, queue
from tests.appliance.operator.doctor.healthy import DAY, FACTS, GIB, MACHINE, NOW, SERVICE


def machine(**changes: object) -> DoctorFacts:
    """A healthy appliance on a machine with these faults."""
    return replace(FACTS, machine=replace(MACHINE, **changes))


def service(**changes: object) -> DoctorFacts:
    """A healthy machine with an appliance with these faults."""
    return replace(FACTS, service=replace(SERVICE, **changes))


def idle(**changes: object) -> DoctorFacts:
    """Nothing runs, on a machine with these faults."""
    stopped = Running(admin=SERVICE.running.admin)
    return replace(service(running=stopped, ports=()), machine=replace(MACHINE, **changes))


def tls(**changes: object) -> DoctorFacts:
    """A certificate with these faults."""
    return service(tls=replace(SERVICE.tls, **changes))


def bad(facts: DoctorFacts) -> list[Finding]:
    """What is worse than a note."""
    return [one for one in judge(facts) if one.level in (Severity.WARNING, Severity.PROBLEM)]


P, W, N = Severity.PROBLEM, Severity.WARNING, Severity.NOTE
STOPPED = Running(admin="unix:/run/athanor/admin.sock")

FAULTS = {
    "one core": (machine(cores=1), W, "processor", "two cores"),
    "driver that runsc does not know": (machine(gpu=replace(MACHINE.gpu, known=("550.1",))), W, "gpu", "550.1"),
    "clock adrift": (machine(clock=Clock(now=NOW, synchronised=False)), W, "clock", "set-ntp"),
    "clock coarse": (machine(clock=Clock(now=NOW, synchronised=True, max_error_s=9)), W, "clock", "timesync"),
    "clock of 1970": (
        replace(tls(not_before=0.0), machine=replace(MACHINE, clock=Clock(now=5.0, synchronised=True))),
        P,
        "clock",
        "set-ntp",
    ),
    "few processes": (
        machine(limits=ProcessLimits(nofile=-1, memlock=-1, pids=100, under_systemd=False)),
        P,
        "limits",
        "ulimit -u",
    ),
    "few descriptors": (
        machine(limits=ProcessLimits(nofile=256, memlock=-1, pids=-1, under_systemd=False)),
        W,
        "limits",
        "ulimit -n",
    ),
    "no runsc": (machine(runsc=Runsc(problem="no usable runsc")), P, "runsc", "images/runsc.py"),
    "no systrap": (machine(runsc=replace(MACHINE.runsc, platform_problem="EPERM")), P, "platform", "ptrace_scope"),
    "no namespaces, root": (
        machine(namespaces=UserNamespaces(problem="refused; sysctl x")),
        W,
        "user namespaces",
        "sysctl x",
    ),
    "no namespaces": (
        machine(root=False, namespaces=UserNamespaces(problem="no; sysctl x")),
        P,
        "user namespaces",
        "sysctl x",
    ),
    "no cgroups": (
        idle(cgroups=Cgroups(version=0, controllers=(), directory="", writable=False)),
        W,
        "cgroups",
        "systemd",
    ),
    "no memory controller": (
        idle(cgroups=replace(MACHINE.cgroups, controllers=("cpu", "pids"))),
        W,
        "cgroups",
        "unified",
    ),
    "version 1 under the units": (
        idle(cgroups=replace(MACHINE.cgroups, version=1), limits=replace(MACHINE.limits, under_systemd=True)),
        W,
        "cgroups",
        "unified_cgroup_hierarchy",
    ),
    "version 1 in force": (
        replace(
            service(running=replace(SERVICE.running, cgroup="no limits enforced: memory (Permission denied)")),
            machine=replace(MACHINE, cgroups=replace(MACHINE.cgroups, version=1)),
        ),
        W,
        "cgroups",
        "unified_cgroup_hierarchy",
    ),
    "not delegated": (idle(cgroups=replace(MACHINE.cgroups, writable=False)), W, "cgroups", "Delegate=yes"),
    "sandboxes run without bounds": (
        service(running=replace(SERVICE.running, cgroup="no limits enforced: read-only")),
        W,
        "cgroups",
        "Delegate",
    ),
    "runs without a sandbox that the file asks for": (
        service(running=replace(SERVICE.running, unsafe=True)),
        P,
        "sandboxes",
        "systemctl restart",
    ),
    "configuration wrong": (
        replace(FACTS, service=None, config_problem="x.yaml:1:2: no\nmore"),
        P,
        "configuration",
        "athanor doctor",
    ),
    "configuration of others": (
        replace(FACTS, service=None, config_problem="cannot read x.yaml: permission denied"),
        P,
        "configuration",
        "sudo athanor doctor",
    ),
    "unsafe": (service(unsafe=True), P, "sandboxes", "unsafe_no_sandbox: false"),
    "other image": (service(image=replace(SERVICE.image, digest="cd" * 32)), P, "image", "athanor image verify"),
    "broken image": (service(image=Image(path="i", problem="changed")), P, "image", "athanor image build"),
    "not ready": (
        service(running=replace(SERVICE.running, ready=False, reason="starting")),
        W,
        "appliance",
        "athanor logs",
    ),
    "old version runs": (service(running=replace(SERVICE.running, version="0.0.9")), W, "appliance", "restart"),
    "port taken": (
        service(running=STOPPED, ports=(Port(name="http", address="h:80", in_use=True, holder="process 7 (nginx)"),)),
        P,
        "http address",
        "ss -ltnp sport = :80",
    ),
    "port of a new address taken": (
        service(ports=(Port(name="http", address="h:80", in_use=True, holder="process 7 (nginx)"),)),
        P,
        "http address",
        "ss -ltnp sport = :80",
    ),
    "no such address": (
        service(ports=(Port(name="grpc", address="9.9.9.9:1", problem="cannot assign"),)),
        P,
        "grpc address",
        "listen: grpc:",
    ),
    "tenant's socket": (
        service(ports=(Port(name="tenants.acme.http", address="unix:/x/a", problem="no folder", mend="install -d"),)),
        P,
        "tenants.acme.http address",
        "install -d",
    ),
    "open metrics": (
        service(ports=(Port(name="metrics", address="0.0.0.0:9464", open=True),)),
        W,
        "metrics address",
        "metrics_token",
    ),
    "model missing": (
        service(models=(Model(name="m", problem="model m: no *.safetensors in d; a directory is needed"),)),
        P,
        "model m",
        "a directory is needed",
    ),
    "model without its signature": (
        service(models=(Model(name="m", path="/srv/m", unsigned="model m: m/model.sig does not hold: a; b"),)),
        P,
        "model m",
        "athanor model verify /srv/m",
    ),
    "model without any signature": (
        service(models=(Model(name="m", unsigned="model m: it is not signed; sign it with: model_signing sign DIR"),)),
        P,
        "model m",
        "model_signing sign DIR",
    ),
    "no image though there is one": (
        service(image=Image(packaged="ab" * 32)),
        W,
        "image",
        "image_store: /var/lib/athanor/images",
    ),
    "null runner": (service(models=(Model(name="m", null=True),)), W, "model m", "runner: model"),
    "model over its limit": (service(sandbox_bytes=GIB), P, "memory", "memory_bytes:"),
    "adapters beyond its limit": (
        service(models=(Model(name="m", weight_bytes=GIB, kv_bytes=GIB, adapter_bytes=64 * GIB),)),
        P,
        "memory",
        "memory_bytes:",
    ),
    "model near its limit": (service(sandbox_bytes=20 * GIB), W, "memory", "memory_bytes:"),
    "machine too small": (
        replace(service(), machine=replace(MACHINE, memory=Memory(total=8 * GIB, available=GIB))),
        P,
        "memory",
        "kv_bytes",
    ),
    "machine busy": (
        replace(
            service(running=STOPPED, ports=()), machine=replace(MACHINE, memory=Memory(total=64 * GIB, available=GIB))
        ),
        W,
        "memory",
        "kv_bytes",
    ),
    "no kernels": (service(kernels=Kernels()), W, "kernels", "athanor kernels build"),
    "stale kernels": (service(kernels=Kernels(path="k", stale=True)), W, "kernels", "athanor kernels build k"),
    "foreign kernels": (service(kernels=Kernels(path="k", best="")), W, "kernels", "build k"),
    "empty kernels": (service(kernels=Kernels(path="k", problem="there are none in k")), W, "kernels", "build k"),
    "stuck batches": (
        service(running=replace(SERVICE.running, batches=queue(batch(still_s=1_000.0, obstacle="limit"), batch()))),
        W,
        "batches",
        "athanor status",
    ),
    "disk full": (
        service(disks=(Disk(path="/run", purpose="x", free=9, total=GIB, free_inodes=-1),)),
        P,
        "disk /run",
        "du -xh",
    ),
    "disk nearly full": (
        service(disks=(Disk(path="/v", purpose="x", free=GIB, total=99 * GIB, free_inodes=-1),)),
        W,
        "disk /v",
        "du -xh",
    ),
    "no inodes": (
        service(disks=(Disk(path="/v", purpose="x", free=9 * GIB, total=99 * GIB, free_inodes=3),)),
        P,
        "disk /v",
        "du -xh",
    ),
    "hung": (
        service(running=Running(admin="unix:/run/athanor/admin.sock", silent_s=3.0)),
        P,
        "appliance",
        "systemctl restart athanor-gateway",
    ),
    "sandbox down": (
        service(
            running=replace(
                SERVICE.running,
                alerts=(
                    Alert(key="down/m", level="broken", what="The engine sandbox of m is down", command="athanor logs"),
                ),
            )
        ),
        P,
        "alert",
        "athanor logs",
    ),
    "audit log not written": (
        service(
            running=replace(
                SERVICE.running,
                alerts=(
                    Alert(
                        key="audit",
                        level="degraded",
                        what="The audit log cannot be written: disk full",
                        who="Nobody.",
                        do="Make room on its disk.",
                        command="athanor doctor",
                    ),
                ),
            )
        ),
        W,
        "alert",
        "Make room",
    ),
    "collector away": (
        service(exporters=(Exporter(signal="traces", endpoint="http://x", problem="refused"),)),
        W,
        "traces to",
        "OTEL_",
    ),
    "certificate expired": (tls(not_after=NOW - 3 * DAY), P, "certificate", "renew"),
    "certificate of tomorrow": (tls(not_before=NOW + DAY), P, "certificate", "renew"),
    "certificate ends soon": (tls(not_after=NOW + 3 * DAY), W, "certificate", "renew"),
    "foreign key": (tls(key_problem="k is not the key of c"), P, "certificate", "openssl x509"),
    "no certificate, open": (service(tls=None), P, "certificate", "listen: tls:"),
    "policy wrong": (
        service(policy=Policy(path="p", problems=("p:1:1: no", "p:2:1: no"))),
        P,
        "policy",
        "athanor policy check p",
    ),
    "policy with a stray file": (
        service(policy=replace(SERVICE.policy, overlooked=("/p.d/1.yml: not read: why", "/p.d/2.yml: not read"))),
        W,
        "policy",
        "mv '/p.d/1.yml'",
    ),
    "policy with a model of nobody": (
        service(policy=replace(SERVICE.policy, missing=("tenants.a.models[0]: no model is named 'x'",))),
        W,
        "policy",
        "athanor policy check",
    ),
    "policy that allows everything": (
        service(policy=replace(SERVICE.policy, unsafe=("alpha", "beta"))),
        W,
        "policy",
        "athanor policy check",
    ),
    "policy not in force": (service(policy=replace(SERVICE.policy, digest="f" * 64)), W, "policy", "athanor reload"),
    "reload failed": (
        service(running=replace(SERVICE.running, reload_error="p:1:1: no")),
        W,
        "policy",
        "athanor policy check",
    ),
    "no tenants": (
        service(running=STOPPED, ports=(), policy=replace(SERVICE.policy, tenants=())),
        W,
        "policy",
        "athanor key create",
    ),
    "key missing": (service(policy=replace(SERVICE.policy, missing_keys=("key:a-1",))), W, "keys", "--id a-1"),
    "key expires": (
        service(policy=replace(SERVICE.policy, expiring_keys=("key:a-1 (2026-12-01)",))),
        W,
        "keys",
        "athanor key rotate a-1",
    ),
    "key table wrong": (
        service(policy=replace(SERVICE.policy, keys_problem="c is open; close it with: chmod o= c")),
        P,
        "keys",
        "chmod o= c",
    ),
    "secret readable": (
        service(access=(Access(path="p", purpose="pepper", mode=0o604, secret=True),)),
        P,
        "pepper",
        "chmod o= 'p'",
    ),
    "model writable": (
        service(access=(Access(path="m", purpose="model m", mode=0o777, secret=False),)),
        P,
        "model m",
        "chmod o-w 'm'",
    ),
    "file gone": (
        service(access=(Access(path="p", purpose="policy", mode=0, secret=False, problem="no such file"),)),
        P,
        "policy",
        "ls -ld p",
    ),
}
"""Name of the fault to: facts with it, how bad it is, the check that finds it, a piece of the mend."""


def test_an_address_of_the_running_appliance_is_known_by_its_holder() -> None:
    """Ours are those that a process of ours holds, that systemd keeps for it, or whose holder cannot be told. Another
    process on an address that the configuration has got meanwhile is a problem before the restart that fails."""
    port = Port(name="http", address="127.0.0.1:8090", in_use=True)
    for ours in (
        port,
        replace(port, holder="process 7 (athanor gateway)"),
        replace(port, holder="process 1 (systemd)", kept=True),
    ):
        assert check_port(ours, running=True).level is Severity.OK
    other = check_port(replace(port, holder="process 9 (nginx)"), running=True)
    assert (other.level, other.means) == (Severity.PROBLEM, "the next start of the gateway fails")
    assert "nginx" in other.what


def test_a_healthy_appliance_has_no_findings_but_good_ones() -> None:
    """Nothing is cried over where nothing is wrong."""
    assert {one.level for one in judge(FACTS)} == {Severity.OK}
    assert counts(judge(FACTS)) == {"problem": 0, "warning": 0, "note": 0, "ok": len(judge(FACTS))}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_nothing_else(name: str) -> None:
    """One finding for one fault, of its level, with what it means and its mend."""
    facts, level, check, mend = FAULTS[name]
    found = bad(facts)
    assert [(one.level, one.check) for one in found] == [(level, check)]
    assert found[0].what
    assert found[0].means
    assert mend in found[0].mend
    assert worst(judge(facts)) is level


def test_status_and_doctor_agree_on_isolation() -> None:
    """What a running appliance says of its sandboxes' bounds is what the doctor says, whatever this process could."""
    facts = replace(FACTS, machine=replace(MACHINE, cgroups=replace(MACHINE.cgroups, writable=False)))
    (found,) = [one for one in judge(facts) if one.check == "cgroups"]
    assert (found.level, SERVICE.running.cgroup in found.what) == (Severity.OK, True)


def test_notes_are_no_faults() -> None:
    """No GPU, no collector, a stopped appliance, an unseen pepper, a spare key: told, not complained about."""
    facts = service(running=STOPPED, exporters=(), policy=replace(SERVICE.policy, keys_unseen=True), ports=(), tls=None)
    facts = replace(facts, machine=replace(MACHINE, gpu=Gpu()))
    notes = [one.check for one in judge(facts) if one.level is N]
    assert bad(facts) == []
    assert notes == ["gpu", "appliance", "collector", "certificate", "keys"]
    spare = service(policy=replace(SERVICE.policy, unused_keys=("key:a", "key:b", "key:c", "key:d", "key:e")))
    assert next(one.what for one in judge(spare) if one.check == "keys").endswith("key:d and 1 more")


def test_without_a_configuration_the_machine_is_judged() -> None:
    """No file is a note, and all that belongs to a service is left out."""
    facts = replace(FACTS, service=None, config_absent=True)
    assert worst(judge(facts)) is Severity.NOTE
    assert {one.check for one in judge(facts)} >= {"runsc", "platform", "configuration"}
    assert "policy" not in {one.check for one in judge(facts)}


def test_a_certificate_on_loopback_is_not_demanded() -> None:
    """In the clear is only complained about where somebody else could listen."""
    ports = (Port(name="http", address="127.0.0.1:80"), Port(name="admin", address="unix:/x"))
    facts = service(tls=None, ports=(*ports, Port(name="metrics", address="0.0.0.0:9464")))
    assert bad(facts) == []
    assert [one.check for one in bad(service(tls=None, ports=(Port(name="http", address="0.0.0.0:80"),)))] == [
        "certificate"
    ]
    assert isinstance(SERVICE.tls, Certificate)


def test_batches_that_move_are_well() -> None:
    """Their number, the oldest, what is left and what is kept in one line; a line too where none is open, and none
    where no files are kept."""
    found = {one.check: one for one in judge(service(running=replace(SERVICE.running, batches=queue(batch()))))}
    assert found["batches"].level is Severity.OK
    assert found["batches"].what == (
        "1 batch open, the oldest for 53 min 20 s: 280 lines left, 16 running; "
        "12 files and 3 stored responses take 5.0 MiB of 16 GiB"
    )
    found = {one.check: one for one in judge(service(running=replace(SERVICE.running, batches=queue())))}
    assert (found["batches"].level, found["batches"].what.startswith("none is open")) == (Severity.OK, True)
    assert "batches" not in {one.check for one in judge(FACTS)}
