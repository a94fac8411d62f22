"""One request through the whole appliance, as its users send it."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from appliance.gateway.grpc.generated import inference_pb2, inference_pb2_grpc
from tests.system.conftest import Appliance

pytestmark = pytest.mark.runsc

QUESTION = [{"role": "user", "content": "How do I add a tenant?"}]


def test_the_ready_line_says_where_everything_is(appliance: Appliance) -> None:
    """One JSON line: addresses, models, tenants with keys, and a real sandbox."""
    ready = appliance.ready
    assert ready["models"] == ["athanor-mini"]
    assert set(ready["tenants"]) == {"alpha", "beta"}
    assert ready["sandbox"] == "gvisor/systrap"
    assert ready["http"].startswith("http://127.0.0.1:") and ":" in ready["grpc"]


def test_the_help_desk_answers_as_expected(appliance: Appliance, root: Path) -> None:
    """Greedy answers out of the sandbox are the fixed ones, computed elsewhere in fp32."""
    expected = json.loads((root / "images" / "mini" / "expected.json").read_text())
    client = appliance.openai()
    short = [entry for entry in expected["entries"] if len(entry["prompt_ids"]) < 200]
    assert len(short) >= 24
    for entry in short[::3]:
        answer = client.chat.completions.create(
            model="athanor-mini", messages=entry["messages"], temperature=0, max_tokens=400
        )
        assert answer.choices[0].message.content == entry["answer"]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(entry["answer_ids"])


@pytest.mark.parametrize("tenant", ["alpha", "beta"])
def test_the_official_client_chats_and_completes(appliance: Appliance, tenant: str) -> None:
    """Streamed and whole answers are the same text, with usage, for both tenants."""
    client = appliance.openai(tenant)
    whole = client.chat.completions.create(
        model="athanor-mini",
        messages=QUESTION,
        temperature=0,
        max_tokens=64,  # type: ignore[arg-type]
    )
    chunks = list(
        client.chat.completions.create(
            model="athanor-mini",
            messages=QUESTION,
            temperature=0,
            max_tokens=64,
            stream=True,  # type: ignore[arg-type]
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    plain = client.completions.create(model="athanor-mini", prompt="Athanor is", temperature=0, max_tokens=8)
    streamed = client.completions.create(
        model="athanor-mini", prompt="Athanor is", temperature=0, max_tokens=8, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == plain.choices[0].text


async def test_both_tenants_at_once_with_the_async_client(appliance: Appliance) -> None:
    """Sixteen streams of two tenants run together and every greedy answer is the one it is alone."""

    async def ask(tenant: str) -> str:
        client = appliance.async_openai(tenant)
        stream = await client.chat.completions.create(
            model="athanor-mini",
            messages=QUESTION,
            temperature=0,
            max_tokens=48,
            stream=True,  # type: ignore[arg-type]
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    alone = await ask("alpha")
    together = await asyncio.gather(*(ask(tenant) for tenant in ["alpha", "beta"] * 8))
    assert set(together) == {alone}


def test_grpc_streams_typed_events(appliance: Appliance) -> None:
    """Started first, deltas with token ids, finished last; identity in metadata."""
    with grpc.insecure_channel(appliance.ready["grpc"]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(
            model="athanor-mini",
            conversation=inference_pb2.Conversation(
                messages=[inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, content="How do I add a tenant?")]
            ),
            max_output_tokens=12,
            sampling=inference_pb2.Sampling(temperature=0.0),
        )
        identity = (("authorization", f"Bearer {appliance.key('beta')}"),)
        events = [event.WhichOneof("event") for event in stub.Generate(request, metadata=identity, timeout=30)]
        assert events[0] == "started" and events[-1] == "finished" and set(events[1:-1]) == {"delta"}
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Generate(request, timeout=30))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        names = [card.name for card in stub.ListModels(inference_pb2.ListModelsRequest(), metadata=identity).models]
        assert names == ["athanor-mini"]


def test_grpc_health_is_open_and_reflection_needs_identity(appliance: Appliance) -> None:
    """Load balancers ask for health without a key; what else there is to call is told to tenants only."""
    identity = (("authorization", f"Bearer {appliance.key('alpha')}"),)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(appliance.ready["grpc"]) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = next(stub.ServerReflectionInfo(iter([question]), metadata=identity))
        services = [service.name for service in answer.list_services_response.service]
        assert "athanor.inference.v1.InferenceService" in services
        with pytest.raises(grpc.RpcError):
            next(stub.ServerReflectionInfo(iter([question])))


def test_prefixes_are_reused_inside_a_tenant_and_never_across(appliance: Appliance) -> None:
    """The second tenant sees nothing of the first one's prompt; the first one does (positive control)."""
    prompt = "A conversation that nobody had before: " + " ".join(str(time.time_ns()) for _ in range(20))

    def cached(tenant: str) -> int:
        answer = appliance.openai(tenant).completions.create(
            model="athanor-mini", prompt=prompt, max_tokens=1, temperature=0
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("alpha") == 0
    assert cached("alpha") > 0
    assert cached("beta") == 0


def test_a_client_that_leaves_stops_the_compute(appliance: Appliance) -> None:
    """After a broken stream the engine has nothing to do long before the answer would have ended."""
    client = appliance.openai()
    stream = client.completions.create(
        model="athanor-mini",
        prompt="Count:",
        max_tokens=3_500,
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert appliance.status()["tenants"][0]["in_flight"] == 1
    stream.close()
    deadline = time.monotonic() + 3
    while appliance.status()["tenants"][0]["in_flight"]:
        assert time.monotonic() < deadline
    answer = client.completions.create(model="athanor-mini", prompt="a", max_tokens=1)
    assert answer.usage is not None
    assert appliance.status()["models"][0]["engine"]["running"] <= 1


def test_a_deadline_ends_the_request(appliance: Appliance) -> None:
    """A request that cannot be done in its time ends with 504 and leaves nothing running."""
    with pytest.raises(openai.APIStatusError) as raised:
        appliance.openai().completions.create(
            model="athanor-mini",
            prompt="Count:",
            max_tokens=3_500,
            temperature=0,
            extra_body={"ignore_eos": True},
            extra_headers={"x-request-timeout-ms": "300"},
        )
    assert raised.value.status_code == 504


def test_stop_strings_seeds_and_logprobs(appliance: Appliance) -> None:
    """Stop strings end the text before them; a seed repeats a sample; logprobs come with tokens."""
    client = appliance.openai()

    def sample(**options: object) -> str:
        answer = client.chat.completions.create(
            model="athanor-mini",
            messages=QUESTION,
            max_tokens=24,
            **options,  # type: ignore[call-overload]
        )
        return str(answer.choices[0].message.content)

    full = sample(temperature=0)
    stop = full[6:10]
    assert sample(temperature=0, stop=stop) == full[: full.index(stop)]
    assert sample(temperature=1.0, seed=5) == sample(temperature=1.0, seed=5)
    answer = client.chat.completions.create(
        model="athanor-mini",
        messages=QUESTION,
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,  # type: ignore[arg-type]
    )
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    first = answer.choices[0].logprobs.content[0]
    assert len(first.top_logprobs) == 2 and first.logprob == pytest.approx(first.top_logprobs[0].logprob)


def test_the_trace_of_a_request_has_every_phase(appliance: Appliance) -> None:
    """The embedded store shows policy, text, queue, prefill and decode under one trace, without content."""
    secret = f"canary-{time.time_ns()}"
    appliance.openai().completions.create(model="athanor-mini", prompt=secret, max_tokens=4)
    listing = httpx.get(appliance.ready["admin"] + "/traces?limit=5").json()
    newest = listing["traces"][0]
    text = httpx.get(f"{appliance.ready['admin']}/traces/{newest['trace_id']}").text
    for phase in ("policy", "text", "queue", "prefill", "decode"):
        assert f"athanor.{phase}" in text
    assert "gen_ai.usage.input_tokens" in text and "gvisor/systrap" in text
    assert secret not in text and secret not in appliance.log.read_text()


def test_metrics_have_the_conventions_names(appliance: Appliance) -> None:
    """Prometheus text with the GenAI server histograms after a request."""
    appliance.openai().completions.create(model="athanor-mini", prompt="a", max_tokens=2)
    text = httpx.get(appliance.ready["admin"] + "/metrics").text
    for name in (
        "gen_ai_server_request_duration_seconds_count",
        "gen_ai_server_time_to_first_token_seconds_bucket",
        "gen_ai_client_token_usage_sum",
    ):
        assert name in text


def test_admin_routes_are_not_on_the_tenants_listener(appliance: Appliance) -> None:
    """Metrics, status and traces answer on the admin listener only, with or without a key."""
    key = {"authorization": f"Bearer {appliance.key('alpha')}"}
    for path in ("/metrics", "/status", "/traces", "/reload"):
        assert httpx.get(appliance.ready["http"] + path, headers=key).status_code == 404
        assert httpx.post(appliance.ready["http"] + path, headers=key).status_code in (404, 405)


def test_several_choices_of_one_prompt(appliance: Appliance) -> None:
    """Choices, whole and streamed, are the single requests' with the seeds in a row; the prompt
    is counted once."""
    client = appliance.openai()
    ask = {"model": "athanor-mini", "messages": QUESTION, "temperature": 1.3, "max_tokens": 12}
    single = [client.chat.completions.create(**ask, seed=40 + index) for index in range(3)]
    texts = [answer.choices[0].message.content for answer in single]
    whole = client.chat.completions.create(**ask, seed=40, n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.message.content for choice in whole.choices] == texts
    assert whole.usage.prompt_tokens == single[0].usage.prompt_tokens
    assert whole.usage.completion_tokens == sum(answer.usage.completion_tokens for answer in single)
    chunks = [chunk for chunk in client.chat.completions.create(**ask, seed=40, n=3, stream=True) if chunk.choices]
    parts = [choice for chunk in chunks for choice in chunk.choices]
    assert texts == ["".join(part.delta.content or "" for part in parts if part.index == index) for index in range(3)]
    assert sorted(part.index for part in parts if part.finish_reason) == [0, 1, 2]


def test_a_prompt_is_scored(appliance: Appliance) -> None:
    """The prompt is scored the same by either spelling, cached or not, and the output goes on from there."""
    client = appliance.openai()
    prompt = list(range(100, 150))
    first = client.completions.create(
        model="athanor-mini",
        prompt=prompt,
        temperature=0,
        max_tokens=12,
        logprobs=1,
        extra_body={"prompt_logprobs": 1, "ignore_eos": True},
    )
    told = first.choices[0].model_extra["prompt_logprobs"]
    assert (len(told), told[0]) == (50, None)
    for _ in range(2):
        again = client.completions.create(
            model="athanor-mini", prompt=prompt, temperature=0, max_tokens=1, logprobs=1, echo=True
        )
        scored = again.choices[0].logprobs
        assert again.usage.prompt_tokens_details.cached_tokens == 0
        assert scored.token_logprobs[0] is None
        for place in range(1, 50):
            assert abs(scored.token_logprobs[place] - told[place][str(prompt[place])]["logprob"]) < 1e-4
        assert abs(scored.token_logprobs[50] - first.choices[0].logprobs.token_logprobs[0]) < 1e-4


def test_a_deterministic_answer_is_the_same_bits_beside_others(appliance: Appliance) -> None:
    """Text and log-probabilities over HTTP are equal alone and while other requests of both tenants run."""
    ask = {
        "model": "athanor-mini",
        "messages": QUESTION,
        "temperature": 0.9,
        "seed": 5,
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": {"deterministic": True},
    }
    client, other = appliance.openai(), appliance.openai("beta")

    def content() -> list[object]:
        answer = client.chat.completions.create(**ask)
        return [entry.model_dump() for entry in answer.choices[0].logprobs.content]

    alone = content()
    assert len(alone) == 24
    with ThreadPoolExecutor(6) as pool:
        noise = [
            pool.submit(
                (client if number % 2 else other).completions.create,
                model="athanor-mini",
                prompt="word " * (3 + 7 * number),
                max_tokens=60,
                n=1 + number % 3,
            )
            for number in range(6)
        ]
        beside = [content() for _ in range(3)]
        for one in noise:
            one.result()
    assert beside == [alone] * 3
