"""Classes of mistakes that no other test shows whole: each is closed for every site there is."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front.request_builder import MAX_CHOICES, MAX_OUTPUT_TOKENS, Stamp
from appliance.gateway.generate_request import GenerateRequest, Operation
from appliance.gateway.grpc import message_mapping
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.http import openai
from appliance.selftest.raw_http import request_bytes, talk
from appliance.selftest.scripted_gateway import MODEL, scripted_gateway
from isolation.ipc.sampling import PARAMETERS
from tests.redteam.refusals import refusals

OURS = ("appliance", "engine", "isolation", "policy")
OBJECTS = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle")
FETCHERS = tuple("urllib.request http.client requests httpx aiohttp urllib3 h11 ftplib smtplib xmlrpc obstore".split())
STAMP = Stamp("req", None, 1)


def sources(root: Path, *folders: str) -> list[tuple[Path, str]]:
    """The text of every module of these folders, generated ones left out."""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return [(path, path.read_text()) for path in paths if "generated" not in path.parts]


def test_nothing_deserialises_objects(root: Path) -> None:
    """Mistake 1: no module of ours, of the bench or of the tests imports a loader of objects, and none of ours runs a
    text as code; and the search sees both."""
    loads = re.compile(rf"^\s*(?:import|from)\s+(?:{'|'.join(OBJECTS)})\b", re.MULTILINE)
    runs = re.compile(r"(?<![\w.\"'])(?:eval|exec|__import__)\(")
    assert [path for path, text in sources(root, *OURS, "bench", "tests", "images") if loads.search(text)] == []
    own = [path for path, text in sources(root, *OURS) if runs.search(text)]
    attackers = (
        "appliance/selftest/intruder.py",
        "appliance/selftest/targets.py",
    )  # texts for a program inside a sandbox
    assert sorted(path.relative_to(root).as_posix() for path in own) == sorted(attackers)
    assert loads.search("def f():\n    from pickle import loads")
    assert runs.search("x = eval(text)")


def test_nothing_that_serves_can_fetch(root: Path) -> None:
    """Mistake 6: neither the front ends nor the gateway, the supervisor or a sandbox has a client of any protocol of
    the web; the operator's own commands have one, so the search sees it."""
    fetches = re.compile(rf"^\s*(?:import|from)\s+(?:{'|'.join(FETCHERS)})\b", re.MULTILINE)
    serving = ("appliance/gateway", "appliance/supervisor", "engine", "isolation")
    found = [path.relative_to(root).as_posix() for path, text in sources(root, *serving) if fetches.search(text)]
    # All at addresses in the operator's configuration alone: clusters that compute external models, the operator's own
    # collector, and what asks by http_get: the fleet's hosts and the keys of token issuers.
    assert found == [
        "appliance/gateway/external/client.py",
        "appliance/gateway/front/http_get.py",
        "appliance/gateway/telemetry/otlp_http.py",
    ]
    asking = [path.relative_to(root).as_posix() for path, text in sources(root, *serving) if "front.http_get " in text]
    assert asking == ["appliance/gateway/console/fleet.py", "appliance/gateway/front/issuer_keys.py"]
    assert any(fetches.search(text) for _, text in sources(root, "appliance/operator/cli"))


def test_secrets_are_compared_in_constant_time(root: Path) -> None:
    """Mistake 17: in the module that checks keys no digest or secret is compared with an operator."""
    text = (root / "appliance/common/keys.py").read_text()
    secrets = {"digest", "secret", "expected", "found", "mac"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            names |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
            assert not names & secrets, ast.unparse(node)
    assert "compare_digest" in text


@pytest.mark.timeout(300)
def test_no_check_of_input_is_an_assert(root: Path) -> None:
    """Mistake 2: with asserts switched off (python -O) every reader of foreign bytes takes and refuses the same."""
    argv = [sys.executable, "-O", "-m", "tests.redteam.refusals"]
    without = json.loads(subprocess.run(argv, cwd=root, capture_output=True, check=True).stdout)
    with_asserts = refusals()
    assert (with_asserts["debug"], without["debug"]) == (True, False)
    assert with_asserts["found"] == without["found"]
    assert any(False in one for one in with_asserts["found"].values())


@pytest.mark.parametrize(
    ("n", "max_tokens", "fine"),
    [
        (1, MAX_OUTPUT_TOKENS, True),
        (2, MAX_OUTPUT_TOKENS // 2, True),
        (2, MAX_OUTPUT_TOKENS // 2 + 1, False),
        (MAX_CHOICES, 1, True),
        (MAX_CHOICES + 1, 1, False),
        (0, 1, False),
        (-1, 1, False),
        (1, -1, False),
    ],
)
def test_the_product_of_counts_is_bounded(n: int, max_tokens: int, fine: bool) -> None:
    """Mistake 7: not only n and max_tokens have bounds, but what they come to."""
    body = json.dumps({"model": "m", "prompt": "x", "n": n, "max_tokens": max_tokens}).encode()
    if fine:
        assert openai.parse(Operation.TEXT_COMPLETION, body, STAMP).request.choices == n
    else:
        with pytest.raises(InvalidRequestError):
            openai.parse(Operation.TEXT_COMPLETION, body, STAMP)


def by_http(name: str, value: object) -> GenerateRequest | None:
    """The request over HTTP, None when it is refused."""
    body = json.dumps({"model": "m", "prompt": "x", name: value}).encode()
    try:
        return openai.parse(Operation.TEXT_COMPLETION, body, STAMP).request
    except InvalidRequestError:
        return None


def by_grpc(name: str, value: object) -> GenerateRequest | None:
    """The same over gRPC; a number that the schema cannot hold is refused by it."""
    message = pb.GenerateRequest(model="m", text="x")
    place = message.sampling if name in {field.name for field in pb.Sampling.DESCRIPTOR.fields} else message
    try:
        if isinstance(value, list):
            getattr(place, name).extend(value)
        else:
            setattr(place, name, value)
        return replace(message_mapping.to_request(message, STAMP), stream=False)
    except (InvalidRequestError, ValueError):
        return None


NUMBERS = (0.0, 0.01, 0.5, 1, 2.0, 2.001, -0.5, -2.0, -2.1, 16, 17, 20, 21, 100, 101, 2**20, 2**20 + 1, 1e300)


@pytest.mark.parametrize(
    ("http", "grpc", "values"),
    [
        *((one.name, one.name, NUMBERS) for one in PARAMETERS if one.kind is float),
        *(
            (one, other, [int(number) for number in NUMBERS if number == int(number) and 0 <= number < 1e300])
            for one, other in (
                ("max_tokens", "max_output_tokens"),
                ("n", "choices"),
                ("logprobs", "logprobs"),
                ("prompt_logprobs", "prompt_logprobs"),
                ("top_k", "top_k"),
            )
        ),
        ("stop", "stop", [["a"] * 16, ["a"] * 17, [""], ["a" * 256], ["a" * 257], ["\u00e9" * 129], []]),
        ("stop_token_ids", "stop_token_ids", [[1] * 64, [1] * 65, [2**31 - 1], [2**31], []]),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_both_front_ends_have_the_same_limits(http: str, grpc: str, values: list[object]) -> None:
    """Mistake 18: what one front end refuses the other refuses too, and what both take is the same request."""
    outcomes = [(value, by_http(http, value), by_grpc(grpc, value)) for value in values]
    assert [value for value, one, other in outcomes if one != other] == []
    taken = [one is not None for _, one, _ in outcomes]
    assert True in taken
    assert False in taken or http == "top_k"


async def test_a_client_s_ids_are_no_keys_inside() -> None:
    """Mistake 11: twenty requests under one id of the client, at once, are twenty inside and in what is told."""
    ids = [("x-request-id", "mine"), ("idempotency-key", "mine"), ("traceparent", f"00-{'a' * 32}-{'b' * 16}-01")]
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1, "user": "mine", "request_id": "mine"}).encode()
    async with scripted_gateway() as gateway:
        proof = ("authorization", f"Bearer {gateway.keys['alpha']}")
        request = request_bytes("POST", "/v1/completions", body, proof, *ids)
        answers = await asyncio.gather(*(talk(gateway.ends.http_port, request) for _ in range(20)))
        assert len(set(gateway.heard.wire_ids)) == 20
    told = {line for answer in answers for line in answer.splitlines() if line.lower().startswith(b"x-request-id")}
    assert len(told) == 20
    assert not any(b"mine" in answer for answer in answers)
