"""Facts are those of a real machine: real files, sockets, certificates, a real trial sandbox."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from appliance.common.config import ApplianceConfig
from appliance.common.config_loader import load_config
from appliance.common.model_memory import read_meminfo
from appliance.operator import demo
from appliance.operator.doctor.certificate import read_certificate
from appliance.operator.doctor.facts import MadeKernels, Running, ServiceFacts
from appliance.operator.doctor.gpu_kernel_facts import look_at_gpu_kernels
from appliance.operator.doctor.holders import holder, listening
from appliance.operator.doctor.machine_facts import look_at_machine
from appliance.operator.doctor.service_facts import find_exporters, look_at_service, own_socket
from engine.backends.cuda.kernels import folder
from isolation.keys.certificates import validity
from tests.appliance.gateway.front.pki import Pki

RUNNING = Running(admin="127.0.0.1:0")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A demo's state directory that nothing serves."""
    demo.claim(tmp_path)
    demo.prepare_keys(tmp_path)
    demo.prepare_policy(tmp_path)
    options = demo.DemoOptions(http_port=0, grpc_port=0, admin_port=0)
    demo.write_config(tmp_path, options, demo.choose_models(()))
    return tmp_path


def read(state: Path) -> ApplianceConfig:
    """The configuration of the state directory."""
    return load_config(state / "athanor.yaml")


def test_the_demo_is_seen_as_it_is(state: Path) -> None:
    """Ports, policy, keys, weights, permissions, disks (that of the audit log too) of a generated configuration."""
    found = look_at_service(read(state), state / "athanor.yaml", RUNNING)
    assert [(port.in_use, port.problem) for port in found.ports] == [(False, "")] * 3
    assert (found.policy.tenants, found.policy.missing_keys, found.policy.problems) == (("alpha", "beta"), (), ())
    assert found.models[0].weight_bytes == (demo.embedded_model() / "model.safetensors").stat().st_size
    secret = {one.purpose: one.mode for one in found.access if one.secret}
    assert secret == {"key table": 0o600, "pepper": 0o600}
    assert found.disks[0].total > found.disks[0].free > 0
    assert any("audit log" in disk.purpose for disk in found.disks)
    assert len(found.threads) == 1
    assert re.match(r"\d+ threads?: .*the sandbox's kernel and the gateway$", found.threads[0])


def test_faults_on_disk_are_seen(state: Path) -> None:
    """A wrong policy with its place, a key that is not there, an open pepper, a model that is gone."""
    policy = state / "policy.yaml"
    good = policy.read_text()
    policy.write_text(good.replace("key:beta-1", "key:gamma-1"))
    found = look_at_service(read(state), state / "athanor.yaml", RUNNING).policy
    assert (found.missing_keys, found.unused_keys) == (("key:gamma-1",), ("key:beta-1",))
    assert found.expiring_keys == ()
    table = json.loads((state / "credentials.json").read_text())
    soon = datetime.now(UTC) + timedelta(days=3)
    table["keys"]["alpha-1"]["expires"] = soon.isoformat()
    (state / "credentials.json").write_text(json.dumps(table))
    found = look_at_service(read(state), state / "athanor.yaml", RUNNING).policy
    assert found.expiring_keys == (f"key:alpha-1 ({soon:%Y-%m-%d})",)
    drop_ins = state / "policy.d"
    drop_ins.mkdir()
    (drop_ins / "10.yml").write_text("")
    (drop_ins / "20.yaml").write_text('version: 1\ntenants: {gamma: {credentials: ["key:gamma-1"], models: [gone]}}\n')
    policy.write_text(good)
    found = look_at_service(read(state), state / "athanor.yaml", RUNNING).policy
    assert (found.tenants, found.missing_keys) == (("gamma", "alpha", "beta"), ("key:gamma-1",))
    assert [place.partition(":")[0] for place in found.missing] == ["tenants.gamma.models[0]"]
    assert [line.partition(":")[0] for line in found.overlooked] == [str(drop_ins / "10.yml")]
    assert found.unsafe == ()
    (drop_ins / "20.yaml").write_text(
        'version: 1\ntenants: {gamma: {credentials: ["key:g"], unsafe_allow_all: true}}\n'
    )
    assert look_at_service(read(state), state / "athanor.yaml", RUNNING).policy.unsafe == ("gamma",)
    policy.write_text(good.replace("concurrency", "concurency", 1))
    (state / "pepper").chmod(0o644)
    config = read(state)
    gone = config.models[0].model_copy(update={"path": state / "gone"})
    found = look_at_service(config.model_copy(update={"models": (gone,)}), state / "athanor.yaml", RUNNING)
    assert found.policy.problems[0].startswith(f"{policy}:")
    assert "not a directory" in found.models[0].problem
    assert next(one.mode for one in found.access if one.purpose == "pepper") == 0o644


def test_a_taken_port_names_its_holder(state: Path) -> None:
    """Somebody listens on our address: seen, with process and name; a free port has none."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = read(state)
        listen = config.listen.model_copy(update={"http": f"127.0.0.1:{port}", "grpc": "192.0.2.1:1"})
        found = look_at_service(config.model_copy(update={"listen": listen}), state / "athanor.yaml", RUNNING)
        assert (found.ports[0].in_use, found.ports[0].problem) == (True, "")
        assert found.ports[0].holder.startswith(f"process {os.getpid()} (")
        assert "assign" in found.ports[1].problem
    assert holder(port) == ""
    line = "0: 0100007F:1F90 00000000:0000 01 0:0 0:0 0 0 0 77 1"
    assert listening([line, "sl junk", ""], 0x1F90) == set(), "a connection is no listener"
    assert listening([line.replace(" 01 ", " 0A ")], 0x1F90) == {"socket:[77]"}


def test_the_metrics_listener_is_looked_at(state: Path) -> None:
    """Its address is tried like the others; it counts as open where other machines reach it without a token, whose file
    is looked at like every secret. Control: without the listener there is no such port."""
    config, token = read(state), state / "token"
    token.write_text("x" * 40)
    token.chmod(0o644)

    def look(**listen: object) -> ServiceFacts:
        changed = config.listen.model_copy(update=listen)
        return look_at_service(config.model_copy(update={"listen": changed}), state / "athanor.yaml", RUNNING)

    def ports(found: ServiceFacts) -> list[bool]:
        return [port.open for port in found.ports if port.name == "metrics"]

    assert ports(look()) == []
    assert ports(look(metrics="127.0.0.1:0")) == [False]
    assert ports(look(metrics="0.0.0.0:0")) == [True]
    closed = look(metrics="0.0.0.0:0", metrics_token=token)
    assert ports(closed) == [False]
    assert [one.mode for one in closed.access if "metrics" in one.purpose] == [0o644]
    loaded = look(metrics="0.0.0.0:0", metrics_token=Path("/run/credentials/athanor-gateway.service/metrics-token"))
    assert [one for one in loaded.access if "metrics" in one.purpose] == [], "only the service sees a credential"


def test_certificates(tmp_path: Path) -> None:
    """Validity agrees with the library that made it; a foreign key, junk and absence are told apart."""
    pki = Pki.create(tmp_path)
    files = pki.files
    found = read_certificate(files.certificate, files.key, files.client_ca)
    assert (found.problem, found.key_problem, found.authority_problem) == ("", "", "")
    assert found.not_after - found.not_before == 25 * 3600
    now = datetime.now(UTC).timestamp()
    assert found.not_before < now < found.not_after
    other = tmp_path / "other.key"
    other.write_bytes(pki.authority.issue()[0])
    assert "is not the key of" in read_certificate(files.certificate, other, None).key_problem
    assert "no certificate" in read_certificate(other, files.key, None).problem
    assert "cannot read" in read_certificate(tmp_path / "none", files.key, None).problem
    assert "cannot read" in read_certificate(files.certificate, tmp_path / "none", tmp_path / "none").key_problem
    assert "no certificate" in read_certificate(files.certificate, files.key, other).authority_problem


def test_a_cut_certificate_is_refused_at_every_length(tmp_path: Path) -> None:
    """No cut of a certificate is taken for a whole one, and none does worse than a ValueError."""
    pem = Pki.create(tmp_path).files.certificate.read_text()
    der = ssl.PEM_cert_to_DER_cert(pem)
    whole = validity(pem.encode())
    for length in range(len(der)):
        with pytest.raises(ValueError):
            validity(ssl.DER_cert_to_PEM_cert(der[:length]).encode())
    assert validity(f"text before\n{ssl.DER_cert_to_PEM_cert(der)}text after".encode()) == whole


def test_exporters_are_tried() -> None:
    """One that listens, one that does not, one that is no URL; switched off ones are left alone."""
    with socket.create_server(("127.0.0.1", 0)) as collector:
        url = f"http://127.0.0.1:{collector.getsockname()[1]}"
        both = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "ftp://x"}
        assert [(one.signal, one.problem) for one in find_exporters(both)] == [
            ("traces", ""),
            ("metrics", "not an http or https URL"),
        ]
    assert "refused" in next(find_exporters({"OTEL_EXPORTER_OTLP_ENDPOINT": url})).problem
    assert list(find_exporters({**both, "OTEL_SDK_DISABLED": "true"})) == []
    assert list(find_exporters({**both, "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"})) == []


def test_memory_as_the_kernel_tells_it() -> None:
    """KiB become bytes; an unreadable file is zero."""
    found = read_meminfo("MemTotal:       1024 kB\nMemFree: 1 kB\nMemAvailable:    512 kB\n")
    assert (found.total, found.available) == (1 << 20, 1 << 19)
    assert read_meminfo("").total == 0


@pytest.mark.runsc
def test_this_machine(runsc_path: Path) -> None:
    """A trial sandbox ran on the machine of the tests, and nothing of it is left; a wrong runsc is told."""
    found = look_at_machine(str(runsc_path))
    assert (found.runsc.problem, found.runsc.platform_problem) == ("", "")
    assert found.memory.total > found.memory.available > 0
    assert found.cores >= 1
    assert found.clock.now > 1.7e9
    wrong = look_at_machine("/bin/true")
    assert "no usable runsc" in wrong.runsc.problem


def test_compiled_gpu_kernels_are_seen_as_what_they_are_for(state: Path, tmp_path: Path) -> None:
    """Folders for this model and for others, of these sources and of others, of another architecture, one that says
    nothing of what was asked for, and things that are no such folders; nothing of a model without a GPU."""
    config = read(state)
    plain = config.models[0]
    model = plain.model_copy(update={"gpu": "auto", "dtype": "bfloat16"})
    assert look_at_gpu_kernels(config, plain) is None
    bare = look_at_gpu_kernels(config, model)
    assert bare is not None and (bare.path, bare.made, bare.needed) == ("", (), False)
    assert (bare.block_size, bare.rows) == (model.block_size, min(model.max_num_seqs, model.max_num_batched_tokens))
    place = tmp_path / "gpu-kernels"
    named = config.model_copy(update={"sandbox": config.sandbox.model_copy(update={"gpu_kernels": place})})
    gone = look_at_gpu_kernels(named, model)
    assert gone is not None and gone.problem == "no such file or directory"
    ours = folder.sources_digest(Path(folder.__file__).parent)
    own = folder.Asked(folder.description_digest(model.path), "bfloat16", model.block_size, bare.rows)
    made = [
        ("sm_80", ours, own),
        ("sm_90", "f" * 64, own),
        ("sm_90", ours, replace(own, rows=own.rows + 1)),
        ("sm_91", ours, None),
        ("sm_92", ours, replace(own, description="0" * 64)),
        ("sm_93", ours, replace(own, dtype="float32")),
    ]
    for architecture, sources, asked in made:
        one = place / str(folder.folder_name(architecture, "3.7.1", sources, "c0" * 32))
        one.mkdir(parents=True)
        (one / folder.MANIFEST).write_text(json.dumps({} if asked is None else {"asked": asdict(asked)}))
    (place / "notes").mkdir()
    found = look_at_gpu_kernels(named, model)
    assert found is not None and set(found.made) == {
        MadeKernels(architecture="sm_80", ours=True, fits=True),
        MadeKernels(architecture="sm_90", ours=False, fits=True),
        MadeKernels(architecture="sm_90", ours=True, fits=False),
        MadeKernels(architecture="sm_91", ours=True, fits=True),
        MadeKernels(architecture="sm_92", ours=True, fits=False),
        MadeKernels(architecture="sm_93", ours=True, fits=False),
    }
    any_dtype = look_at_gpu_kernels(named, model.model_copy(update={"dtype": "auto"}))
    assert any_dtype is not None and all(one.fits for one in any_dtype.made if one.architecture == "sm_93")


@pytest.mark.parametrize("said", ["", "[]", "{", '{"asked": 3}', '{"asked": {"rows": 1}}', '{"asked": null}'])
def test_a_manifest_that_says_nothing_asked_for_nothing(said: str, tmp_path: Path) -> None:
    """Whatever stands there, nothing is raised and nothing believed."""
    (tmp_path / folder.MANIFEST).write_text(said)
    assert folder.read_asked(tmp_path) is None
    wrong = {"description": "x", "dtype": "y", "block_size": "16", "rows": 1}
    (tmp_path / folder.MANIFEST).write_text(json.dumps({"asked": wrong}))
    assert folder.read_asked(tmp_path) is None


def test_the_socket_of_a_tenant_is_looked_at(tmp_path: Path) -> None:
    """A group that is not there, a folder that is not there, one that others may write to or own, and a socket of
    another group are problems with a command that mends them. Control: the folder as it should be."""
    group, path = str(os.getgid()), tmp_path / "own" / "a.sock"
    address = f"unix:{path}"
    assert own_socket("x", address, "no-such-group").mend == "groupadd --system no-such-group"
    assert own_socket("x", address, group).mend.startswith("install -d -m 2750")
    path.parent.mkdir()
    path.parent.chmod(0o770)
    assert "chmod go-w" in own_socket("x", address, group).mend
    path.parent.chmod(0o750)
    assert not own_socket("x", address, group).problem
    assert "would be of another group" in own_socket("x", address, str(os.getgid() + 1)).problem
    if not os.getuid():  # root alone can give the folder away
        os.chown(path.parent, 65533, -1)
        assert own_socket("x", address, group).mend == f"chown athanor-gateway {path.parent}"
        os.chown(path.parent, 0, -1)
    with socket.socket(socket.AF_UNIX) as bound:
        folder = os.open(path.parent, os.O_PATH)
        bound.bind(f"/proc/self/fd/{folder}/a.sock")
        os.close(folder)
        assert not own_socket("x", address, group).problem
        assert "is of another group" in own_socket("x", address, str(os.getgid() + 1)).problem
