"""`athanor serve --config FILE`: a configuration by hand, TLS and client certificates, systemd, limits."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography import x509

from appliance.common.catalog import embedded_model
from appliance.common.credentials import new_pepper
from appliance.common.keys import KeyRecord, issue, serialise_records
from appliance.gateway.grpc.generated import inference_pb2, inference_pb2_grpc
from appliance.operator.demo import choose_ports, run_directory
from isolation.host.atomic_file import write_whole
from tests.appliance.gateway.front.pki import Authority, Pki
from tests.system.conftest import ATHANOR, PLAIN, as_demos

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

STEP_TIMEOUT_S = 8.0
"""The embedded model's longest step takes some milliseconds, on a busy machine a second."""

POLICY = """\
version: 1
tenants:
  alpha:
    credentials: ["key:a", "spiffe://athanor.test/tenant/alpha"]
    models: ["athanor-*"]
    limits: {requests_per_minute: 600, tokens_per_minute: 100000, concurrency: 1, max_output_tokens: 3000}
  nosy:
    credentials: ["key:n"]
    models: ["other"]
  shy:
    credentials: ["key:s"]
    models: ["athanor-mini"]
    retention: none
"""


@dataclass
class Served:
    """A served configuration."""

    ready: dict[str, Any]
    keys: dict[str, str]
    authority: Authority
    notifications: socket.socket

    def post(self, key_id: str, **body: Any) -> httpx.Response:
        """A completion as the holder of this key."""
        return httpx.post(
            self.ready["http"] + "/v1/completions",
            json={"model": "athanor-mini", "prompt": "hello", "max_tokens": 2, **body},
            headers={"authorization": f"Bearer {self.keys[key_id]}"},
            verify=trust(self.authority),
            timeout=30,
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Served]:
    """`athanor serve` with TLS, mTLS on gRPC, three tenants and a fake service manager."""
    state = tmp_path_factory.mktemp("serve")
    authority = Pki.create(state).authority
    pepper = new_pepper()
    issued = {key_id: issue(key_id, pepper) for key_id in ("a", "n", "s")}
    records = {key_id: KeyRecord(digest, datetime.now(UTC)) for key_id, (_, digest) in issued.items()}
    write_whole(state / "pepper", pepper)
    write_whole(state / "credentials.json", serialise_records(records).encode())
    (state / "policy.yaml").write_text(POLICY)
    http, rpc, admin = choose_ports((0, 0, 0))
    config = {
        "listen": {
            "http": f"127.0.0.1:{http}",
            "grpc": f"127.0.0.1:{rpc}",
            "admin": f"127.0.0.1:{admin}",
            "tls": {"certificate": "server.pem", "key": "server.key", "client_ca": "ca.pem"},
        },
        "models": [{"name": "athanor-mini", "path": str(embedded_model()), "dtype": "float32", "kv_bytes": 64 << 20}],
        "policy": "policy.yaml",
        "credentials": "credentials.json",
        "pepper": "pepper",
        "run_dir": str(run_directory(state)),
        "sandbox": {**as_demos(), "step_timeout_s": STEP_TIMEOUT_S},
    }
    (state / "athanor.yaml").write_text(json.dumps(config))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
        address = f"\0athanor-test-{os.getpid()}-{state.name}"
        notifications.bind(address)
        notifications.settimeout(20)
        process = subprocess.Popen(
            [ATHANOR, "serve", "--config", str(state / "athanor.yaml")],
            stdout=subprocess.PIPE,
            env={"NOTIFY_SOCKET": "@" + address[1:], "PATH": "/usr/bin:/bin"},
        )
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 90)[0]
            keys = {key_id: plain for key_id, (plain, _) in issued.items()}
            yield Served(json.loads(process.stdout.readline()), keys, authority, notifications)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def trust(authority: Authority) -> ssl.SSLContext:
    """A client's trust in this authority."""
    return ssl.create_default_context(cadata=authority.pem.decode())


def certificate(issuer: Authority, uri: str, trusted: Authority | None = None) -> grpc.ChannelCredentials:
    """Client credentials with one URI name."""
    key, chain = issuer.issue(x509.UniformResourceIdentifier(uri))
    return grpc.ssl_channel_credentials((trusted or issuer).pem, key, chain)


def generate(served: Served, credentials: grpc.ChannelCredentials, metadata: tuple[tuple[str, str], ...] = ()) -> int:
    """Output tokens of a small gRPC request over TLS."""
    with grpc.secure_channel(served.ready["grpc"], credentials) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(model="athanor-mini", text="hello", max_output_tokens=2)
        events = list(stub.Generate(request, metadata=metadata, timeout=20))
    return int(events[-1].finished.usage.output_tokens)


def test_systemd_hears_that_it_is_ready(served: Served) -> None:
    """READY=1 comes with a status text, once the sandboxes have given a real token."""
    words = served.notifications.recv(4096).decode()
    assert "READY=1" in words and "athanor-mini" in words


def test_a_spiffe_certificate_is_an_identity(served: Served) -> None:
    """A client certificate with the tenant's SPIFFE URI needs no key."""
    assert generate(served, certificate(served.authority, "spiffe://athanor.test/tenant/alpha")) == 2


@pytest.mark.parametrize("uri", ["spiffe://athanor.test/tenant/nobody", "spiffe://elsewhere.test/tenant/alpha"])
def test_an_unknown_spiffe_id_is_refused(served: Served, uri: str) -> None:
    """A good certificate of nobody the policy knows is UNAUTHENTICATED."""
    with pytest.raises(grpc.RpcError) as raised:
        generate(served, certificate(served.authority, uri))
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_certificate_of_another_authority_does_not_connect(served: Served) -> None:
    """The handshake fails: a key does not help."""
    stranger = certificate(Authority.create("other"), "spiffe://athanor.test/tenant/alpha", served.authority)
    with pytest.raises(grpc.RpcError) as raised:
        generate(served, stranger, (("authorization", f"Bearer {served.keys['a']}"),))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_tenant_sees_and_uses_its_models_only(served: Served) -> None:
    """404 for a served model of others as for one that nobody serves, which lists the caller's own and none else; an
    empty list for the nosy one."""
    assert served.post("n").status_code == 404
    unknown = [served.post(key, model="none") for key in ("a", "n")]
    assert [one.status_code for one in unknown] == [404, 404]
    told = [one.json()["error"]["message"] for one in unknown]
    assert told[0].endswith("yours are: athanor-mini") and told[1].endswith("you have none")
    listing = httpx.get(
        served.ready["http"] + "/v1/models",
        headers={"authorization": f"Bearer {served.keys['n']}"},
        verify=trust(served.authority),
    )
    assert listing.json()["data"] == []
    assert served.post("a").status_code == 200


def test_limits_refuse_with_a_retry_time(served: Served) -> None:
    """The second request at once is 429 with Retry-After; when the first is gone it is served."""
    body = {"prompt": "Count:", "max_tokens": 2_000, "ignore_eos": True, "stream": True}
    with httpx.Client(verify=trust(served.authority), timeout=30) as client:
        headers = {"authorization": f"Bearer {served.keys['a']}"}
        url = served.ready["http"] + "/v1/completions"
        with client.stream("POST", url, json={"model": "athanor-mini", **body}, headers=headers) as first:
            lines = first.iter_lines()
            next(lines)
            refused = served.post("a")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert float(refused.headers["retry-after"]) > 0
    for _ in range(100):
        if served.post("a").status_code == 200:
            break
    else:
        raise AssertionError("the slot was not given back")
    assert served.post("a", max_tokens=3_001).status_code == 400


def test_retention_none_reuses_nothing(served: Served) -> None:
    """A tenant with retention none never sees a cached token; another one does (positive control)."""

    def cached(key_id: str) -> int:
        prompt = f"a long prompt of {key_id} " * 20
        served.post(key_id, prompt=prompt)
        return int(served.post(key_id, prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("a") > 0
    assert cached("s") == 0


def test_a_stream_over_tls_is_whole(served: Served) -> None:
    """Chunks are written straight into the connection, through TLS like everything else."""
    body = {"model": "athanor-mini", "prompt": "hello", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    whole = served.post("a", **{key: value for key, value in body.items() if key not in ("model", "prompt")}).json()
    with httpx.stream(
        "POST",
        served.ready["http"] + "/v1/completions",
        json={**body, "stream": True},
        headers={"authorization": f"Bearer {served.keys['a']}"},
        verify=trust(served.authority),
        timeout=30,
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    texts = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(texts) == whole["choices"][0]["text"] != ""


def test_a_hung_engine_is_restarted(served: Served) -> None:
    """An engine that stops in the middle of everything makes the appliance unready, with the reason, and is ended by
    the gateway's clock; the request that met it is replayed in the next one or refused as retryable, and the model is
    served again."""

    def engine() -> dict[str, Any]:
        return dict(
            httpx.get(served.ready["admin"] + "/status", timeout=10, verify=PLAIN).json()["models"][0]["engine"]
        )

    before = engine()
    ready = served.ready["admin"] + "/health/ready"
    assert httpx.get(ready, verify=PLAIN).status_code == 200
    os.kill(before["pid"], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        meeting, reasons = pool.submit(served.post, "a"), set()
        while not meeting.done():
            answer = httpx.get(ready, timeout=10, verify=PLAIN)
            reasons.add(answer.text if answer.status_code == 503 else "")
            time.sleep(0.1)
        met = meeting.result()
    assert any("engine of athanor-mini has requests and finishes no step" in reason for reason in reasons), reasons
    assert met.status_code in (200, 503), met.text
    deadline = time.monotonic() + 60
    while not (engine()["state"] == "ready" and engine()["generation"] > before["generation"]):
        assert time.monotonic() < deadline, engine()
        time.sleep(0.1)
    assert served.post("a").status_code == 200
    counted = 'athanor_sandbox_restarts_total{athanor_role="engine"'
    while counted not in httpx.get(served.ready["admin"] + "/metrics", timeout=10, verify=PLAIN).text:
        assert time.monotonic() < deadline
        time.sleep(0.2)
