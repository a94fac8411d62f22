"""Official gRPC clients against a whole appliance: plain text, TLS, and client certificates.

A client is given an address and its proofs, nothing else of the server: the same calls accept another implementation.
Node's and Go's clients are marked ``full``, since a machine has to get them first (``make grpc-clients``), and Python's
with coroutines, which the tests of streams beside these use (``test_withdrawal.py``, ``test_structured.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cryptography import x509

from appliance.gateway.front.request_builder import MAX_BODY_BYTES
from appliance.gateway.servers import MESSAGE_FIELDS_BYTES
from tests.appliance.gateway.front.pki import Authority, Pki
from tests.grpc_clients import programs
from tests.grpc_clients.call import CHECK, GENERATE, MODELS, REFLECT, WATCH, Answer, Call
from tests.grpc_clients.python_clients import call_blocking, call_with_coroutines
from tests.system.conftest import PLAIN, Appliance
from tests.system.grpc_server import SPIFFE_ID, serve_grpc

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

Client = Callable[[Call], Answer]

LONG = 3_000
"""Output tokens that take the embedded model seconds."""

SEVERAL = 100
"""Output tokens that come in several events, unless the gateway gets no processor meanwhile."""

FREED_S = 60.0
"""Longest wait until the engine has let go of a call; it takes one step, but the machine may be busy."""

SERVICES = [
    "athanor.batch.v1.BatchService",
    "athanor.inference.v1.InferenceService",
    "athanor.usage.v1.UsageService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
]


@dataclass(frozen=True)
class Server:
    """A served appliance and how its tenant calls it."""

    call: Call
    """Asks for the models, with every proof that the transport takes."""
    admin: str
    folder: Path
    authority: Authority | None = None

    def status(self) -> tuple[int, int, int]:
        """Requests of the tenant, requests in the engine, and the tenant's tokens so far."""
        status = httpx.get(self.admin + "/status", timeout=10, verify=PLAIN).json()
        (tenant,) = (one for one in status["tenants"] if one["id"] == "alpha")
        return tenant["in_flight"], status["models"][0]["engine"]["running"], tenant["tokens"]

    def tokens_when_idle(self) -> int:
        """The tenant's tokens so far, once nothing of it runs any more."""
        deadline = time.monotonic() + FREED_S
        while (found := self.status())[:2] != (0, 0):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        return found[2]

    def as_stranger(self) -> Call:
        """The call without a proof; where the handshake asks for a certificate, with one that names nobody."""
        if self.call.certificate is None:
            return self.call.but(key=None)
        assert self.authority is not None
        return self.call.but(key=None, **certificate(self.authority, self.folder, "nobody"))


def certificate(authority: Authority, folder: Path, name: str, *names: x509.GeneralName) -> dict[str, Path]:
    """Fields of a call with a client certificate that has these names."""
    key, chain = authority.issue(*names)
    (folder / f"{name}.key").write_bytes(key)
    (folder / f"{name}.pem").write_bytes(chain)
    return {"private_key": folder / f"{name}.key", "certificate": folder / f"{name}.pem"}


@pytest.fixture(
    scope="module", params=["plain", *(pytest.param(name, marks=pytest.mark.full) for name in ("tls", "mtls"))]
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, appliance: Appliance
) -> Iterator[Server]:
    """The shared demo in plain text, or `athanor serve` with TLS; with client certificates, for which it has TLS too,
    the tenant has no key."""
    state = tmp_path_factory.mktemp(request.param)
    if request.param == "plain":
        call = Call(address=appliance.ready["grpc"], key=appliance.key("alpha"))
        yield Server(call, appliance.ready["admin"], state)
        return
    authority = Pki.create(state).authority
    tls = {"certificate": "server.pem", "key": "server.key"}
    if request.param == "mtls":
        tls["client_ca"] = "ca.pem"
    with serve_grpc(state, tls) as served:
        call = Call(address=served.address, key=served.key, ca=state / "ca.pem")
        if request.param == "mtls":
            own = certificate(authority, state, "alpha", x509.UniformResourceIdentifier(SPIFFE_ID))
            call = call.but(key=None, **own)
        yield Server(call, served.admin, state, authority)


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Client]:
    """Each client by its name; what has to be compiled is compiled once."""
    made: dict[str, Client] = {"python": call_blocking, "python-aio": call_with_coroutines}
    makers = {"node": programs.node_client, "go": programs.go_client}

    def client(name: str) -> Client:
        if name not in made:
            made[name] = makers[name](tmp_path_factory.mktemp(name))
        return made[name]

    return client


FULL = pytest.mark.full


@pytest.fixture(params=["python", *(pytest.param(name, marks=FULL) for name in ("python-aio", "node", "go"))])
def client(request: pytest.FixtureRequest, clients: Callable[[str], Client]) -> Client:
    """One official client after the other."""
    return clients(request.param)


def test_models_are_listed(client: Client, server: Server) -> None:
    """A unary call by the tenant's key or certificate."""
    assert client(server.call.but(do=MODELS)) == Answer(models=["athanor-mini"])


def test_a_generation_streams(client: Client, server: Server) -> None:
    """Events in their order, the text in pieces, the count, and the request's id in the initial metadata; a greedy
    answer is the same twice, and every client sends floats, optional fields and enumerations as the others do."""
    asked = server.call.but(do=GENERATE, max_output_tokens=SEVERAL)
    answers = [client(asked) for _ in range(2)]
    deadline = time.monotonic() + FREED_S
    # What the gateway finds when it gets the processor is one event: on a busy machine that may be a whole answer.
    while max(answer.deltas for answer in answers) == 1 and time.monotonic() < deadline:
        answers.append(client(asked))
    for answer in answers:
        assert (answer.code, answer.events) == ("OK", ["started", "delta", "finished"])
        assert answer.output_tokens == SEVERAL
        assert answer.request_id.startswith("req_")
    assert max(answer.deltas for answer in answers) > 1
    assert {answer.text for answer in answers} == {call_blocking(asked).text}
    assert answers[0].text != ""


def test_an_unknown_model_has_details(client: Client, server: Server) -> None:
    """NOT_FOUND with the reason, the resource's name, and the id under which the operator finds it."""
    answer = client(server.call.but(do=GENERATE, model="nope"))
    assert (answer.code, answer.reason, answer.domain) == ("NOT_FOUND", "MODEL_NOT_FOUND", "athanor")
    assert answer.resource == "nope" and answer.error_request_id.startswith("req_")
    assert "yours are: athanor-mini" in answer.message and answer.events == []


def test_a_field_out_of_range_is_named(client: Client, server: Server) -> None:
    """INVALID_ARGUMENT whose BadRequest has the field by its name in the .proto."""
    answer = client(server.call.but(do=GENERATE, max_output_tokens=0))
    assert (answer.code, answer.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert answer.violations == ["max_output_tokens"]


CLIENTS_OWN = "Internal error from Core"
"""What ``grpc.aio`` says in place of the status where a stream ends before it has written its first message: one
refused stream of ten on a busy machine."""


def settled(client: Client, call: Call) -> Answer:
    """The status that the server sent, which its client may lose: asked again then, five times at most."""
    for _ in range(5):
        answer = client(call)
        if answer.message != CLIENTS_OWN:
            break
    return answer


def test_a_call_without_proof_is_refused(client: Client, server: Server) -> None:
    """UNAUTHENTICATED with details that say what to send; so are a watch and reflection, and a health check is not."""
    for do in (MODELS, GENERATE, WATCH, REFLECT):
        answer = settled(client, server.as_stranger().but(do=do))
        assert (answer.code, answer.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED"), do
        assert "authorization: Bearer" in answer.message and answer.error_request_id.startswith("req_")
    assert client(server.as_stranger().but(do=CHECK)) == Answer(status="SERVING")


def test_a_cancelled_call_frees_the_engine(client: Client, server: Server) -> None:
    """Cancelled after some deltas, a long generation stops: the tenant pays for what was computed until then only."""
    before = server.tokens_when_idle()
    answer = client(server.call.but(do=GENERATE, max_output_tokens=LONG, cancel_after=3))
    assert answer.code == "CANCELLED" and answer.deltas >= 3 and answer.output_tokens == 0
    assert 3 <= server.tokens_when_idle() - before < LONG


def test_a_deadline_frees_the_engine(client: Client, server: Server) -> None:
    """A deadline that passes in mid-stream ends the call and what runs for it."""
    before = server.tokens_when_idle()
    answer = client(server.call.but(do=GENERATE, max_output_tokens=LONG, timeout_s=0.7))
    assert answer.code == "DEADLINE_EXCEEDED" and answer.output_tokens == 0
    assert server.tokens_when_idle() - before < LONG


def test_an_oversize_message_is_refused(client: Client, server: Server) -> None:
    """RESOURCE_EXHAUSTED, as with any gRPC server, and the next call is served; a message under the limit is read, and
    refused for its prompt."""
    answer = client(server.call.but(do=GENERATE, text_bytes=MAX_BODY_BYTES + (1 << 20)))
    assert answer.code == "RESOURCE_EXHAUSTED" and answer.events == []
    assert client(server.call.but(do=MODELS)).models == ["athanor-mini"]
    read = client(server.call.but(do=GENERATE, text_bytes=MAX_BODY_BYTES - (1 << 10)))
    assert (read.code, read.reason) == ("INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED")


def test_an_oversize_message_is_refused_with_details(client: Client, server: Server) -> None:
    """The refusal has the reason, the limit in words, and a request id, as every other error."""
    answer = client(server.call.but(do=GENERATE, text_bytes=MAX_BODY_BYTES + (1 << 20)))
    assert (answer.code, answer.reason, answer.domain) == ("RESOURCE_EXHAUSTED", "PAYLOAD_TOO_LARGE", "athanor")
    assert answer.error_request_id.startswith("req_")
    assert str(MAX_BODY_BYTES + MESSAGE_FIELDS_BYTES) in answer.quota[0]


@pytest.mark.parametrize("service", ["", "athanor.inference.v1.InferenceService"])
def test_health_is_checked_and_watched(client: Client, server: Server, service: str) -> None:
    """Check answers, and Watch gives the state at once and goes on; a service that is not there is NOT_FOUND."""
    assert client(server.call.but(do=CHECK, service=service)) == Answer(status="SERVING")
    assert client(server.call.but(do=WATCH, service=service)) == Answer(status="SERVING")
    assert client(server.call.but(do=CHECK, service="nope")).code == "NOT_FOUND"


def test_reflection_lists_the_services(client: Client, server: Server) -> None:
    """Those that the appliance serves, health and reflection's two names among them."""
    assert client(server.call.but(do=REFLECT)) == Answer(services=SERVICES)
