"""The tokenizer alone, through the whole appliance: its counts are those that an answer is charged for."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import openai
import pytest
import tokenizers

from appliance.common.catalog import embedded_model
from appliance.gateway.grpc.generated import inference_pb2, inference_pb2_grpc
from tests.system.conftest import PLAIN, Appliance
from tests.system.test_audit import entries, wait_for

pytestmark = pytest.mark.runsc

MODEL = "athanor-mini"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "How do I add a tenant? na\u00efve \u4f60\u597d"},
]
TEXT = "def f(x):\n    return {'a': [1, 2.5e-3]}  # caf\u00e9 \U0001f999"


def ask(appliance: Appliance, path: str, tenant: str = "alpha", **body: Any) -> httpx.Response:
    """The answer to a tenant's request."""
    headers = {"authorization": f"Bearer {appliance.key(tenant)}"}
    url = appliance.ready["http"] + path
    return httpx.post(url, json={"model": MODEL, **body}, headers=headers, timeout=30, verify=PLAIN)


def test_counts_are_those_of_the_answers(appliance: Appliance) -> None:
    """Of a conversation and of a text /tokenize and CountTokens count what usage has for the same input, the ids of
    the text are those of the published tokenizer, and /detokenize gives it back. Control: a longer one counts more."""
    client = appliance.openai()
    chat = ask(appliance, "/tokenize", messages=MESSAGES).json()
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert answer.usage is not None and chat["count"] == len(chat["tokens"]) == answer.usage.prompt_tokens
    text = ask(appliance, "/tokenize", prompt=TEXT).json()
    completion = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=1)
    assert completion.usage is not None and text["count"] == completion.usage.prompt_tokens
    published = tokenizers.Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    assert text["tokens"] == published.encode(TEXT).ids
    bare = ask(appliance, "/tokenize", prompt=TEXT, add_special_tokens=False).json()
    assert bare["tokens"] == published.encode(TEXT, add_special_tokens=False).ids
    assert ask(appliance, "/detokenize", tokens=bare["tokens"]).json() == {"prompt": TEXT}
    assert ask(appliance, "/tokenize", prompt=TEXT + TEXT).json()["count"] > text["count"]
    with grpc.insecure_channel(appliance.ready["grpc"]) as channel:
        counted = inference_pb2_grpc.InferenceServiceStub(channel).CountTokens(
            inference_pb2.CountTokensRequest(model=MODEL, text=TEXT, include_token_ids=True),
            metadata=[("authorization", f"Bearer {appliance.key('alpha')}")],
            timeout=30,
        )
    assert (counted.input_tokens, list(counted.token_ids.ids)) == (text["count"], text["tokens"])
    assert counted.max_context_tokens == text["max_model_len"] > 0


def test_what_cannot_be_counted_is_refused(appliance: Appliance) -> None:
    """A model that is none of the tenant's, an id that is no token, a text far beyond the context: each with its code,
    and nothing of it stays: the next request is served."""
    unknown = ask(appliance, "/tokenize", prompt="a", model="other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    beyond = ask(appliance, "/detokenize", tokens=[1, 1 << 30])
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "tokens")
    long = ask(appliance, "/tokenize", prompt="word " * 300_000)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded"), long.text
    assert ask(appliance, "/tokenize", prompt="a").status_code == 200


def account(appliance: Appliance) -> tuple[int, int, int]:
    """Requests, refused requests and tokens of alpha."""
    (alpha,) = [one for one in appliance.status()["tenants"] if one["id"] == "alpha"]
    return alpha["requests"], alpha["refused"], alpha["tokens"]


def test_policy_trace_and_account(governed: Appliance) -> None:
    """A request for ids is traced under its operation, stands in the audit log and costs no tokens; with the feature
    withheld both APIs refuse it, naming the rule, while answers are given as before."""
    appliance = governed
    before = account(appliance)
    known = sum(one["kind"] == "request" for one in entries(appliance.state / "audit"))
    assert ask(appliance, "/tokenize", prompt=TEXT).status_code == 200
    assert account(appliance) == (before[0] + 1, *before[1:])
    listed, *_ = httpx.get(appliance.ready["admin"] + "/traces", timeout=10, verify=PLAIN).json()["traces"]
    assert (listed["outcome"], listed["model"]) == ("ok", MODEL)
    trace = httpx.get(f"{appliance.ready['admin']}/traces/{listed['request_id']}", timeout=10, verify=PLAIN).text
    assert f"tokenize {MODEL}" in trace
    entry = wait_for(appliance.state / "audit", "request", known + 1)[known]
    assert (entry["operation"], entry["outcome"], entry["output_tokens"]) == ("tokenize", "OK", 0)
    policy = appliance.state / "policy.yaml"
    text = policy.read_text()
    assert "  alpha:\n" in text
    policy.write_text(text.replace("  alpha:\n", "  alpha:\n    features: {tokenize: false}\n"))
    assert httpx.post(appliance.ready["admin"] + "/reload", timeout=10, verify=PLAIN).status_code == 200
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        refused = ask(appliance, path, **body)
        assert (refused.status_code, "tokenizer" in refused.text) == (403, True), refused.text
    with grpc.insecure_channel(appliance.ready["grpc"]) as channel, pytest.raises(grpc.RpcError) as raised:
        inference_pb2_grpc.InferenceServiceStub(channel).CountTokens(
            inference_pb2.CountTokensRequest(model=MODEL, text="a"),
            metadata=[("authorization", f"Bearer {appliance.key('alpha')}")],
            timeout=30,
        )
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert ask(appliance, "/tokenize", "beta", prompt="a").status_code == 200
    answer = appliance.openai().completions.create(model=MODEL, prompt="a", max_tokens=1)
    assert isinstance(answer, openai.types.Completion)


def test_arguments_reach_the_model_s_chat_template(appliance: Appliance) -> None:
    """One that the template reads changes the prompt, over both APIs; one that it does not know is a 400 with its name.
    Control: the prompt without arguments."""
    plain = ask(appliance, "/tokenize", messages=MESSAGES).json()["count"]
    bare = ask(appliance, "/tokenize", messages=MESSAGES, chat_template_kwargs={"add_generation_prompt": False})
    assert 0 < bare.json()["count"] < plain
    unknown = ask(appliance, "/v1/chat/completions", messages=MESSAGES, chat_template_kwargs={"effort": "low"})
    error = unknown.json()["error"]
    assert (unknown.status_code, error["param"]) == (400, "chat_template_kwargs") and "'effort'" in error["message"]
    conversation = inference_pb2.Conversation(
        messages=[
            inference_pb2.ChatMessage(role=inference_pb2.ROLE_SYSTEM, content=MESSAGES[0]["content"]),
            inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, content=MESSAGES[1]["content"]),
        ]
    )
    conversation.template_arguments.update({"add_generation_prompt": False})
    with grpc.insecure_channel(appliance.ready["grpc"]) as channel:
        counted = inference_pb2_grpc.InferenceServiceStub(channel).CountTokens(
            inference_pb2.CountTokensRequest(model=MODEL, conversation=conversation),
            metadata=[("authorization", f"Bearer {appliance.key('alpha')}")],
            timeout=30,
        )
    assert counted.input_tokens == bare.json()["count"]


def test_several_prompts_are_answered_as_each_alone(appliance: Appliance) -> None:
    """Greedy answers to five prompts in one request are those to each of them, in order, and usage is the sum."""
    client = appliance.openai()
    prompts = ["The sandbox", "A tenant", "What is Athanor?", "How do I", TEXT]
    together = client.completions.create(model=MODEL, prompt=prompts, max_tokens=8, temperature=0)
    alone = [client.completions.create(model=MODEL, prompt=one, max_tokens=8, temperature=0) for one in prompts]
    assert [one.text for one in together.choices] == [one.choices[0].text for one in alone]
    assert together.usage is not None
    assert together.usage.total_tokens == sum(one.usage.total_tokens for one in alone if one.usage is not None)
