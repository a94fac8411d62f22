"""/v1/batches with the official client: from the file to the results, over a scripted service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.common.errors import FeatureNotAllowedError, RateLimitedError, UnauthenticatedError, UnavailableError
from appliance.gateway.batches import line_calls, room, runner
from appliance.gateway.generate_request import ChoiceFinished, Delta, Finished, FinishReason, Started
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.operator_drain import OperatorDrain
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.tenant_sandboxes import TenantSandboxes
from isolation.ipc.messages import Priority
from policy.loader import Source, load_policy
from tests.appliance.gateway.batches.stack import POLICY, Stack, stacked, until
from tests.appliance.gateway.front.support import MODEL, text_script

DAY_S = 86_400


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack of its own."""
    async with stacked(tmp_path) as made:
        yield made


def line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    """One line."""
    asked: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": custom_id}]},
        "/v1/completions": {"prompt": custom_id},
        "/v1/responses": {"input": custom_id},
        "/v1/embeddings": {"input": custom_id},
        "/v1/rerank": {"query": custom_id, "documents": ["long", "longer"]},
        "/v1/score": {"text_1": custom_id, "text_2": ["long", "longer"]},
        "/v1/classify": {"input": [custom_id]},
    }[url]
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **asked, **body}}


async def begin(client: openai.AsyncOpenAI, lines: list[Any], url: str = "/v1/chat/completions", **fields: Any) -> Any:
    """A new batch of these lines."""
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    file = await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **fields)


async def results(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    """Lines of a file of results."""
    assert file is not None
    return [json.loads(text) for text in (await client.files.content(file)).read().splitlines()]


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
async def test_a_batch_of_each_route(stack: Stack, url: str) -> None:
    """Each line's answer has the form of its route, in the file's order; lines are requests with low priority."""
    client = stack.openai()
    batch = await begin(client, [line(f"l-{number}", url) for number in range(20)], url, metadata={"team": "blue"})
    assert (batch.status, batch.object, batch.completion_window) == ("validating", "batch", "24h")
    assert batch.expires_at == batch.created_at + DAY_S
    done = await stack.ended(client, batch.id, "completed", "failed")
    assert (done.status, done.errors, done.error_file_id, done.metadata) == ("completed", None, None, {"team": "blue"})
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    found = await results(client, done.output_file_id)
    assert [one["custom_id"] for one in found] == [f"l-{number}" for number in range(20)]
    for one in found:
        response = one["response"]
        assert (one["error"], response["status_code"]) == (None, 200)
        if url == "/v1/chat/completions":
            assert response["body"]["choices"][0]["message"]["content"] == "Hello"
        elif url == "/v1/completions":
            assert response["body"]["choices"][0]["text"] == "Hello"
        elif url == "/v1/embeddings":
            assert len(response["body"]["data"][0]["embedding"]) == 3
        else:
            assert response["body"]["output"][0]["content"][0]["text"] == "Hello"
    asked = stack.service.embeds if url == "/v1/embeddings" else stack.service.requests
    assert {one.priority for one in asked} == {Priority.LOW}
    assert {one.request_id for one in asked} == {f"{batch.id}-{number}" for number in range(1, 21)}
    assert {one.front_end for one in stack.service.contexts} == {"batch"}
    assert {one.credential for one in stack.service.principals} == {"key:acme-1"}
    assert [one.id async for one in client.batches.list()] == [batch.id]
    output = await client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


@pytest.mark.parametrize("url", ["/v1/rerank", "/v1/score", "/v1/classify"])
async def test_scores_are_lines(stack: Stack, url: str) -> None:
    """Each line's answer is its route's; a wrong line (control) has the route's error."""
    client = stack.openai()
    batch = await begin(client, [line("ab", url), line("cd", url, model=None), line("x", url, user=7)], url)
    failed = await stack.ended(client, batch.id, "failed")
    assert [(one.line, one.code) for one in failed.errors.data] == [(2, "missing_model")]
    batch = await begin(client, [line("ab", url), line("x", url, user=7)], url)
    done = await stack.ended(client, batch.id, "completed")
    (found,), (wrong,) = await results(client, done.output_file_id), await results(client, done.error_file_id)
    assert (wrong["response"]["status_code"], wrong["response"]["body"]["error"]["param"]) == (400, "user")
    body = found["response"]["body"]
    if url == "/v1/rerank":
        ranked = [(one["index"], one["document"]["text"]) for one in body["results"]]
        assert (ranked, body["usage"]["prompt_tokens"]) == ([(1, "longer"), (0, "long")], 12)
    elif url == "/v1/score":
        assert ([one["score"] for one in body["data"]], body["usage"]["total_tokens"]) == ([0.04, 0.06], 12)
    else:
        assert [(one["label"], one["num_classes"]) for one in body["data"]] == [("long", 2)]
    (asked,) = stack.service.scored
    assert (asked.request_id, asked.priority) == (f"{batch.id}-1", Priority.LOW)


async def test_a_file_with_mistakes_fails_with_their_lines(stack: Stack) -> None:
    """Each kind of mistake with the number of its line; no line runs. An empty file has one problem of its own."""
    client = stack.openai()
    wrong = [
        line("a"),
        "{not json",
        "",
        "[]",
        line("a"),
        line("") | {"custom_id": 7},
        line("b") | {"method": "GET"},
        line("c", "/v1/completions"),
        line("d") | {"body": []},
        line("e") | {"body": {}},
        line("f", stream=True),
    ]
    batch = await begin(client, wrong)
    failed = await stack.ended(client, batch.id, "failed")
    assert [(one.line, one.code, one.param) for one in failed.errors.data] == [
        (2, "invalid_json_line", None),
        (4, "invalid_json_line", None),
        (5, "duplicate_custom_id", "custom_id"),
        (6, "invalid_custom_id", "custom_id"),
        (7, "invalid_method", "method"),
        (8, "mismatched_url", "url"),
        (9, "invalid_body", "body"),
        (10, "missing_model", "body.model"),
        (11, "invalid_body", "body.stream"),
    ]
    assert (failed.output_file_id, failed.error_file_id, stack.service.requests) == (None, None, [])
    assert failed.failed_at is not None
    empty = await begin(client, ["", "  "])
    problems = (await stack.ended(client, empty.id, "failed")).errors.data
    assert [(one.code, one.line) for one in problems] == [("empty_file", None)]


async def test_a_line_with_several_texts_or_outputs(stack: Stack) -> None:
    """An array of texts to embed, and ``n`` outputs, are one request of the line, with the usage of all."""
    client = stack.openai()
    batch = await begin(client, [line("e", "/v1/embeddings", input=["a", "bcd"])], "/v1/embeddings")
    done = await stack.ended(client, batch.id, "completed")
    (found,) = await results(client, done.output_file_id)
    body = found["response"]["body"]
    assert ([one["index"] for one in body["data"]], body["usage"]["prompt_tokens"]) == ([0, 1], 4)
    (asked,) = stack.service.embeds
    assert (asked.request_id, len(asked.inputs)) == (f"{batch.id}-1", 2)
    ends = [ChoiceFinished(1, FinishReason.STOP), Finished(FinishReason.STOP, 3, 0, 4)]
    stack.service.script = [Started(3, 0), Delta("a"), Delta("b", choice=1), *ends]
    done = await stack.ended(client, (await begin(client, [line("n", n=2)])).id, "completed")
    (found,) = await results(client, done.output_file_id)
    choices, used = found["response"]["body"]["choices"], found["response"]["body"]["usage"]
    assert [one["message"]["content"] for one in choices] == ["a", "b"]
    assert (used["prompt_tokens"], used["completion_tokens"]) == (3, 4)
    assert len(stack.service.requests) == 1


async def test_errors_of_lines_are_typed_and_apart(stack: Stack) -> None:
    """A line that its route refuses, and one of a model that is not there: in the file of errors, with the status and
    body that the route would have answered; the others (control) are answered."""
    client = stack.openai()
    lines = [line("good"), line("bad", temperature="hot"), line("other", model="none"), line("good too")]
    done = await stack.ended(client, (await begin(client, lines)).id, "completed")
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 2)
    assert [one["custom_id"] for one in await results(client, done.output_file_id)] == ["good", "good too"]
    bad, other = await results(client, done.error_file_id)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    assert (other["response"]["status_code"], other["response"]["body"]["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "error", [RateLimitedError("later", retry_after_s=0.1), UnavailableError("the model is away", retry_after_s=0.1)]
)
async def test_a_line_that_is_refused_for_now_waits(stack: Stack, error: Exception) -> None:
    """A rate that is reached, or a model that is away, fails no line: it is tried again until it is answered."""
    client = stack.openai()
    stack.service.script = [error]
    batch = await begin(client, [line("a"), line("b")])
    await until(lambda: len(stack.service.requests) >= 4)
    assert (await client.batches.retrieve(batch.id)).request_counts.failed == 0
    stack.service.script = text_script("Hello")
    done = await stack.ended(client, batch.id, "completed")
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 0)


@pytest.mark.parametrize("rule", ["tenants.acme.hours", "tenants.acme.features.wake"])
async def test_a_line_waits_for_the_end_of_a_denial_that_passes(
    stack: Stack, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of hours, and while a model sleeps that the tenant may not wake: no line fails for good. A denial that does
    not pass fails it."""
    monkeypatch.setattr(line_calls, "LATER_S", 0.1)
    client, error = stack.openai(), FeatureNotAllowedError("not now")
    error.rule = rule
    stack.service.script = [error]
    batch = await begin(client, [line("a")])
    await until(lambda: len(stack.service.requests) >= 2)
    stack.service.script = text_script("Hello")
    done = await stack.ended(client, batch.id, "completed")
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 0)
    other = FeatureNotAllowedError("never")
    other.rule = "tenants.acme.features.tools"
    stack.service.script = [other]
    done = await stack.ended(client, (await begin(client, [line("a")])).id, "completed")
    assert (done.request_counts.completed, done.request_counts.failed) == (0, 1)


async def test_a_line_that_never_can_fails(stack: Stack) -> None:
    """A limit beyond which no waiting helps, a feature that is gone and a defect: a typed error, once, not again."""
    client = stack.openai()
    gone = FeatureNotAllowedError("this tenant may not use files and batches any more")
    for error, status in ((RateLimitedError("never"), 429), (gone, 403), (RuntimeError("oops"), 500)):
        stack.service.requests.clear()
        stack.service.script = [error]
        done = await stack.ended(client, (await begin(client, [line("a")])).id, "completed")
        (one,) = await results(client, done.error_file_id)
        assert (one["response"]["status_code"], len(stack.service.requests)) == (status, 1)


async def test_a_defect_of_a_kind_that_nobody_foresaw_is_not_met_ten_times_a_second(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that ends by an error of no known kind rests with its batch and is tried again; a line that waits for a
    model (control) is tried ten times as often. It is answered once the error has gone."""
    client, tries = stack.openai(), {}
    monkeypatch.setattr(runner, "REST_S", 1.0)
    for error in (OSError("oops"), UnavailableError("away", retry_after_s=0.1)):
        stack.service.requests.clear()
        stack.service.script = [error]
        batch = await begin(client, [line("a")])
        await until(lambda: stack.service.requests)
        await asyncio.sleep(2.5)
        tries[type(error)] = len(stack.service.requests)
        stack.service.script = text_script("Hello")
        done = await stack.ended(client, batch.id, "completed")
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 0)
    assert 1 <= tries[OSError] <= 3 < 6 < tries[UnavailableError]


async def test_a_withdrawn_credential_ends_its_lines(stack: Stack) -> None:
    """When the key that made a batch is revoked its lines end with 401 and none is run; another tenant's are."""
    client, other = stack.openai(), stack.openai("globex")
    stack.withdrawn["acme"] = UnauthenticatedError("the credential was withdrawn")
    done = await stack.ended(client, (await begin(client, [line("a"), line("b")])).id, "completed")
    assert [one["response"]["status_code"] for one in await results(client, done.error_file_id)] == [401, 401]
    assert stack.service.requests == []
    assert (await stack.ended(other, (await begin(other, [line("c")])).id, "completed")).request_counts.completed == 1


async def test_a_batch_is_made_once_for_a_key(stack: Stack) -> None:
    """A create that is tried again with its `Idempotency-Key` answers with the batch that the first one made, and with
    409 where it asks for another; without a key there are two (control). Too long a key is refused."""
    client = stack.openai()
    first = await begin(client, [line("a")], extra_headers={"Idempotency-Key": "k" * 255})
    asked = {"input_file_id": first.input_file_id, "endpoint": first.endpoint, "completion_window": "24h"}
    again = await client.batches.create(**asked, extra_headers={"idempotency-key": "k" * 255})
    assert again.id == first.id
    with pytest.raises(openai.ConflictError):
        await client.batches.create(**asked, metadata={"b": "c"}, extra_headers={"idempotency-key": "k" * 255})
    assert len({(await client.batches.create(**asked)).id for _ in range(2)} | {first.id}) == 3
    with pytest.raises(openai.BadRequestError, match="255"):
        await client.batches.create(**asked, extra_headers={"idempotency-key": "k" * 256})


async def test_cancel_lets_running_lines_end_and_begins_no_others(stack: Stack) -> None:
    """The lines that run have their results in the file; no other begins. A batch that is over cannot be cancelled."""
    client, gate = stack.openai(), asyncio.Event()
    stack.service.script = [text_script("x")[0], gate, *text_script("Hello")[1:]]
    batch = await begin(client, [line(f"l-{number}") for number in range(40)])
    await until(lambda: len(stack.service.requests) == room.RUNNING_EACH)
    cancelling = await client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    gate.set()
    done = await stack.ended(client, batch.id, "cancelled")
    assert done.request_counts.completed == room.RUNNING_EACH == len(stack.service.requests)
    assert len(await results(client, done.output_file_id)) == room.RUNNING_EACH
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)


async def test_the_windows_end_ends_every_line(tmp_path: Path) -> None:
    """Lines that ran are cut off and those that did not begin are not run: all others have the error batch_expired, and
    the batch is expired with the results that it has."""
    async with stacked(tmp_path, shift_s=2.5 - DAY_S) as stack:
        client = stack.openai()
        first = await begin(client, [line("early")])
        assert (await stack.ended(client, first.id, "completed")).request_counts.completed == 1
        stack.service.script = [UnavailableError("away", retry_after_s=0.1)]
        batch = await begin(client, [line(f"l-{number}") for number in range(100)])
        done = await stack.ended(client, batch.id, "expired")
        assert (done.request_counts.completed, done.request_counts.failed) == (0, 100)
        found = await results(client, done.error_file_id)
        assert {(one["response"], one["error"]["code"]) for one in found} == {(None, "batch_expired")}
        assert [one["custom_id"] for one in found] == [f"l-{number}" for number in range(100)]


async def test_a_tenants_other_requests_come_first(stack: Stack) -> None:
    """No line begins while less than half of the tenant's places or of its rate is left; as soon as it is, lines go
    on."""
    client = stack.openai()
    stack.use(POLICY.replace("requests_per_minute: 100000", "requests_per_minute: 60000, concurrency: 4"))
    held = [stack.ledger.admit("acme", MODEL, 1) for _ in range(2)]
    batch = await begin(client, [line("a")])
    await stack.ended(client, batch.id, "in_progress")
    await asyncio.sleep(0.5)
    assert stack.service.requests == []
    held[0].settle(0, 0)
    await stack.ended(client, batch.id, "completed")
    held[1].settle(0, 0)
    stack.use(POLICY.replace("requests_per_minute: 100000", "requests_per_minute: 2"))
    spent = [stack.ledger.admit("acme", MODEL, 1) for _ in range(2)]
    for one in spent:
        one.settle(0, 0)
    stack.service.requests.clear()
    await begin(client, [line("b")])
    await asyncio.sleep(0.5)
    assert stack.service.requests == []


async def test_a_restart_of_the_store_goes_on(stack: Stack) -> None:
    """The socket is lost while lines run: their results are given to the next one, and no line is answered twice."""
    client, gate = stack.openai(), asyncio.Event()
    stack.service.script = [text_script("x")[0], gate, *text_script("Hello")[1:]]
    batch = await begin(client, [line(f"l-{number}") for number in range(30)])
    await until(lambda: len(stack.service.requests) == room.RUNNING_EACH)
    stack.port.gateway_left()
    await until(lambda: not stack.link.up)
    gate.set()
    await until(lambda: stack.link.up)
    done = await stack.ended(client, batch.id, "completed")
    assert done.request_counts.completed == 30 == len(stack.service.requests)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "../x"}, "input_file_id"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"extra_body": {"output_expires_after": {"anchor": "created_at", "seconds": 3_599}}}, "output_expires_after"),
        ({"extra_body": {"output_expires_after": {"anchor": "ended", "seconds": 3_600}}}, "output_expires_after"),
    ],
)
async def test_wrong_batches_are_refused(stack: Stack, fields: dict[str, Any], param: str) -> None:
    """A field that is out of its range is named."""
    client = stack.openai()
    asked = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.batches.create(**asked)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("name", "free"), [("m", False), ("m:fit", False), ("help", False), ("n:fit", True), ("n", True)]
)
def test_lines_for_an_adapter_need_room_in_its_model(name: str, free: bool) -> None:
    """None begins for an adapter, by its name or by a route, while its model could not serve. Control: models of which
    nothing is known here."""
    text = """
version: 1
tenants:
  a: {credentials: ["key:a"], models: ["*"], adapters: ["m:fit", "n:fit"]}
routes:
  help: {to: [{model: "m:fit"}]}
"""
    policy = load_policy([Source("p.yaml", text)])
    found = room.Room(Ledger(policy, {"a": bytes(32)}), {"m": ModelSandboxes("m")}, TenantSandboxes())
    assert found.may_begin("a", name, 0) is free


async def test_what_holds_a_batch_up_is_told(stack: Stack) -> None:
    """The operator's view names what keeps lines from beginning: a limit, a refusal that passes, a full store, and
    nothing while lines run (control). A batch that is over is not listed."""
    client = stack.openai()
    stack.use(POLICY.replace("requests_per_minute: 100000", "requests_per_minute: 60000, concurrency: 4"))
    held = [stack.ledger.admit("acme", MODEL, 1) for _ in range(2)]
    batch = await begin(client, [line("a"), line("b")])

    def view() -> Any:
        (one,) = stack.runner.views(5)
        return one

    await until(lambda: view().obstacle == "limit")
    assert (view().id, view().tenant, view().total, view().ended, view().stuck) == (batch.id, "acme", 2, 0, False)
    gate, error = asyncio.Event(), UnavailableError("away", retry_after_s=30.0)
    stack.service.script = [text_script("x")[0], gate, error]
    for one in held:
        one.settle(0, 0)
    await until(lambda: (view().running, view().model) == (2, MODEL))  # the model is known once a line is read
    assert (view().obstacle, stack.runner.running_lines) == ("", 2)
    gate.set()
    await until(lambda: view().obstacle == "delayed")
    await client.batches.cancel(batch.id)
    await stack.ended(client, batch.id, "cancelled")
    await until(lambda: stack.runner.views(5) == ())
    assert stack.store.figures()["oldest_s"] == 0
    await begin(client, [line("a")])
    stack.clock[0] += 90.0
    assert stack.store.figures()["oldest_s"] >= 90


def test_no_line_begins_while_the_operator_drains() -> None:
    """It would fail, and be tried again every few seconds. Control: once the drain is over it may."""
    policy = load_policy([Source("p.yaml", 'version: 1\ntenants: {a: {credentials: ["key:a"], models: ["*"]}}')])
    drain = OperatorDrain(draining=True)
    found = room.Room(Ledger(policy, {"a": bytes(32)}), {}, TenantSandboxes(), drain=drain)
    assert not found.may_begin("a", "m", 0) and not found.may_begin("gone", "m", 0)
    drain.draining = False
    assert found.may_begin("a", "m", 0)
