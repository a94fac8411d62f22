"""/v1/attestations over a real socket: the text and its id, and a clear error for every mistake."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from appliance.common.errors import FeatureNotAllowedError
from tests.appliance.gateway.front.support import MODEL, Running

NONCE = "9f86d081884c7d65"


async def post(running: Running, **body: Any) -> httpx.Response:
    """The answer to a tenant's request."""
    async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as client:
        return await client.post("/v1/attestations", content=json.dumps({"model": MODEL, **body}))


async def test_a_tenant_gets_the_signed_text(running: Running) -> None:
    """The text as the supervisor signed it, with the id of the request; fields without effect are named."""
    answer = await post(running, nonce=NONCE, temperature=1)
    found = answer.json()
    assert (found["object"], found["model"], found["attestation"]) == ("attestation", MODEL, f"signed {NONCE}\n")
    assert found["id"] == answer.headers["x-request-id"] == running.service.tokenizer_requests[0].request_id
    assert answer.headers["x-athanor-ignored"] == "temperature"
    assert "x-ratelimit-limit-requests" in answer.headers
    assert running.service.contexts[0].route == "POST /v1/attestations"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "nonce"),
        ({"nonce": None}, "nonce"),
        ({"nonce": 7}, "nonce"),
        ({"nonce": "0" * 15}, "nonce"),
        ({"nonce": "0" * 129}, "nonce"),
        ({"nonce": NONCE.upper()}, "nonce"),
        ({"nonce": NONCE, "model": None}, "model"),
        ({"nonce": NONCE, "model": 3}, "model"),
        ({"nonce": NONCE, "model": ""}, "model"),
    ],
)
async def test_a_mistake_is_named(running: Running, body: dict[str, Any], param: str) -> None:
    """A 400 with the field, before anybody is asked."""
    answer = await post(running, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not running.service.tokenizer_requests


async def test_a_refusal_of_the_policy_reaches_the_caller(running: Running) -> None:
    """What the session raises is the answer; without a key nothing is told."""
    running.service.script = [FeatureNotAllowedError("this tenant may not use attestations")]
    answer = await post(running, nonce=NONCE)
    assert answer.status_code == 403 and "attestations" in answer.json()["error"]["message"]
    async with httpx.AsyncClient(base_url=running.base_url) as client:
        assert (await client.post("/v1/attestations", json={"nonce": NONCE})).status_code == 401
