"""Content rules over every API: which fields a request is found to use, and what its caller is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.common.errors import ApplianceError, FeatureNotAllowedError, PayloadTooLargeError
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import GenerateRequest, Operation
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.message_mapping import to_embed_request, to_request
from appliance.gateway.http import openai, openai_embeddings
from appliance.gateway.http.messages_request import parse_message
from appliance.gateway.http.openai_tools import FIELDS as TOOL_FIELDS
from appliance.gateway.http.responses_request import parse_response
from appliance.gateway.request.content import content_of, fields_of
from appliance.gateway.request.session import Session
from policy.content import REQUEST_FIELDS
from tests.appliance.gateway.request.test_session import Stage, collect

STAMP = Stamp("r", seed=1)
CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "now"}}
SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
TURNS = pb.Conversation(messages=[pb.ChatMessage(role=pb.ROLE_USER, content="hi")])


def chat(**fields: Any) -> GenerateRequest:
    """A conversation over OpenAI's API."""
    document = {"model": "m", "messages": CHAT, **fields}
    return openai.parse(Operation.CHAT, json.dumps(document).encode(), STAMP).request


def completion(**fields: Any) -> GenerateRequest:
    """A plain prompt over OpenAI's API."""
    document = {"model": "m", "prompt": "hi", **fields}
    return openai.parse(Operation.TEXT_COMPLETION, json.dumps(document).encode(), STAMP).request


def message(**fields: Any) -> GenerateRequest:
    """A message over Anthropic's API."""
    document = {"model": "m", "messages": CHAT, "max_tokens": 5, **fields}
    return parse_message(json.dumps(document).encode(), STAMP).request


def response(**fields: Any) -> GenerateRequest:
    """A response over OpenAI's API."""
    return parse_response(json.dumps({"model": "m", "input": "hi", **fields}).encode(), STAMP).request


def rpc(**fields: Any) -> GenerateRequest:
    """A request over gRPC."""
    fields.setdefault("conversation", TURNS)
    return to_request(pb.GenerateRequest(model="m", **fields), STAMP)


def arguments() -> pb.Conversation:
    """A conversation with arguments of the template, a tool and a speaker."""
    conversation = pb.Conversation(
        messages=[pb.ChatMessage(role=pb.ROLE_USER, content="hi", name="ann")], tools=[pb.Tool(name="now")]
    )
    conversation.template_arguments.update({"enable_thinking": True})
    return conversation


USED = [
    (chat(), set()),
    (chat(temperature=1, top_p=1.0, seed=0), {"temperature", "top_p", "seed"}),
    (chat(top_k=-1, min_p=0, typical_p=1, repetition_penalty=1), {"top_k", "min_p", "typical_p", "repetition_penalty"}),
    (chat(presence_penalty=0, frequency_penalty=0), {"presence_penalty", "frequency_penalty"}),
    (chat(stop="x"), {"stop"}),
    (chat(stop_token_ids=[1]), {"stop"}),
    (chat(logprobs=True), {"logprobs"}),
    (chat(logprobs=True, top_logprobs=3), {"logprobs"}),
    (chat(prompt_logprobs=0), {"prompt_logprobs"}),
    (chat(n=2), {"n"}),
    (chat(ignore_eos=True, deterministic=True), {"ignore_eos", "deterministic"}),
    (chat(logit_bias={"5": 1}), {"logit_bias"}),
    (chat(logit_bias={}), set()),
    (chat(prompt_cache_key="k", service_tier="flex"), {"prompt_cache_key", "service_tier"}),
    (chat(tools=[TOOL]), {"tools"}),
    (chat(response_format={"type": "json_object"}), {"response_format"}),
    (chat(guided_regex="a+"), {"response_format"}),
    (chat(structured_outputs={"choice": ["a"]}), {"response_format"}),
    (chat(tools=[TOOL], response_format={"type": "json_object"}), {"tools", "response_format"}),
    (chat(reasoning_effort="low"), {"reasoning_effort"}),
    (chat(chat_template_kwargs={"a": 1}), {"chat_template_kwargs"}),
    (chat(messages=[{"role": "user", "content": "hi", "name": "ann"}]), {"name"}),
    (completion(), set()),
    (completion(echo=True), {"echo"}),
    (completion(echo=True, logprobs=1), {"echo", "logprobs", "prompt_logprobs"}),
    (message(), set()),
    (message(top_k=3, temperature=0.5, stop_sequences=["x"]), {"top_k", "temperature", "stop"}),
    (message(thinking={"type": "enabled", "budget_tokens": 1_024}), {"reasoning_effort"}),
    (message(tools=[{"name": "now", "input_schema": {"type": "object"}}]), {"tools"}),
    (response(), set()),
    (response(top_logprobs=1), {"logprobs"}),
    (response(include=["message.output_text.logprobs"]), {"logprobs"}),
    (response(text={"format": SCHEMA}), {"response_format"}),
    (response(reasoning={"effort": "low"}, temperature=0), {"reasoning_effort", "temperature"}),
    (rpc(), {"stream"}),
    (rpc(sampling=pb.Sampling(seed=0, temperature=0.0)), {"stream", "seed", "temperature"}),
    (rpc(stop=["x"], logprobs=0, choices=2, deterministic=True), {"stream", "stop", "logprobs", "n", "deterministic"}),
    (rpc(logit_bias={5: 1.0}), {"stream", "logit_bias"}),
    (rpc(priority=pb.PRIORITY_LOW, prompt_cache_key="k"), {"stream", "service_tier", "prompt_cache_key"}),
    (rpc(conversation=arguments()), {"stream", "chat_template_kwargs", "tools", "name"}),
    (rpc(structured_output=pb.StructuredOutput(regex="a")), {"stream", "response_format"}),
    (chat(stream=True), {"stream"}),
    (chat(stream=False), set()),
]


@pytest.mark.parametrize(("request_", "used"), USED, ids=range(len(USED)))
def test_each_api_s_fields_have_the_policy_s_names(request_: GenerateRequest, used: set[str]) -> None:
    """However an API spells a field, the policy knows it by one name; a value that asks for nothing is no use."""
    assert fields_of(request_) == used
    assert used <= {*REQUEST_FIELDS}


def test_what_asks_for_nothing_is_no_use() -> None:
    """False, none, empty and 1 where that is what a request gets anyway, as clients send them."""
    nothing = {"logprobs": False, "n": 1, "stop": [], "tools": [], "seed": None, "service_tier": "auto"}
    nothing |= {"response_format": {"type": "text"}, "deterministic": False, "prompt_cache_key": ""}
    assert fields_of(chat(**nothing)) == frozenset()
    assert fields_of(rpc(choices=1)) == {"stream"}


def test_every_served_field_is_one_of_the_policy_or_known_to_be_none() -> None:
    """A field that OpenAI's API gets is noticed here until somebody says whether a policy can deny it."""
    spelled = {"max_completion_tokens", "top_logprobs", "stop_token_ids", "structured_outputs", "whitespace"}
    spelled |= {name for one in openai._SERVED.values() for name in one if name.startswith("guided_")} | TOOL_FIELDS
    never = {"model", "messages", "prompt", "stream_options", "max_tokens", *openai.END_USER}
    served = frozenset[str]().union(*openai._SERVED.values())
    assert served - {*REQUEST_FIELDS} - spelled == never


def test_vectors_and_embeddings() -> None:
    """A request for vectors uses its dimensions and its priority, has the bytes of its texts, and no roles."""
    body = json.dumps({"model": "m", "input": ["ab", "ö"], "dimensions": 8}).encode()
    content = content_of(openai_embeddings.parse(body, STAMP).request)
    assert content is not None
    assert (content.bytes, content.fields, content.roles) == (4, {"dimensions"}, frozenset())
    ids = pb.EmbedInput(token_ids=pb.TokenIds(ids=[1, 2, 3]))
    content = content_of(to_embed_request(pb.EmbedRequest(model="m", inputs=[ids], priority=pb.PRIORITY_LOW), STAMP))
    assert content is not None
    assert (content.bytes, content.fields) == (12, {"service_tier"})


def test_roles_and_bytes() -> None:
    """Instructions of every API are messages of the role system; a plain prompt is plain; the conversation, the tools
    that it has and the grammar count in bytes."""
    system = [{"role": "developer", "content": "x"}, *CHAT]
    for one in (chat(messages=system), message(system="x"), response(instructions="x")):
        assert _content(one).roles == {"system", "user"}
    assert _content(completion()).roles == {"plain"}
    assert _content(completion(prompt=[1, 2])).bytes == 8
    assert _content(completion(prompt="ö")).bytes == 2
    small = _content(chat()).bytes
    assert _content(chat(tools=[TOOL])).bytes > small
    assert _content(chat(response_format={"type": "json_object"})).bytes == small + len('{"type":"object"}')


def _content(request: GenerateRequest) -> Any:
    return content_of(request)


@pytest.mark.parametrize(
    ("rule", "request_", "kind", "param", "said"),
    [
        ("denied_fields: [stop]", chat(stop="x"), FeatureNotAllowedError, "stop", "field stop"),
        (
            "denied_fields: [stop]",
            message(stop_sequences=["x"]),
            FeatureNotAllowedError,
            "stop_sequences",
            "field stop",
        ),
        ("denied_fields: [seed]", rpc(sampling=pb.Sampling(seed=1)), FeatureNotAllowedError, "sampling.seed", "seed"),
        ("denied_fields: [stream]", chat(stream=True), FeatureNotAllowedError, "stream", "field stream"),
        ("denied_fields: [n]", rpc(choices=2), FeatureNotAllowedError, "choices", "field n"),
        ("denied_fields: [logprobs]", response(top_logprobs=1), FeatureNotAllowedError, "top_logprobs", "logprobs"),
        ("roles: [user]", response(instructions="x"), FeatureNotAllowedError, "input", "messages of the role system"),
        ("roles: [user]", completion(), FeatureNotAllowedError, "prompt", "prompts that are no conversations"),
        ("max_request_bytes: 9", chat(), PayloadTooLargeError, "messages", "bytes of content; this tenant may send"),
    ],
)
async def test_a_denial_names_the_callers_field_and_the_rule(
    stage: Stage, rule: str, request_: GenerateRequest, kind: type[ApplianceError], param: str, said: str
) -> None:
    """The error has the name that the API has for the field, and the rule is there for the audit log; no sandbox was
    asked. Control: without the rule the request is not refused by the policy."""
    stage.grant(f"content: {{{rule}}}")
    life = stage.life(request_)
    with pytest.raises(kind, match=said) as refused, life:
        await collect(Session(life, request_))
    assert (refused.value.param, refused.value.rule) == (param, _rule(rule))
    stage.grant("content: {}")
    life = stage.life(request_)
    with life:
        await life.admit(1)


def _rule(written: str) -> str:
    key = written.partition(":")[0]
    return f"tenants.alpha.content.{key}" + ("[0]" if key == "denied_fields" else "")
