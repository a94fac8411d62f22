"""The gRPC front end over a real socket: events, refusals, cancellation, health, reflection."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from google.rpc import error_details_pb2 as details
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from appliance.common.errors import ContextLengthError, RateLimitedError, UnavailableError
from appliance.gateway.front.auth import Auth, Resolver
from appliance.gateway.front.request_builder import MAX_BODY_BYTES
from appliance.gateway.generate_request import (
    ChatPrompt,
    ChoiceFinished,
    Delta,
    Finished,
    FinishReason,
    PromptToken,
    PromptTokens,
    Started,
    TextPrompt,
)
from appliance.gateway.grpc.batch_calls import BATCH_SERVICE
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from appliance.gateway.grpc.servicer import HEALTH, REFLECTION, SERVICE, GrpcFrontEnd
from isolation.ipc.messages import Priority
from isolation.ipc.sampling import Sampling
from tests.appliance.gateway.front.support import MODEL, logprob_script, serving, text_script
from tests.appliance.gateway.grpc.grpc_client import ask, detail_of, drained, proof_of, refused


async def test_generate(running, channel):
    """Started, deltas, Finished; the id in the metadata is the one in the event and in the session."""
    call = InferenceServiceStub(channel).Generate(ask(), metadata=proof_of(running))
    metadata = dict(await call.initial_metadata())
    events = await drained(call)
    assert [event.WhichOneof("event") for event in events] == ["started", "delta", "delta", "finished"]
    assert metadata["x-request-id"] == events[0].started.request_id == running.service.requests[0].request_id
    assert (events[0].started.input_tokens, events[0].started.cached_input_tokens) == (7, 3)
    assert "".join(event.delta.text for event in events) == "Hello"
    assert [list(event.delta.token_ids) for event in events[1:3]] == [[0], [1]]
    finished = events[-1].finished
    assert finished.reason == pb.FINISH_REASON_STOP
    assert (finished.usage.input_tokens, finished.usage.output_tokens) == (7, 2)
    assert not finished.HasField("stop")


async def test_logprobs(running, channel):
    """Bytes of partial characters and alternatives arrive as they are."""
    running.service.script = logprob_script()
    events = await drained(InferenceServiceStub(channel).Generate(ask(logprobs=2), metadata=proof_of(running)))
    entries = [entry for event in events for entry in event.delta.logprobs]
    assert [entry.text for entry in entries] == [b"a", b"\xc3", b"\xa9"]
    assert [entry.logprob for entry in entries[0].top] == [-0.5, -1.5]
    assert running.service.requests[0].logprobs == 2


async def test_absent_fields_mean_their_documented_defaults(running, channel):
    """Nothing given: the defaults of the wire, not zeros; zero given: zero."""
    stub = InferenceServiceStub(channel)
    await drained(stub.Generate(ask(), metadata=proof_of(running)))
    bare = running.service.requests[0]
    assert bare.sampling == Sampling(seed=bare.sampling.seed)
    assert (bare.max_tokens, bare.logprobs, bare.stop, bare.ignore_eos) == (None, -1, (), False)
    given = pb.Sampling(temperature=0, top_k=5, top_p=0.5, min_p=0.25, seed=0, repetition_penalty=2)
    given.presence_penalty, given.frequency_penalty = -1, 1
    request = ask(
        sampling=given, max_output_tokens=9, logprobs=0, stop=["x"], stop_token_ids=[4], ignore_eos=True, priority=3
    )
    await drained(stub.Generate(request, metadata=proof_of(running)))
    full = running.service.requests[1]
    assert full.sampling == Sampling(
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=2.0,
        presence_penalty=-1.0,
        frequency_penalty=1.0,
        seed=0,
    )
    assert (full.max_tokens, full.logprobs, full.stop, full.stop_ids) == (9, 0, ("x",), (4,))
    assert (bare.priority, full.priority) == (None, Priority.LOW)
    assert full.ignore_eos is True


async def test_the_three_inputs(running, channel):
    """A conversation gives the same prompt as over HTTP; text and ids are taken as they are."""
    stub = InferenceServiceStub(channel)
    turns = [pb.ChatMessage(role=pb.ROLE_SYSTEM, content="s", name="n"), pb.ChatMessage(role=pb.ROLE_USER, content="u")]
    for fields in (
        {"conversation": pb.Conversation(messages=turns)},
        {"text": "\u00e9"},
        {"token_ids": pb.TokenIds(ids=[1, 2])},
    ):
        await drained(stub.Generate(ask(**fields), metadata=proof_of(running)))
    prompts = [request.prompt for request in running.service.requests]
    assert prompts[0] == ChatPrompt(
        b'{"messages":[{"role":"system","content":"s","name":"n"},{"role":"user","content":"u"}]}'
    )
    assert prompts[1] == TextPrompt("\u00e9")
    assert list(prompts[2].token_ids) == [1, 2]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("model", {"model": ""}),
        ("model", {"model": "a b"}),
        ("input", {"text": None}),
        ("conversation.messages", {"conversation": pb.Conversation()}),
        ("conversation.messages[0].role", {"conversation": pb.Conversation(messages=[pb.ChatMessage(content="x")])}),
        ("token_ids.ids", {"token_ids": pb.TokenIds()}),
        ("token_ids.ids", {"token_ids": pb.TokenIds(ids=[1 << 31])}),
        ("sampling.temperature", {"sampling": pb.Sampling(temperature=float("nan"))}),
        ("sampling.temperature", {"sampling": pb.Sampling(temperature=float("inf"))}),
        ("sampling.temperature", {"sampling": pb.Sampling(temperature=-1)}),
        ("sampling.top_p", {"sampling": pb.Sampling(top_p=0)}),
        ("sampling.top_k", {"sampling": pb.Sampling(top_k=1 << 31)}),
        ("sampling.repetition_penalty", {"sampling": pb.Sampling(repetition_penalty=0)}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("max_output_tokens", {"max_output_tokens": (1 << 32) - 1}),
        ("logprobs", {"logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("choices", {"choices": 0}),
        ("choices", {"choices": 17}),
        ("choices", {"choices": 16, "max_output_tokens": 1 << 20}),
        ("priority", {"priority": 4}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": ["x"] * 17}),
        ("stop_token_ids", {"stop_token_ids": [1 << 31]}),
        ("stop_token_ids", {"stop_token_ids": [1] * 65}),
        ("logit_bias", {"logit_bias": {1: 100.5}}),
        ("logit_bias", {"logit_bias": {1: float("nan")}}),
        ("logit_bias", {"logit_bias": {1 << 31: 1}}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(301), 1.0)}),
    ],
)
async def test_bad_fields_are_named(running, channel, field, fields):
    """INVALID_ARGUMENT with the field's path in BadRequest, before any session begins."""
    request = ask(**fields)
    if field == "input":
        request.ClearField("text")
    error = await refused(InferenceServiceStub(channel).Generate(request, metadata=proof_of(running)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail_of(error, details.BadRequest).field_violations[0].field == field
    assert detail_of(error, details.ErrorInfo).domain == "athanor"
    assert detail_of(error, details.RequestInfo).request_id.startswith("req_")
    assert running.service.requests == []
    assert running.service.refusals[0][2] == "acme"


@pytest.mark.parametrize("body", [b"\xff", b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x7f", b"\x00" * 50])
async def test_malformed_messages_are_the_callers_fault(running, channel, body):
    """Garbage, strings that are not UTF-8, forged lengths: INVALID_ARGUMENT, not INTERNAL."""
    call = channel.unary_stream(f"/{SERVICE}/Generate")(body, metadata=proof_of(running))
    error = await refused(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_oversize_messages_are_refused(running, channel):
    """A message over the limit is not read; one just under it is a valid request."""
    stub = InferenceServiceStub(channel)
    error = await refused(stub.Generate(ask(text="x" * (MAX_BODY_BYTES + (1 << 20))), metadata=proof_of(running)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await drained(stub.Generate(ask(text="x" * MAX_BODY_BYTES), metadata=proof_of(running)))
    assert len(running.service.requests) == 1


async def test_metadata_floods_are_refused(running, channel):
    """Headers beyond the limit end the call, far beyond it the connection; the next call is served."""
    stub = InferenceServiceStub(channel)
    for count, code in ((40, grpc.StatusCode.RESOURCE_EXHAUSTED), (100, grpc.StatusCode.UNAVAILABLE)):
        flood = tuple((f"x-{i}", "v" * 1_000) for i in range(count))
        error = await refused(stub.Generate(ask(), metadata=proof_of(running) + flood))
        assert error.code() is code
        assert await drained(stub.Generate(ask(), metadata=proof_of(running)))


def _every_method() -> dict[str, Auth]:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(_methods())
    finally:
        loop.close()


async def _methods() -> dict[str, Auth]:
    return GrpcFrontEnd(None, Resolver(None, lambda: None)).methods()  # type: ignore[arg-type]


@pytest.mark.parametrize("proof", ["none", "wrong", "two", "right"])
@pytest.mark.parametrize(("method", "auth"), [*_every_method().items(), ("/athanor.v9.Admin/Drop", Auth.TENANT)])
async def test_every_method_without_and_with_a_wrong_key(running, channel, method, auth, proof):
    """Only the health check answers strangers; an unknown method is unknown to tenants alone."""
    metadata = {
        "none": (),
        "wrong": (("authorization", "Bearer ath_acme-1_" + "0" * 64),),
        "two": proof_of(running) * 2,
        "right": proof_of(running),
    }[proof]
    # One message with the call, whatever kind it is: of one that is written after the refusal came, the client itself
    # makes an internal error.
    call = channel.unary_stream(method)(b"", metadata=metadata)
    if method.endswith(("/Watch", "/WatchUsage")) and proof == "right":
        assert await call.read() is not grpc.aio.EOF
        call.cancel()
        return
    try:
        await drained(call)
        code = grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        code = error.code()
    if auth is Auth.PUBLIC:
        assert code is grpc.StatusCode.OK
    elif proof != "right":
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert running.service.requests == []
    elif method.endswith("/Drop"):
        assert code is grpc.StatusCode.UNIMPLEMENTED
    elif BATCH_SERVICE in method:
        assert code is grpc.StatusCode.PERMISSION_DENIED, "nothing is kept here"
    else:
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)


@pytest.mark.parametrize(
    "error",
    [
        RateLimitedError("slow down", retry_after_s=1.5, details={"limit_requests_per_minute": "60"}),
        ContextLengthError("too long", param="conversation.messages"),
        UnavailableError("booting", retry_after_s=2.0),
    ],
)
@pytest.mark.parametrize("late", [False, True])
async def test_session_errors_keep_their_details(running, channel, error, late):
    """Before the first event or after some: status, reason, retry time, and the session's own request id."""
    running.service.script = [*text_script("a")[:2], error] if late else [error]
    caught = await refused(InferenceServiceStub(channel).Generate(ask(), metadata=proof_of(running)))
    assert caught.code().name == error.wire.grpc
    assert caught.details() == error.message
    assert detail_of(caught, details.ErrorInfo).reason == error.wire.reason
    assert dict(detail_of(caught, details.ErrorInfo).metadata) == error.details
    assert detail_of(caught, details.RequestInfo).request_id == running.service.requests[0].request_id
    retry = detail_of(caught, details.RetryInfo)
    assert (retry.retry_delay.ToMilliseconds() / 1000 if retry else None) == error.retry_after_s
    assert running.service.refusals == []


async def test_an_unknown_model_names_the_resource(running, channel):
    """NOT_FOUND with ResourceInfo."""
    caught = await refused(InferenceServiceStub(channel).Generate(ask(model="nope"), metadata=proof_of(running)))
    assert caught.code() is grpc.StatusCode.NOT_FOUND
    assert detail_of(caught, details.ResourceInfo).resource_name == "nope"


async def test_a_defect_shows_its_id_and_nothing_else(running, channel, capsys):
    """The client sees INTERNAL and the request id; the log has the kind and the place, not the text."""
    running.service.script = [Started(1, 0), ValueError("secret detail")]
    caught = await refused(InferenceServiceStub(channel).Generate(ask(), metadata=proof_of(running)))
    request_id = running.service.requests[0].request_id
    assert caught.code() is grpc.StatusCode.INTERNAL
    assert request_id in caught.details()
    logged = capsys.readouterr().out
    assert request_id in logged
    assert "ValueError" in logged
    assert "secret" not in logged + caught.details()


async def test_a_traceparent_is_passed_on(running, channel):
    """The caller's trace goes on."""
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    metadata = (*proof_of(running), ("traceparent", parent))
    await drained(InferenceServiceStub(channel).Generate(ask(), metadata=metadata))
    assert running.service.contexts[0].traceparent == parent
    assert running.service.contexts[0].route == f"/{SERVICE}/Generate"


async def test_models(running, channel):
    """Names, contexts, and the digest of files where it is known."""
    answer = await InferenceServiceStub(channel).ListModels(pb.ListModelsRequest(), metadata=proof_of(running))
    found = [(model.name, model.max_context_tokens, model.digest) for model in answer.models]
    assert found == [(MODEL, 4096, "ab" * 32), ("org/other", 8192, "")]


async def test_one_model(running, channel):
    """One of those by its name; another's name is NOT_FOUND with the resource."""
    stub, proof = InferenceServiceStub(channel), proof_of(running)
    answer = await stub.GetModel(pb.GetModelRequest(model="org/other"), metadata=proof)
    assert (answer.model.name, answer.model.max_context_tokens) == ("org/other", 8192)
    error = await refused(stub.GetModel(pb.GetModelRequest(model="nope"), metadata=proof))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert detail_of(error, details.ResourceInfo).resource_name == "nope"


async def test_tokens_are_counted(running, channel):
    """A text's and a conversation's tokens, with their ids where asked for, and the request's id in the metadata."""
    stub, proof = InferenceServiceStub(channel), proof_of(running)
    call = stub.CountTokens(pb.CountTokensRequest(model=MODEL, text="hi", include_token_ids=True), metadata=proof)
    answer = await call
    assert (answer.input_tokens, list(answer.token_ids.ids), answer.max_context_tokens) == (2, [104, 105], 4096)
    assert dict(await call.initial_metadata())["x-request-id"] == answer.request_id
    conversation = pb.Conversation(messages=[pb.ChatMessage(role=pb.ROLE_USER, content="hi")])
    answer = await stub.CountTokens(pb.CountTokensRequest(model=MODEL, conversation=conversation), metadata=proof)
    assert answer.input_tokens == len('{"messages":[{"role":"user","content":"hi"}]}') and not answer.token_ids.ids
    assert running.service.contexts[0].route == f"/{SERVICE}/CountTokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": MODEL}, "input"),
        ({"model": "", "text": "a"}, "model"),
        ({"model": MODEL, "conversation": pb.Conversation()}, "conversation.messages"),
    ],
)
async def test_what_cannot_be_counted_is_named(running, channel, fields, param):
    """INVALID_ARGUMENT with the field's path."""
    call = InferenceServiceStub(channel).CountTokens(pb.CountTokensRequest(**fields), metadata=proof_of(running))
    error = await refused(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [one.field for one in detail_of(error, details.BadRequest).field_violations] == [param]


async def test_health_follows_readiness(running, channel):
    """Check needs no credential and changes with the gateway's word; an unknown service is NOT_FOUND."""
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    error = await refused(stub.Check(health_pb2.HealthCheckRequest(service="nope")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), metadata=proof_of(running))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    running.ready[0] = False
    async with asyncio.timeout(20):
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()


@pytest.mark.parametrize("service", REFLECTION)
async def test_reflection_lists_and_describes(running, channel, service):
    """Both versions of reflection name our service and give its file."""
    call = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(metadata=proof_of(running))
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {entry.name for entry in (await call.read()).list_services_response.service}
    assert SERVICE in names
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
    files = (await call.read()).file_descriptor_response.file_descriptor_proto
    assert any(b"athanor/inference/v1/inference.proto" in file for file in files)
    await call.done_writing()


async def test_a_stranger_is_refused_before_its_message(running, channel):
    """No message is needed to be told UNAUTHENTICATED, so none is read from a stranger."""
    call = channel.stream_stream(f"/{SERVICE}/Generate")()
    async with asyncio.timeout(20):
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_strangers_calls_are_bounded_by_address(monkeypatch):
    """Whoever opens health checks and says nothing is refused more of them, while tenants at the same address are
    served; once they are gone the next one is answered."""
    monkeypatch.setattr("appliance.gateway.grpc.servicer.STRANGER_CALLS", 2)
    async with serving() as running, grpc.aio.insecure_channel(running.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        silent = await _two_accepted([channel.stream_stream(f"/{HEALTH}/Check")() for _ in range(3)])
        error = await refused(stub.Check(health_pb2.HealthCheckRequest()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail_of(error, details.RetryInfo).retry_delay.ToMilliseconds() > 0
        assert await drained(InferenceServiceStub(channel).Generate(ask(), metadata=proof_of(running)))
        for call in silent:
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_tenants_calls_are_bounded(monkeypatch):
    """One that opens calls without an end is refused more of them, and others are served meanwhile."""
    monkeypatch.setattr("appliance.gateway.grpc.servicer.TENANT_CALLS", 2)
    async with serving() as running, grpc.aio.insecure_channel(running.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), metadata=proof_of(running)) for _ in range(2)]
        for watch in watches:
            assert await watch.read() is not grpc.aio.EOF
        generate = InferenceServiceStub(channel).Generate
        error = await refused(generate(ask(), metadata=proof_of(running)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert running.service.requests == []
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        watches[0].cancel()
        async with asyncio.timeout(20):
            while not running.service.requests:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await drained(generate(ask(), metadata=proof_of(running)))
        watches[1].cancel()


async def test_two_hundred_streams_on_one_channel(running, channel):
    """All of them have begun before the first one ends, and each has its whole answer."""
    end = asyncio.Event()
    first, *others = text_script("Hel", "lo")
    running.service.script = [first, end, *others]
    generate = InferenceServiceStub(channel).Generate
    calls = [aiter(generate(ask(), metadata=proof_of(running))) for _ in range(200)]
    async with asyncio.timeout(60):
        begun = await asyncio.gather(*(anext(call) for call in calls))
        assert len(running.service.requests) == 200 and not running.service.closed.is_set()
        end.set()
        rest = await asyncio.gather(*(drained(call) for call in calls))
    assert {event.WhichOneof("event") for event in begun} == {"started"}
    assert {"".join(event.delta.text for event in events) for events in rest} == {"Hello"}
    assert len({event.started.request_id for event in begun}) == 200


async def _two_accepted(calls):
    """The calls that stay open where a third is refused: once one has ended, the bound is full."""
    ends = [asyncio.ensure_future(call.code()) for call in calls]
    async with asyncio.timeout(20):
        (ended,), _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    assert ended.result() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return [call for call, end in zip(calls, ends, strict=True) if end is not ended]


async def test_a_call_without_its_message_is_refused(running, channel):
    """A tenant's call that ends before any message is its own mistake."""
    call = channel.stream_stream(f"/{SERVICE}/Generate")(metadata=proof_of(running))
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_several_choices(running, channel):
    """Deltas and ends carry the choice they belong to."""
    running.service.script = [
        Started(5, 0),
        Delta("x", (2,), choice=1),
        ChoiceFinished(1, FinishReason.STOP, "end"),
        Delta("b", (4,), choice=0),
        Finished(FinishReason.LENGTH, 5, 0, 2, choice=0),
    ]
    events = await drained(InferenceServiceStub(channel).Generate(ask(choices=2), metadata=proof_of(running)))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", "delta", "choice_finished", "delta", "finished"]
    assert (events[1].delta.choice, events[3].delta.choice) == (1, 0)
    ended = events[2].choice_finished
    assert (ended.choice, ended.reason, ended.stop) == (1, pb.FINISH_REASON_STOP, "end")
    assert (events[4].finished.choice, events[4].finished.usage.output_tokens) == (0, 2)
    assert running.service.requests[0].choices == 2


async def test_logit_bias(running, channel):
    """Biases come by rising id, and there are none where the message has none."""
    for given in ({9: -100.0, 7: 0.5}, {}):
        await drained(InferenceServiceStub(channel).Generate(ask(logit_bias=given), metadata=proof_of(running)))
    biased, plain = (request.logit_bias for request in running.service.requests)
    assert (list(biased.ids), list(biased.values), plain) == ([7, 9], [0.5, -100.0], None)


async def test_prompt_logprobs(running, channel):
    """The prompt's tokens come in one event; the first one has no number."""
    tokens = (PromptToken(1, b"a", None), PromptToken(2, b"\xc3", -0.5, ((3, b"b", -0.25),)))
    running.service.script = [Started(2, 0), PromptTokens("", tokens), Finished(FinishReason.STOP, 2, 0, 0)]
    events = await drained(InferenceServiceStub(channel).Generate(ask(prompt_logprobs=1), metadata=proof_of(running)))
    assert [event.WhichOneof("event") for event in events] == ["started", "prompt", "finished"]
    first, second = events[1].prompt.tokens
    assert (first.token_id, first.text, first.HasField("logprob")) == (1, b"a", False)
    assert (second.text, second.logprob, second.top[0].token_id) == (b"\xc3", -0.5, 3)
    assert running.service.requests[0].prompt_logprobs == 1
