"""The appliance around a null engine: every part real but the model, as `bench/host.py` measures it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from appliance.selftest.processes import CpuClock, rooms
from bench.host import Served, drive, null_appliance
from tests.system.conftest import as_demos

pytestmark = [pytest.mark.runsc, pytest.mark.full, pytest.mark.timeout(180)]

TOKENS = 48


@pytest.fixture(scope="module")
def served(runsc_path: Path) -> Iterator[Served]:
    """A null appliance whose steps take two milliseconds."""
    with null_appliance(2_000, sandbox=as_demos()) as started:
        yield started


@pytest.mark.parametrize("front_end", ["http", "grpc"])
def test_every_token_of_every_stream_arrives(served: Served, front_end: str) -> None:
    """64 streams at once, coalesced while it is busy: no answer is short, and none is lost."""
    seen = drive(served, front_end, streams=64, requests=2, tokens=TOKENS)
    assert seen["failures"] == 0
    assert seen["tokens"] == 64 * 2 * TOKENS
    assert 64 * 2 <= seen["chunks"] <= seen["tokens"]


def test_the_official_client_sees_one_answer(served: Served) -> None:
    """Streamed and whole, the same seed gives the same text, and usage counts the tokens; logprobs are one a token."""
    client = openai.OpenAI(base_url=served.ready["http"] + "/v1", api_key=served.keys[0], max_retries=0, timeout=60)
    asked = {
        "model": "athanor-mini",
        "prompt": "Count:",
        "max_tokens": TOKENS,
        "seed": 3,
        "logprobs": 1,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text != ""
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens == TOKENS
    streamed = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    assert whole.choices[0].logprobs is not None
    assert streamed == whole.choices[0].logprobs.tokens and len(streamed) == TOKENS


def test_it_is_named_wherever_models_are(served: Served) -> None:
    """Tenants see it in the list of models, the operator in status."""
    headers = {"authorization": f"Bearer {served.keys[0]}"}
    listed = httpx.get(served.ready["http"] + "/v1/models", headers=headers, timeout=10).json()["data"]
    assert [model["runner"] for model in listed] == ["null"]
    status = httpx.get(served.ready["admin"] + "/status", timeout=10).json()
    assert [model["runner"] for model in status["models"]] == ["null"]


def test_all_processes_are_found_and_their_time_counted(served: Served) -> None:
    """Gateway, supervisor and both sandboxes, stubs included; what works while tokens flow is seen to work."""
    sandboxes = served.sandboxes()
    found = rooms(served.process.pid, sandboxes)
    assert {"gateway", "supervisor", "text", "engine"} <= set(found.values())
    for room, pid in sandboxes.items():
        assert sum(1 for where in found.values() if where == room) >= 3, "gofer, kernel and stubs"
        assert found[pid] == room
    clock = CpuClock(served.process.pid, sandboxes)
    before = clock.read()
    drive(served, "http", streams=8, requests=1, tokens=TOKENS)
    after = clock.read()
    assert all(after[room] > before[room] for room in ("gateway", "text", "engine"))
