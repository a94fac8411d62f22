"""Session affinity: tags of sessions, and how they stand in answers of both APIs."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import httpx
import pytest

from appliance.common.errors import InvalidRequestError, StartError
from appliance.gateway.front.affinity import HEADER, MAX_SESSION_CHARS, SessionAffinity, open_affinity
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from tests.appliance.gateway.front.support import MODEL, serving

KEY = bytes(range(32))
ALPHA, BETA = "key:alpha-1", "key:beta-1"
CHAT = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()


def test_hosts_of_one_fleet_give_one_tag_and_no_other_fleet_does() -> None:
    """A session has the same tag on each host that has the key, also when the tag comes back. Control: another key,
    another credential and another session have other tags, and a tag of another credential is only a name."""
    here, there, stranger = SessionAffinity(KEY), SessionAffinity(KEY), SessionAffinity(bytes(32))
    tag = here.tag(ALPHA, ["chat-1"])
    assert tag == there.tag(ALPHA, ["chat-1"]) == there.tag(ALPHA, [tag]) == here.tag(ALPHA, [tag])
    others = [
        stranger.tag(ALPHA, ["chat-1"]),
        here.tag(BETA, ["chat-1"]),
        here.tag(ALPHA, ["chat-2"]),
        here.tag(BETA, [tag]),
        stranger.tag(ALPHA, [tag]),
    ]
    assert len({tag, *others}) == 6
    assert here.fingerprint == there.fingerprint != stranger.fingerprint


def test_a_session_without_a_name_gets_a_tag_of_its_own() -> None:
    """Two requests without the header are two sessions; each goes on under its tag."""
    one = SessionAffinity(KEY)
    first, second = one.tag(ALPHA, []), one.tag(ALPHA, [])
    assert first != second and one.tag(ALPHA, [first]) == first and SessionAffinity(KEY).tag(ALPHA, [second]) == second


def test_a_tag_says_nothing_about_credential_and_session() -> None:
    """Neither is found in it, and 10,000 sessions have as many tags, which spread over two halves of the values."""
    one = SessionAffinity(KEY)
    tags = [one.tag(ALPHA, [f"s{number}"]) for number in range(10_000)]
    assert len(set(tags)) == len(tags) and not any("alpha" in tag for tag in tags)
    low = sum(tag[3] in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef" for tag in tags)
    assert 4_700 < low < 5_300


@pytest.mark.parametrize("given", [[""], ["two words"], ["a", "b"], ["x" * (MAX_SESSION_CHARS + 1)], ["\xe4"]])
def test_what_is_no_name_is_refused(given: list[str]) -> None:
    """With the header's name. Control: the longest name is taken."""
    with pytest.raises(InvalidRequestError) as caught:
        SessionAffinity(KEY).tag(ALPHA, given)
    assert caught.value.param == HEADER
    assert SessionAffinity(KEY).tag(ALPHA, ["x" * MAX_SESSION_CHARS])


def test_a_key_file_must_hold_a_key(tmp_path: Path) -> None:
    """None without a file; a file that is absent or has no key is an error of the start. Control: a key is taken."""
    assert open_affinity(None) is None
    path = tmp_path / "fleet.key"
    with pytest.raises(StartError, match="cannot read"):
        open_affinity(path)
    path.write_text("f00d\n")
    with pytest.raises(StartError, match="64 hex digits"):
        open_affinity(path)
    path.write_text(KEY.hex() + "\n")
    found = open_affinity(path)
    assert found is not None and found.fingerprint == SessionAffinity(KEY).fingerprint


async def test_answers_have_the_tag_in_both_apis() -> None:
    """Whole answers, streams, errors and gRPC's metadata have it; a request that repeats it gets it again. A name that
    cannot be one is a 400, and so over gRPC. Strangers get none."""
    async with (
        serving(affinity=SessionAffinity(KEY)) as running,
        httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as client,
        grpc.aio.insecure_channel(running.target) as channel,
    ):
        wanted = SessionAffinity(KEY).tag("key:acme-1", ["chat-1"])
        for body in (CHAT, CHAT[:-1] + b',"stream":true}', b"{}"):
            for name in ("chat-1", wanted):
                answer = await client.post("/v1/chat/completions", content=body, headers={HEADER: name})
                assert (answer.status_code, answer.headers[HEADER]) == (400 if body == b"{}" else 200, wanted)
        assert (await client.get("/v1/models", headers={HEADER: "two words"})).json()["error"]["param"] == HEADER
        stranger = await client.get("/v1/models", headers={"authorization": "Bearer x", HEADER: "chat-1"})
        assert stranger.status_code == 401 and HEADER not in stranger.headers
        stub, proof = InferenceServiceStub(channel), tuple(running.authorization.items())
        call = stub.Generate(pb.GenerateRequest(model=MODEL, text="x"), metadata=(*proof, (HEADER, "chat-1")))
        assert dict(await call.initial_metadata())[HEADER] == wanted
        refused = stub.Generate(pb.GenerateRequest(model=MODEL, text="x"), metadata=(*proof, (HEADER, "two words")))
        assert await refused.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_without_a_key_the_header_means_nothing() -> None:
    """No answer has it, and any value is passed over."""
    async with (
        serving() as running,
        httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as client,
    ):
        answer = await client.get("/v1/models", headers={HEADER: "two words"})
        assert answer.status_code == 200 and HEADER not in answer.headers
