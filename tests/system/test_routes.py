"""Routes on a whole appliance with real models: every API by an alias, a share of requests, a model that dies."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import openai
import pytest

from appliance.common.adapter_files import read_adapter
from appliance.common.audit.attestation import read_attestation
from appliance.common.audit.verify import read_verifier
from appliance.common.scopes import Scope
from appliance.gateway.front.auth import Auth
from appliance.gateway.grpc.batch_calls import BATCH_SERVICE
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.http.app import ROUTES
from tests.system.conftest import PLAIN, START_TIMEOUT_S
from tests.system.many_models import PROVIDER, Served, wait
from tests.system.test_audit import entries as audit_entries

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

WRITTEN_S = 30.0
"""Seconds within which what was refused is in the audit log, where it is counted for a while first."""

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a", "b"]},
    "/v2/rerank": {"query": "hi", "documents": ["a", "b"]},
    "/v1/score": {"text_1": "hi", "text_2": "a"},
    "/v1/classify": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/attestations": {"nonce": "9f86d081884c7d65"},
}
"""A body for each route that takes a model, without the model."""

WITHOUT_MODEL = {"/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"}
"""Routes with a body that take no model: lines of batches do, by the routes above."""

EMBEDS = {"/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score", "Embed", "Rerank"}
CLASSIFIES = {"/v1/classify"}


def names_of(path: str) -> tuple[str, str]:
    """A route of the policy and its model, of the kind that a path or method needs."""
    if path in CLASSIFIES:
        return "judge", "classes"
    return ("embedding", "vectors") if path in EMBEDS else ("fast", "athanor-mini")


MESSAGES_OF = {
    "Generate": lambda model: pb.GenerateRequest(model=model, text="hi", max_output_tokens=4),
    "Embed": lambda model: pb.EmbedRequest(model=model, inputs=[pb.EmbedInput(text="hi")]),
    "Rerank": lambda model: pb.RerankRequest(model=model, query="hi", documents=["a", "b"]),
    "Attest": lambda model: pb.AttestRequest(model=model, nonce="9f86d081884c7d65"),
    "CountTokens": lambda model: pb.CountTokensRequest(model=model, text="hi"),
    "GetModel": lambda model: pb.GetModelRequest(model=model),
}
"""A message for each method that takes a model."""


def test_every_route_of_http_takes_an_alias(many: Served) -> None:
    """The server itself names its routes to a tenant that asks for another one. Each that takes a body is tried by an
    alias; one that comes later is missing here until it is tried too. By the names of the models, which the tenant may
    not use, all of them refuse."""
    told = many.get("beta", "/no-such-route").json()["error"]["message"]
    routes = [part.split() for part in told.partition("served are ")[2].split(", ")]
    assert {path for method, path in routes if method == "POST"} - WITHOUT_MODEL == set(BODIES)
    for path, body in BODIES.items():
        alias, model = names_of(path)
        answer = many.post("beta", path, model=alias, **body)
        assert answer.status_code == 200, (path, answer.text)
        assert answer.json().get("model", model) == model
        assert many.post("beta", path, model=model, **body).status_code == 404
        assert many.post("alpha", path, model=model, **body).status_code == 200


def test_every_method_of_grpc_takes_an_alias(many: Served) -> None:
    """As above, with the methods of the service whose messages have a model."""
    service = pb.DESCRIPTOR.services_by_name["InferenceService"]
    takes = {method.name for method in service.methods if "model" in method.input_type.fields_by_name}
    assert takes == set(MESSAGES_OF)
    assert {method.name for method in service.methods} - takes == {"ListModels"}
    for method, make in MESSAGES_OF.items():
        alias, model = names_of(method)
        first = many.call("beta", method, make(alias))[0]
        if method in ("Generate", "Embed", "Rerank"):
            assert (first.started.model if method == "Generate" else first.model) == model
        with pytest.raises(grpc.RpcError) as refused:
            many.call("beta", method, make(model))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        many.call("alpha", method, make(model))
    listed = [one.name for one in many.call("beta", "ListModels", pb.ListModelsRequest())[0].models]
    assert listed == ["embedding", "fast", "half", "judge"]


def answer_of(many: Served, tenant: str, name: str, **fields: Any) -> str:
    """The model that answered a chat; an error's status in its place."""
    answer = many.post(tenant, "/v1/chat/completions", model=name, messages=MESSAGES, max_tokens=2, **fields)
    return str(answer.json()["model"]) if answer.status_code == 200 else str(answer.status_code)


def test_shares_and_keys(many: Served) -> None:
    """Both models of a route answer some of 24 requests; those with one key are all answered by one."""
    assert {answer_of(many, "beta", "half") for _ in range(24)} == {"athanor-mini", "athanor-next"}
    for key in ("chat-1", "chat-2"):
        assert len({answer_of(many, "beta", "half", prompt_cache_key=key) for _ in range(6)}) == 1


@pytest.mark.full
def test_the_fallback_answers_while_a_sandbox_is_away(many: Served) -> None:
    """The engine is killed: the route's requests are answered all the same, by the fallback, until the engine is back
    and answers them again. The tenant learns it from the answer's model; the audit log, the counter and the trace have
    both names."""
    assert answer_of(many, "beta", "fast") == "athanor-mini"
    before = many.engine("athanor-mini")
    os.kill(before["pid"], signal.SIGKILL)
    # A request that is sent before the gateway knows waits for the engine that comes, as any request does.
    wait(lambda: many.engine("athanor-mini")["state"] != "ready")
    seen: list[str] = []
    until = time.monotonic() + START_TIMEOUT_S
    while "athanor-next" not in seen or seen[-1] != "athanor-mini":
        assert time.monotonic() < until, seen
        seen.append(answer_of(many, "beta", "fast"))
        time.sleep(0.1)  # A boot takes two cores for seconds, and what asks all the time takes its share of them.
    assert set(seen) == {"athanor-mini", "athanor-next"}, "no request failed"
    assert many.engine("athanor-mini")["generation"] > before["generation"]
    counted = [line for line in many.metrics().splitlines() if line.startswith("athanor_route_choices_total{")]
    assert any('"fast"' in line and '"athanor-next"' in line and '"unready"' in line for line in counted)

    def logged() -> set[tuple[str, str]]:
        entries = audit_entries(many.state / "audit")
        return {(one["alias"], one["model"]) for one in entries if one["kind"] == "request"}

    wait(lambda: {("fast", "athanor-mini"), ("fast", "athanor-next")} <= logged(), 10)


def test_names_of_others_are_like_no_name(many: Served) -> None:
    """What a tenant may not use is told apart by nothing: a model that its routes lead to, a route of others, a name
    that nobody has; in chats, embeddings, counts, and in the list of models, by HTTP and gRPC. A route of its own that
    leads nowhere (control) is told: it is known to it."""
    names = ("athanor-next", "of-others", "vectors", "nobody-s-name", "away")
    for path, body in BODIES.items():
        answers = [many.post("beta", path, model=name, **body) for name in names]
        told = {
            (one.status_code, one.text.replace(name, "?"))
            for one, name in zip(map(without_id, answers), names, strict=True)
        }
        assert len(told) == 1, path
        assert answers[0].status_code == 404
    looked = [many.get("beta", f"/v1/models/{name}") for name in names]
    assert len({(one.status_code, without_id(one).text.replace(name, "?")) for one, name in zip(looked, names)}) == 1
    for method, make in MESSAGES_OF.items():
        errors = set()
        for name in names:
            with pytest.raises(grpc.RpcError) as refused:
                many.call("beta", method, make(name))
            errors.add((refused.value.code(), refused.value.details().replace(name, "?")))
        assert len(errors) == 1, method
    assert answer_of(many, "alpha", "away") == "503"


@dataclass
class Shown:
    """What of an answer is the same each time."""

    status_code: int
    text: str


def without_id(answer: httpx.Response) -> Shown:
    """An answer without its request's id."""
    return Shown(answer.status_code, answer.text.replace(answer.headers["x-request-id"], "ID"))


def token(**changes: Any) -> str:
    """A token of now, with changed claims."""
    return PROVIDER.token("k1", PROVIDER.claims(time.time(), **changes))


REFUSED_OFTEN_S = 30.0
"""Longest wait of an address that was refused often, until it is answered again."""


def code_of(many: Served, method: str, secret: str) -> grpc.StatusCode:
    """Status of a call with an empty message. An address that was refused often has its connection closed, and has to
    wait; it tries again here, as clients do."""
    until = time.monotonic() + REFUSED_OFTEN_S
    while (found := code_once(many, method, secret)) is grpc.StatusCode.UNAVAILABLE and time.monotonic() < until:
        time.sleep(1.0)
    return found


def code_once(many: Served, method: str, secret: str) -> grpc.StatusCode:
    """Status of one try."""
    with grpc.insecure_channel(many.ready["grpc"].removeprefix("http://")) as channel:
        call = channel.unary_stream(method)(b"", metadata=(("authorization", f"Bearer {secret}"),), timeout=30)
        try:
            for _ in call:
                call.cancel()
        except grpc.RpcError as error:
            found: grpc.StatusCode = error.code()
            return grpc.StatusCode.OK if found is grpc.StatusCode.CANCELLED else found
    return grpc.StatusCode.OK


def test_no_route_takes_a_credential_that_does_not_hold(many: Served) -> None:
    """Every route of the server's own table, and every method, refuses an expired key, a token for another audience, an
    expired one and one that the policy names for nobody alike, and a key without the scope by name. A token that holds
    (control) passes each."""
    strangers = {
        "expired key": many.keys["ended"],
        "wrong audience": token(aud="another"),
        "expired token": token(exp=int(time.time()) - 1),
        "no tenant": token(sub="team-b"),
        "unsigned": token().rpartition(".")[0] + ".e",
    }
    good = token()
    routes = [route for route in ROUTES if route.auth is Auth.TENANT]
    assert len(routes) >= 13
    with httpx.Client(base_url=many.ready["http"], verify=PLAIN, timeout=60) as client:

        def ask(route: Any, secret: str) -> httpx.Response:
            path = route.path.replace("{model:path}", "athanor-mini").replace("{file_id}", f"file-{'0' * 32}")
            path = path.replace("{batch_id}", f"batch_{'0' * 32}").replace("{response_id}", f"resp_{'0' * 32}")
            body = {**BODIES.get(path, {}), "model": "vectors" if path in EMBEDS else "athanor-mini"}
            return client.request(
                route.method, path, headers={"authorization": f"Bearer {secret}"}, json=body if path in BODIES else None
            )

        for route in routes:
            answers = {name: ask(route, secret) for name, secret in strangers.items()}
            assert {one.status_code for one in answers.values()} == {401}, (route.path, answers)
            assert len({one.json()["error"]["message"] for one in answers.values()}) == 1, route.path
            assert ask(route, many.keys["nothing"]).status_code == 403, route.path
            passed = ask(route, good)
            # Nothing is kept here, so what keeps is a feature that is off, as the error says.
            keeps = route.scope in (Scope.BATCHES, Scope.RESPONSES)
            off = keeps and passed.json()["error"]["code"] != "insufficient_scope"
            # No classifier is served here, and the error says that of the model.
            unfit = route.path == "/v1/classify" and passed.json()["error"]["param"] == "model"
            assert passed.status_code == 200 or off or unfit, (route.path, passed.text)
    service = "/athanor.inference.v1.InferenceService/"
    methods = [service + name for name in ("Generate", "Embed", "CountTokens", "Attest", "ListModels", "GetModel")]
    methods += [f"/athanor.usage.v1.UsageService/{name}" for name in ("GetLimits", "GetUsage", "WatchUsage")]
    methods += ["/grpc.health.v1.Health/Watch", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"]
    methods += ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
    batches = [f"/{BATCH_SERVICE}/{name}" for name in ("UploadFile", "GetBatch")]
    for method in (*methods, *batches):
        for name, secret in strangers.items():
            assert code_of(many, method, secret) is grpc.StatusCode.UNAUTHENTICATED, (method, name)
        assert code_of(many, method, many.keys["nothing"]) is grpc.StatusCode.PERMISSION_DENIED, method
        held = code_of(many, method, good)
        # Nothing is kept here, so files and batches are a feature that is off.
        refused = held in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
        assert refused == (method in batches), method
    wanted = {"key_expired", "jwt_audience", "jwt_expired", "no_tenant", "jwt_signature"}
    until = time.monotonic() + WRITTEN_S
    while True:
        entries = audit_entries(many.state / "audit")
        reasons = {one["reason"] for one in entries if one["kind"] == "refused"}
        if wanted <= reasons:
            break
        assert time.monotonic() < until, reasons
        time.sleep(0.1)
    principals = {one["principal"] for one in entries if one["kind"] == "request"}
    assert "oidc:corp:team-a" in principals


@dataclass
class Reader(threading.Thread):
    """Reads a long answer with the official client until it is cut, or until it is left."""

    many: Served
    secret: str
    left: threading.Event
    cut: tuple[float, str] | None = None
    """When the answer was cut and by which error; None if it was not."""
    pieces: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        """Read."""
        client = openai.OpenAI(
            base_url=self.many.ready["http"] + "/v1",
            api_key=self.secret,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=PLAIN),
        )
        with client:
            try:
                stream = client.completions.create(
                    model="athanor-mini",
                    prompt="Count:",
                    max_tokens=3_500,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                for _ in stream:
                    self.pieces += 1
                    if self.left.is_set():
                        stream.close()
                        return
            except openai.APIError as error:
                self.cut = time.time(), str(error.code)


@pytest.mark.clock
def test_an_answer_ends_with_its_token(many: Served) -> None:
    """With the official client: answers that run under a token end within a second of its end, and those whose signing
    key the issuer takes back soon after; new calls with it are refused, though it was remembered. An answer under a key
    (control) goes on."""
    for taken_back in (False, True):
        ends = int(time.time()) + (600 if taken_back else 3)
        secret = token(exp=ends)
        left = threading.Event()
        readers = [Reader(many, secret, left) for _ in range(6)]
        kept = Reader(many, many.keys["alpha"], left)
        for reader in (*readers, kept):
            reader.start()
        if taken_back:
            time.sleep(1.0)
            assert [reader.cut for reader in readers] == [None] * 6
            PROVIDER.add("k2")
            old = PROVIDER.keys.pop("k1")
            (many.state / "keys.json").write_bytes(PROVIDER.published())
            ends = time.time()
        for reader in readers:
            reader.join()
        seen = kept.pieces
        while kept.is_alive() and kept.pieces == seen:
            time.sleep(0.01)
        assert kept.pieces > seen and kept.cut is None
        left.set()
        kept.join()
        cut = [reader.cut for reader in readers if reader.cut]
        assert [code for _, code in cut] == ["invalid_api_key"] * 6
        late = sorted(at - ends for at, _ in cut)
        # The clients share this process, so the last of them reads its end later than it comes.
        assert late[0] < (2.5 if taken_back else 1.0) and late[-1] < 5.0, late
        headers = {"authorization": f"Bearer {secret}"}
        again = httpx.get(many.ready["http"] + "/v1/models", headers=headers, timeout=30, verify=PLAIN)
        assert again.status_code == 401
    PROVIDER.keys["k1"] = old
    (many.state / "keys.json").write_bytes(PROVIDER.published())
    until = time.monotonic() + 10
    while httpx.get(many.ready["http"] + "/v1/models", headers=headers, timeout=30, verify=PLAIN).status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.1)


ADAPTED = "athanor-mini:support"


def text_of(many: Served, tenant: str, model: str, **body: Any) -> str:
    """A greedy completion."""
    answer = many.post(tenant, "/v1/completions", model=model, prompt="hi", max_tokens=8, temperature=0, **body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_an_adapter_answers_its_tenant_on_every_route(many: Served) -> None:
    """By its whole name and by an alias, over HTTP and gRPC, an adapter answers the tenant that has it, and otherwise
    than the model alone; it is listed for that tenant alone; audit entries name it with its digest."""
    plain, adapted = text_of(many, "delta", "athanor-mini"), text_of(many, "delta", ADAPTED)
    assert plain != adapted
    assert text_of(many, "delta", "help") == adapted
    assert text_of(many, "delta", "athanor-mini") == plain
    for path, body in BODIES.items():
        if path not in EMBEDS | CLASSIFIES:
            assert many.post("delta", path, model=ADAPTED, **body).status_code == 200, path
    for method, make in MESSAGES_OF.items():
        if method not in EMBEDS:
            assert many.call("delta", method, make(ADAPTED)), method
    listed = {name: [one["id"] for one in many.get(name, "/v1/models").json()["data"]] for name in ("delta", "alpha")}
    assert {ADAPTED, "help"} <= set(listed["delta"])
    assert not {ADAPTED, "help"} & set(listed["alpha"])
    assert many.engine("athanor-mini")["adapters"] == 1
    digest = read_adapter("support", many.state / "adapters" / "support").digest
    written = f'"adapter":"{ADAPTED}"'.encode()
    wait(lambda: any(written in path.read_bytes() for path in (many.state / "audit").glob("*.log")))
    found = [one for one in audit_entries(many.state / "audit") if one.get("adapter") == ADAPTED]
    assert {(one["tenant"], one["model"], one["adapter_digest"]) for one in found} == {
        ("delta", "athanor-mini", digest)
    }
    assert ADAPTED in {one["alias"] for one in found}


def test_an_adapter_of_others_is_a_name_that_does_not_exist(many: Served) -> None:
    """To a tenant that may use every model, another's adapter and its alias are refused with status and body of a name
    that is nobody's, on every route. Control: its owner is served."""
    for path, body in BODIES.items():
        told = []
        for name in ("athanor-mini:nothing", ADAPTED, "help"):
            answer = many.post("alpha", path, model=name, **body)
            text = answer.text.replace(repr(name), "?").replace(json.dumps(name), "?").replace(name, "?")
            text = re.sub(r"req_\w+", "id", text)
            told.append((answer.status_code, text, sorted(answer.headers.keys())))
        assert told[0][0] == 404
        assert told[0] == told[1] == told[2], path
    assert text_of(many, "delta", ADAPTED)


def test_an_adapter_with_other_files_is_left_out(many: Served) -> None:
    """An adapter whose files are not those that were pinned is not there for its tenant either, which is told so; the
    model and its other adapters are served."""
    answer = many.post("delta", "/v1/completions", model="athanor-mini:broken", prompt="hi", max_tokens=4)
    assert answer.status_code == 503
    assert text_of(many, "delta", ADAPTED)
    assert "an adapter is left out" in (many.state / "log").read_text()


def test_an_attestation_names_what_its_tenant_may_use_and_nothing_of_others(many: Served) -> None:
    """Models by pattern and by alias with its fallback; served adapters that the tenant has, with the digest of their
    files. The statement of a tenant has no name and no digest of what is others' (control: theirs has)."""
    verifier = read_verifier(many.state / "audit" / "public.key")
    support = read_adapter("athanor-mini:support", many.state / "adapters" / "support").digest
    every = sorted(many.models)
    assert {"athanor-mini", "athanor-next", "classes", "vectors"} <= set(every)
    wanted = {
        "alpha": ("athanor-next", every, []),
        "beta": ("half", ["athanor-mini", "athanor-next", "classes", "vectors"], []),
        "delta": ("help", ["athanor-mini"], [("athanor-mini:support", support)]),
    }
    for tenant, (asked, models, adapters) in wanted.items():
        text = many.post(tenant, "/v1/attestations", model=asked, nonce="9f86d081884c7d65").json()["attestation"]
        found = read_attestation(text.encode(), verifier)
        assert [one.name for one in found.models] == models
        assert [(one.name, one.digest) for one in found.adapters] == adapters
        assert (support in text, "support" in text) == (bool(adapters), bool(adapters))
        assert [name for name in every if f'"{name}"' in text] == models
        assert all(one.sandbox == found.runtime == "gvisor/systrap" and one.flags == () for one in found.models)
