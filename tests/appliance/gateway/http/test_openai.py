"""OpenAI's JSON to a request: fields, defaults, refusals, reports; and arbitrary JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front import request_builder
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import (
    ChatPrompt,
    Finished,
    FinishReason,
    GenerateRequest,
    Operation,
    TextPrompt,
    TokenPrompt,
)
from appliance.gateway.http import openai, unsupported
from appliance.gateway.http.dialect import Parsed
from appliance.gateway.http.openai import parse
from isolation.ipc.messages import Priority
from isolation.ipc.sampling import MAX_TOP_K, Sampling

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
STAMP = Stamp("req_1", None, 99)


def chat(**fields: object) -> Parsed:
    """Parse a chat body with these fields besides the required ones."""
    return parse(Operation.CHAT, json.dumps(CHAT | fields).encode(), STAMP)


def text(**fields: object) -> Parsed:
    """Parse a completion body."""
    return parse(Operation.TEXT_COMPLETION, json.dumps(TEXT | fields).encode(), STAMP)


def test_the_least_chat_request_takes_every_default():
    """Model and one message are enough; the id and the seed are the server's."""
    assert chat().request == GenerateRequest(
        request_id="req_1",
        operation=Operation.CHAT,
        model="m",
        prompt=ChatPrompt(b'{"messages":[{"role":"user","content":"hi"}]}'),
        sampling=Sampling(seed=99),
    )


@pytest.mark.parametrize(
    ("tier", "asked"),
    [("auto", None), ("default", None), ("flex", Priority.LOW), ("priority", Priority.HIGH), (None, None)],
)
def test_a_service_tier_asks_for_a_priority(tier: str | None, asked: Priority | None):
    """OpenAI's tiers mean something here, and are not reported as ignored."""
    parsed = chat(service_tier=tier)
    assert (parsed.request.priority, parsed.ignored) == (asked, ())


def usage_is_told(parsed: Parsed) -> bool:
    """Whether the answer's stream ends with its usage."""
    return len(parsed.make_writer(parsed.request, 0).closing(Finished(FinishReason.STOP, 1, 0, 1))) == 3


def test_every_served_field_arrives():
    """Numbers, stops, limits and flags land where the session reads them."""
    parsed = chat(
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-2,
        frequency_penalty=2,
        seed=-1,
        max_completion_tokens=5,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    request = parsed.request
    assert request.sampling == Sampling(
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        seed=(1 << 64) - 1,
    )
    assert (request.max_tokens, request.stop, request.stop_ids) == (5, ("a", "b"), (1, 2))
    assert (request.ignore_eos, request.logprobs, request.stream) == (True, 3, True)
    assert usage_is_told(parsed) is True
    assert parsed.ignored == ()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("plain", "plain"),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([], ""),
    ],
)
def test_text_parts_are_joined(content, expected):
    """A message of text parts is their text, a line each."""
    prompt = chat(messages=[{"role": "user", "content": content}]).request.prompt
    assert json.loads(prompt.source)["messages"][0]["content"] == expected


def test_roles_and_names_are_passed_and_echoed_fields_reported():
    """``developer`` is a system message to a template; what a client echoes back from an answer does no harm."""
    parsed = chat(
        messages=[
            {"role": "developer", "content": "be brief", "name": "ops"},
            {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "annotations": []},
            {"role": "user", "content": "\u00e9\U0001f600"},
        ]
    )
    assert json.loads(parsed.request.prompt.source)["messages"] == [
        {"role": "system", "content": "be brief", "name": "ops"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "\u00e9\U0001f600"},
    ]
    assert parsed.ignored == ("messages.annotations",)


@pytest.mark.parametrize(
    ("prompt", "expected"), [("hi", TextPrompt("hi")), (["hi"], TextPrompt("hi")), ("", TextPrompt(""))]
)
def test_a_text_prompt_may_stand_in_a_list_of_one(prompt, expected):
    """The SDKs send either."""
    assert text(prompt=prompt).request.prompt == expected


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_a_prompt_of_token_ids(prompt):
    """An array of ids, or a list of one such array."""
    found = text(prompt=prompt).request.prompt
    assert isinstance(found, TokenPrompt)
    assert list(found.token_ids) == [1, 2, 3]
    assert found.token_ids.typecode == "I"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": 4}, 4),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 4, "max_completion_tokens": 4}, 4),
        ({"max_tokens": None, "max_completion_tokens": 4}, 4),
    ],
)
def test_both_spellings_of_the_output_limit(fields, expected):
    """The old name and the new one mean the same."""
    assert chat(**fields).request.max_tokens == expected


@pytest.mark.parametrize(
    ("parser", "fields", "expected"),
    [
        (chat, {}, -1),
        (chat, {"logprobs": False}, -1),
        (chat, {"logprobs": True}, 0),
        (chat, {"logprobs": True, "top_logprobs": 20}, 20),
        (text, {"logprobs": None}, -1),
        (text, {"logprobs": 0}, 0),
        (text, {"logprobs": 5}, 5),
    ],
)
def test_both_endpoints_spellings_of_logprobs(parser, fields, expected):
    """A flag and a number in chat, one number in completions."""
    assert parser(**fields).request.logprobs == expected


@pytest.mark.parametrize(
    ("fields", "attribute", "expected"),
    [
        ({"stop": "a"}, "stop", ("a",)),
        ({"stop": []}, "stop", ()),
        ({"stop": None}, "stop", ()),
        ({"stop_token_ids": None}, "stop_ids", ()),
        ({"n": 1}, "model", "m"),
        ({"n": None, "tools": [], "tool_choice": "none", "logit_bias": {}}, "model", "m"),
        ({"response_format": {"type": "text"}, "modalities": ["text"], "echo": False}, "model", "m"),
    ],
)
def test_values_that_ask_for_nothing_are_taken(fields, attribute, expected):
    """Null, empty and default values of any known field are no reason to refuse."""
    assert getattr(text(**fields).request, attribute) == expected


@pytest.mark.parametrize("parser", [text, chat])
def test_biases_are_taken_in_the_order_of_their_ids(parser):
    """Whole numbers and fractions at both ends of the range, of both routes; an id with a bias of 0 has none, and where
    none is left the request has no biases at all."""
    bias = parser(logit_bias={"300": -100, "7": 0.5, "9": 0, "0": 100}).request.logit_bias
    assert (list(bias.ids), list(bias.values)) == ([0, 7, 300], [100, 0.5, -100])
    assert len(parser(logit_bias={str(number): 1 for number in range(300)}).request.logit_bias) == 300
    assert parser(logit_bias={"9": 0}).request.logit_bias is None


def test_small_temperatures_are_greedy_and_minus_one_keeps_all():
    """Numbers at the edge become what they mean."""
    sampling = text(temperature=1e-9, top_k=-1).request.sampling
    assert (sampling.temperature, sampling.top_k) == (0.0, 0)


def test_unknown_fields_are_reported_in_order():
    """What has no effect is named once, whatever its value; nulls are nothing."""
    parsed = text(verbosity="low", metadata={"a": 1}, prediction=None, zzz=[1])
    assert parsed.ignored == ("verbosity", "metadata", "zzz")
    streamed = chat(stream=True, stream_options={"include_obfuscation": False})
    assert (streamed.ignored, usage_is_told(streamed)) == (("stream_options.include_obfuscation",), False)


REFUSED_CHAT = [
    ("n", {"n": 0}),
    ("n", {"n": 17}),
    ("n", {"n": 2, "max_tokens": 1 << 20}),
    ("deterministic", {"deterministic": 1}),
    ("n", {"n": True}),
    ("n", {"n": "1"}),
    ("echo", {"echo": True}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ("best_of", {"best_of": 2}),
    ("functions", {"functions": [{}]}),
    ("logit_bias", {"logit_bias": {"1": 100.5}}),
    ("logit_bias", {"logit_bias": {"1": -101}}),
    ("logit_bias", {"logit_bias": {"1": True}}),
    ("logit_bias", {"logit_bias": {"1": None}}),
    ("logit_bias", {"logit_bias": {"01": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {" 1": 1}}),
    ("logit_bias", {"logit_bias": {"\u0661": 1}}),
    ("logit_bias", {"logit_bias": {"4294967296": 1}}),
    ("logit_bias", {"logit_bias": {"9" * 400: 1}}),
    ("logit_bias", {"logit_bias": {str(number): 0 for number in range(301)}}),
    ("logit_bias", {"logit_bias": [1, 2]}),
    ("audio", {"audio": {"voice": "a"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("moderation", {"moderation": {"mode": "block"}}),
    ("chat_template", {"chat_template": "{{ x }}"}),
    ("chat_template_kwargs", {"chat_template_kwargs": []}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a": {}}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a": None}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a": "x" * 1_025}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a": 10**2_000}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a": "\ud800"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {str(number): 1 for number in range(17)}}),
    ("add_generation_prompt", {"add_generation_prompt": 0}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": 10**400}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.01}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 1.0}),
    ("top_k", {"top_k": 1 << 40}),
    ("min_p", {"min_p": 1.5}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("seed", {"seed": 1 << 64}),
    ("seed", {"seed": 0.5}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1 << 62}),
    ("max_tokens", {"max_tokens": "many"}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_tokens", {"max_tokens": 1, "max_completion_tokens": 2}),
    ("stop", {"stop": 5}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop", {"stop": ["x" * 257]}),
    ("stop", {"stop": ["\ud800"]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("service_tier", {"service_tier": "first"}),
    ("service_tier", {"service_tier": 1}),
    ("stop_token_ids", {"stop_token_ids": [True]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 65}),
    ("stop_token_ids", {"stop_token_ids": "1"}),
    ("logprobs", {"logprobs": 1}),
    ("top_logprobs", {"top_logprobs": 1}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("stream", {"stream": 1}),
    ("ignore_eos", {"ignore_eos": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": []}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("model", {"model": None}),
    ("model", {"model": ""}),
    ("model", {"model": "a b"}),
    ("model", {"model": "x" * 257}),
    ("model", {"model": 5}),
    ("messages", {"messages": None}),
    ("messages", {"messages": "hi"}),
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "user", "content": "x"}] * 1_025}),
    ("messages[0]", {"messages": ["hi"]}),
    ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
    ("messages[0].role", {"messages": [{"role": ["user"], "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1_025}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": ["x"]}]}),
    ("messages[0].name", {"messages": [{"role": "user", "content": "x", "name": 1}]}),
    ("messages[0].name", {"messages": [{"role": "user", "content": "x", "name": "n" * 65}]}),
    ("messages", {"messages": [{"role": "user", "content": "\udfff"}]}),
]

REFUSED_TEXT = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": []}),
    ("prompt[1]", {"prompt": ["a", 2]}),
    ("prompt[1]", {"prompt": [[1], []]}),
    ("stream", {"prompt": ["a", "b"], "stream": True}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": [1, "a"]}),
    ("prompt", {"prompt": [1, 2.0]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [1 << 31]}),
    ("prompt", {"prompt": [1 << 80]}),
    ("prompt", {"prompt": {"text": "a"}}),
    ("prompt", {"prompt": "\ud800"}),
    ("prompt_logprobs", {"echo": True, "logprobs": 1, "prompt_logprobs": 2}),
    ("suffix", {"suffix": "x"}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": True}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED_CHAT)
def test_chat_refusals_name_the_field(param, fields):
    """Each value out of range, of a wrong type or of an unsupported feature is a 400 that says where."""
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(("param", "fields"), REFUSED_TEXT)
def test_completion_refusals_name_the_field(param, fields):
    """The same for completions."""
    with pytest.raises(InvalidRequestError) as caught:
        text(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"null", b"{", b'{"model": NaN}', b'{"a":1,"a":2}', b"\xff"])
def test_bodies_that_are_no_object_are_refused(body):
    """Anything but one well-formed object is a 400."""
    with pytest.raises(InvalidRequestError):
        parse(Operation.CHAT, body, STAMP)


def test_a_prompt_longer_than_the_text_sandbox_takes_is_refused():
    """The protocol's bound on a source holds before anything is sent."""
    with pytest.raises(InvalidRequestError):
        text(prompt="x" * (request_builder.MAX_SOURCE_BYTES + 1))


NAMES = st.sampled_from(
    sorted({*unsupported.FIELDS, *openai._SERVED[Operation.CHAT], *openai._SERVED[Operation.TEXT_COMPLETION], "user"})
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["user", "assistant", "text", "none", "a", ""])
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(operation=st.sampled_from(Operation), fields=st.dictionaries(NAMES, JSON, max_size=6), base=st.booleans())
@settings(max_examples=400, deadline=None)
def test_arbitrary_json_gives_a_request_in_range_or_the_one_error(operation, fields, base):
    """Whatever JSON comes in, out comes a request within every bound of the wire, or InvalidRequestError."""
    least = CHAT if operation is Operation.CHAT else TEXT
    document = (least | fields) if base else fields
    try:
        body = json.dumps(document).encode()
        request = parse(operation, body, STAMP).request
    except InvalidRequestError:
        return
    sampling = request.sampling
    assert 0 <= sampling.temperature <= 2
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.top_k <= MAX_TOP_K
    assert 0 <= sampling.seed < 1 << 64
    assert -1 <= request.logprobs <= request_builder.MAX_TOP_LOGPROBS
    assert request.max_tokens is None or 1 <= request.max_tokens <= request_builder.MAX_OUTPUT_TOKENS
    assert len(request.stop) <= request_builder.MAX_STOP_STRINGS
    assert request.request_id == "req_1"
