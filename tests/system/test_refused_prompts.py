"""Prompts that can never be served cost their sender's token rate, over both APIs, and nobody else anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import cycle

import grpc
import httpx
import openai
import pytest

from appliance.gateway.grpc.generated import inference_pb2, inference_pb2_grpc
from tests.system.conftest import PLAIN, Appliance

pytestmark = pytest.mark.runsc

CONTEXT, RATE = 2_048, 6_000
"""Tokens: two refused prompts, each counted to twice the context, leave some twenty seconds of debt."""
GIANT = "a tenant repeats " * 240_000
"""Nearly as much as a body may hold; far more tokens than the tenant's context."""
FEWEST, MOST = 2, 20
"""Refused prompts before the rate is used up; more on a slow machine, on which the rate comes back meanwhile."""


@pytest.fixture
def limited(appliance: Appliance) -> Iterator[Appliance]:
    """The shared demo with a small second tenant; its policy is afterwards what it was."""
    path = appliance.state / "policy.yaml"
    before = path.read_text()
    head, tail = before[: before.index("  beta:")], before[before.index("  beta:") :]
    for name, value in (("max_context_tokens", CONTEXT), ("tokens_per_minute", RATE), ("max_output_tokens", 64)):
        tail, count = re.subn(rf"{name}: \d+", f"{name}: {value}", tail)
        assert count == 1
    for text in (head + tail, before):
        path.write_text(text)
        assert httpx.post(appliance.ready["admin"] + "/reload", timeout=30, verify=PLAIN).status_code == 200
        if text != before:
            yield appliance


def refused_with(ask: Callable[[], object]) -> tuple[str, float]:
    """The error's code of either API, and the seconds that it says to wait."""
    try:
        ask()
    except openai.APIStatusError as error:
        return str(error.code), float(error.response.headers.get("retry-after", 0))
    except grpc.RpcError as error:
        found = {grpc.StatusCode.INVALID_ARGUMENT: "context_length_exceeded"}
        found[grpc.StatusCode.RESOURCE_EXHAUSTED] = "rate_limit_exceeded"
        return found[error.code()], 0  # type: ignore[attr-defined]
    raise AssertionError("it was served")


def asks(appliance: Appliance, stub: inference_pb2_grpc.InferenceServiceStub) -> list[Callable[[str], object]]:
    """A prompt of the second tenant as completion, as conversation, and over gRPC."""
    client = appliance.openai("beta")
    metadata = (("authorization", f"Bearer {appliance.key('beta')}"),)
    options = {"model": "athanor-mini", "max_tokens": 4}

    def generate(prompt: str) -> object:
        request = inference_pb2.GenerateRequest(model="athanor-mini", text=prompt, max_output_tokens=4)
        return list(stub.Generate(request, metadata=metadata))

    return [
        lambda prompt: client.completions.create(prompt=prompt, **options),  # type: ignore[call-overload]
        lambda prompt: client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **options),  # type: ignore[call-overload]
        generate,
    ]


def refused(appliance: Appliance) -> int:
    """Refused requests of the second tenant, as the operator sees them."""
    return int(next(tenant["refused"] for tenant in appliance.status()["tenants"] if tenant["id"] == "beta"))


def test_giant_prompts_use_up_their_senders_rate_alone(limited: Appliance) -> None:
    """A tenant whose prompts fit is served (control). Repeated prompts of four megabytes are refused for their length a
    few times and then for the rate, whichever API they come through, and so is a prompt that would fit; the other
    tenant is served all along, by the same sandbox."""
    text_pid, counted = limited.sandbox_pid("text"), refused(limited)
    other = limited.openai("alpha").completions
    with grpc.insecure_channel(limited.ready["grpc"]) as channel:
        ways = asks(limited, inference_pb2_grpc.InferenceServiceStub(channel))
        for way in ways:
            way("it fits")
        codes = []
        for way in cycle(ways):
            code, _ = refused_with(lambda way=way: way(GIANT))
            codes.append(code)
            assert other.create(model="athanor-mini", prompt="mine fits", max_tokens=4).usage is not None
            if code == "rate_limit_exceeded" or len(codes) == MOST:
                break
        assert codes[:-1] == ["context_length_exceeded"] * (len(codes) - 1)
        assert codes[-1] == "rate_limit_exceeded"
        assert len(codes) - 1 >= FEWEST
        for way in ways[:2]:
            code, wait = refused_with(lambda way=way: way("it fits"))
            assert code == "rate_limit_exceeded"
            assert 0 < wait <= 60
    # Too long is the caller's mistake; only what the rate turned away was refused.
    assert refused(limited) == counted + 1 + 2
    assert limited.sandbox_pid("text") == text_pid
