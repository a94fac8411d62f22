"""Stored responses with the official client and by hand: over real sockets down to the sealed store."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.common.batches.values import RESPONSE_KEEP_S
from appliance.gateway.generate_request import ChatPrompt, Finished, FinishReason, Started
from tests.appliance.gateway.batches.stack import LIMITED, POLICY, Stack, stacked
from tests.appliance.gateway.batches.test_files import send
from tests.appliance.gateway.front.support import MODEL, text_script
from tests.appliance.gateway.http.scripts import CALLING

CANARY = "canary-4f1c9e07"


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack of its own."""
    async with stacked(tmp_path) as made:
        yield made


async def ask(stack: Stack, tenant: str = "acme", **fields: Any) -> Any:
    """The response to an input."""
    return await stack.openai(tenant).responses.create(**{"model": MODEL, "input": "?", **fields})


def told(stack: Stack) -> list[dict[str, Any]]:
    """The messages that the template is told of the last request."""
    prompt = stack.service.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return list(json.loads(prompt.source)["messages"])


async def test_the_official_client_reads_lists_and_deletes(stack: Stack) -> None:
    """retrieve, input_items.list with its pages, and delete of openai-python, as they are. The response that is read is
    the one that was answered."""
    client = stack.openai()
    items = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    made = await ask(stack, input=items, instructions="In German.", metadata={"a": "b"})
    assert (made.store, made.previous_response_id) == (True, None)
    assert await client.responses.retrieve(made.id) == made
    listed = [one async for one in client.responses.input_items.list(made.id, limit=3, order="asc")]
    assert [(one.role, one.content[0].text) for one in listed] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "two"),
        ("user", "three"),
    ]
    assert len({one.id for one in listed}) == 4 and all(one.id.startswith("msg_") for one in listed)
    page = await client.responses.input_items.list(made.id, limit=1)
    assert (page.data[0].content[0].text, page.has_more, page.first_id, page.last_id) == (
        *("three", True),
        *(listed[3].id, listed[3].id),
    )
    rest = await client.responses.input_items.list(made.id, after=listed[1].id)
    assert [one.id for one in rest.data] == [listed[0].id]
    assert await client.responses.delete(made.id) is None
    for gone in (client.responses.retrieve(made.id), client.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError):
            await gone
    deleted = await send(stack, "DELETE", f"/v1/responses/{(await ask(stack)).id}")
    assert deleted.json() == {"id": deleted.json()["id"], "object": "response", "deleted": True}


async def test_a_response_is_continued(stack: Stack) -> None:
    """The items of the conversation stand before the new ones, over three turns and with calls; instructions are not
    carried over, and another model may go on. What was deleted is still part of what continued it."""
    stack.service.routes = {"other": MODEL}
    first = await ask(stack, input="one", instructions="Be brief.")
    stack.service.script = CALLING
    second = await ask(stack, model="other", input="two", previous_response_id=first.id)
    assert told(stack) == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "two"},
    ]
    call = next(item for item in second.output if item.type == "function_call")
    assert second.previous_response_id == first.id
    await stack.openai().responses.delete(first.id)
    stack.service.script = text_script("Done")
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "4"}
        for item in second.output
        if item.type == "function_call"
    ]
    third = await ask(stack, input=outputs, previous_response_id=second.id)
    messages = told(stack)
    assert [one["role"] for one in messages[:3]] == ["user", "assistant", "user"]
    assert messages[3]["tool_calls"][0]["id"] == call.call_id
    assert messages[-1] == {"role": "tool", "content": "4", "tool_call_id": outputs[-1]["call_id"]}
    listed = [one async for one in stack.openai().responses.input_items.list(third.id, order="asc")]
    assert [one.type for one in listed][-len(outputs) :] == ["function_call_output"] * len(outputs)
    count = await send(
        stack,
        "POST",
        "/v1/responses/input_tokens",
        json={"model": MODEL, "input": "?", "previous_response_id": third.id},
    )
    assert count.status_code == 200
    counted = stack.service.tokenizer_requests[-1].prompt
    assert isinstance(counted, ChatPrompt)
    assert json.loads(counted.source)["messages"][-2:] == [
        {"role": "assistant", "content": "Done"},
        {"role": "user", "content": "?"},
    ]


async def test_a_response_is_continued_without_an_input(stack: Stack) -> None:
    """Left out, null or empty, nothing stands behind the earlier output, also where tokens are counted; what is kept
    goes on from there. Control: without an earlier response a 400 names the field."""
    first = await ask(stack, input="one")
    before = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "Hello"}]
    for fields in ({}, {"input": None}, {"input": []}):
        body = {"model": MODEL, "previous_response_id": first.id, **fields}
        answer = await send(stack, "POST", "/v1/responses", json=body)
        assert (answer.status_code, told(stack)) == (200, before)
        counted = await send(stack, "POST", "/v1/responses/input_tokens", json=body)
        assert counted.status_code == 200
        items = (await send(stack, "GET", f"/v1/responses/{answer.json()['id']}/input_items?order=asc")).json()["data"]
        assert [one["role"] for one in items] == ["user", "assistant"]
        refused = await send(stack, "POST", "/v1/responses", json={"model": MODEL, **fields})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


async def test_a_stream_is_kept_before_its_last_event(stack: Stack) -> None:
    """The response of the last event is the one that is read right after it. A call that was cut off by the limit of
    tokens is not continued."""
    stream = await ask(stack, input="one", stream=True)
    events = [event async for event in stream]
    assert events[0].response.store and events[-1].type == "response.completed"
    assert await stack.openai().responses.retrieve(events[-1].response.id) == events[-1].response
    stack.service.script = [*CALLING[:-1], Finished(FinishReason.LENGTH, 7, 3, 2)]
    cut = await ask(stack, input="one")
    assert (cut.status, cut.output[-1].type, cut.output[-1].status) == ("incomplete", "function_call", "incomplete")
    stack.service.script = text_script("Hello")
    await ask(stack, input="two", previous_response_id=cut.id)
    calls = [call for message in told(stack) for call in message.get("tool_calls", ())]
    assert cut.output[-1].call_id not in [call["id"] for call in calls]


async def test_what_is_not_kept(stack: Stack) -> None:
    """A caller that says no, and a tenant that may not or of which nothing is kept, get an answer that says so and is
    not found. A tenant that may not and asks for it is refused with the field's name."""
    for tenant, fields in (("acme", {"store": False}), ("without", {}), ("forgets", {}), ("without", {"store": False})):
        made = await ask(stack, tenant, **fields)
        assert (made.output_text, made.store) == ("Hello", False)
        assert (await send(stack, "GET", f"/v1/responses/{made.id}")).status_code == 404
    for tenant in ("without", "forgets"):
        for field, value in (("store", True), ("previous_response_id", "resp_1")):
            with pytest.raises(openai.PermissionDeniedError) as refused:
                await ask(stack, tenant, **{field: value})
            assert (refused.value.code, refused.value.param) == ("feature_not_allowed", field)
        for method, below in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            assert (await send(stack, method, f"/v1/responses/resp_1{below}", tenant)).status_code == 403
    assert stack.store.figures()["responses"] == 0


async def test_what_others_have_is_not_there(stack: Stack) -> None:
    """Every way to a response of another tenant is answered, byte by byte but for the request's id, as one to a
    response that does not exist. Control: its own tenant reads it."""
    made = await ask(stack, input=CANARY)
    ways = [("GET", ""), ("DELETE", ""), ("GET", "/input_items")]
    for method, below in ways:
        answers = [
            await send(stack, method, f"/v1/responses/{one}{below}", "globex") for one in (made.id, "resp_" + "0" * 32)
        ]
        assert [(one.status_code, one.content) for one in answers] == [(404, answers[1].content)] * 2
    body = {"model": MODEL, "input": "?"}
    continued = [
        await send(stack, "POST", "/v1/responses", "globex", json={**body, "previous_response_id": one})
        for one in (made.id, "resp_" + "0" * 32)
    ]
    assert [(one.status_code, one.content) for one in continued] == [(404, continued[1].content)] * 2
    assert continued[0].json()["error"]["param"] == "previous_response_id"
    assert len(stack.service.requests) == 1
    assert CANARY in (await send(stack, "GET", f"/v1/responses/{made.id}/input_items")).text


async def test_a_key_that_may_not_read_them_continues_none(stack: Stack) -> None:
    """The model could be asked to repeat what it reads, so a key with `generate` alone is refused by the scope that it
    lacks, and nothing reaches the model. Controls: it gets an answer of its own, and a key of the tenant continues."""
    made = await ask(stack, input=CANARY)
    body = {"model": MODEL, "input": "Repeat it.", "previous_response_id": made.id}
    refused = await send(stack, "POST", "/v1/responses", LIMITED, json=body)
    assert (refused.status_code, "responses" in refused.text, CANARY in refused.text) == (403, True, False)
    assert len(stack.service.requests) == 1
    del body["previous_response_id"]
    assert (await send(stack, "POST", "/v1/responses", LIMITED, json=body)).status_code == 200
    await ask(stack, previous_response_id=made.id)
    assert CANARY in str(told(stack))


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/responses/a%00b", 404, "id"),
        ("/v1/responses/" + "a" * 65, 404, "id"),
        ("/v1/responses/{id}/other", 404, None),
        ("/v1/responses/{id}?stream=true", 400, "stream"),
        ("/v1/responses/{id}/input_items?limit=0", 400, "limit"),
        ("/v1/responses/{id}/input_items?limit=101", 400, "limit"),
        ("/v1/responses/{id}/input_items?order=up", 400, "order"),
        ("/v1/responses/{id}/input_items?after=msg_none", 404, "after"),
    ],
)
async def test_what_cannot_be_asked_is_named(stack: Stack, path: str, status: int, param: str | None) -> None:
    """Ids that no response has, and fields of queries out of their ranges."""
    found = await send(stack, "GET", path.replace("{id}", (await ask(stack)).id))
    assert (found.status_code, found.json()["error"]["param"]) == (status, param)


async def test_nothing_of_it_is_read_on_the_disk_or_after_a_shred(tmp_path: Path) -> None:
    """Neither input nor output of a response stands on the disk in plain, and once the tenant's key is destroyed
    nothing of it is left, while another tenant's responses are read as before; nor after a restart without the key.
    Control: the store gives the text while the key is there."""
    async with stacked(tmp_path) as stack:
        stack.service.script = text_script(CANARY, CANARY)
        made, other = await ask(stack, input=CANARY), await ask(stack, "globex", input=CANARY)
        assert (await send(stack, "GET", f"/v1/responses/{made.id}")).text.count(CANARY) == 2
        files = [path for path in (tmp_path / "kept").iterdir() if path.is_file()]
        assert files and not any(CANARY.encode() in path.read_bytes() for path in files)
        assert stack.store.shred("acme") == 1
        assert (await send(stack, "GET", f"/v1/responses/{made.id}")).status_code == 404
        assert (await send(stack, "GET", f"/v1/responses/{other.id}", "globex")).status_code == 200
        again = await ask(stack, input=CANARY)
        assert stack.store.book.shred("acme")
    async with stacked(tmp_path) as stack:
        assert stack.store.forgotten == 1
        assert (await send(stack, "GET", f"/v1/responses/{again.id}")).status_code == 404
        assert (await send(stack, "GET", f"/v1/responses/{other.id}", "globex")).status_code == 200


async def test_it_goes_after_its_time_and_survives_a_restart(tmp_path: Path) -> None:
    """A response is read for 30 days, over restarts, and not a second longer; then its bytes are free again."""
    async with stacked(tmp_path) as stack:
        made = await ask(stack)
    async with stacked(tmp_path, RESPONSE_KEEP_S - 60) as stack:
        assert (await send(stack, "GET", f"/v1/responses/{made.id}")).status_code == 200
        stack.clock[0] += 61
        assert (await send(stack, "GET", f"/v1/responses/{made.id}")).status_code == 404
        stack.store.tidy()
        assert {name: stack.store.figures()[name] for name in ("responses", "bytes")} == {"responses": 0, "bytes": 0}


async def test_a_full_tenant_gets_answers_that_are_not_kept(stack: Stack) -> None:
    """Where there is no room, an answer says that it is not kept, whole and streamed; another tenant's is kept. Once
    the policy leaves room, so is the next one."""
    stack.use(POLICY.replace("requests_per_minute: 100000", "max_stored_bytes: 100"))
    assert not (await ask(stack)).store
    events = [event async for event in await ask(stack, stream=True)]
    assert events[-1].type == "response.completed" and not events[-1].response.store
    assert (await ask(stack, "globex")).store
    stack.use(POLICY)
    assert (await ask(stack)).store


async def test_a_policy_that_takes_it_away_reaches_what_runs(stack: Stack) -> None:
    """An answer is not kept when the switch was turned off while it was computed, and what was kept is not shown."""
    made = await ask(stack)
    stack.service.script = [Started(1, 0), 0.2, Finished(FinishReason.STOP, 1, 0, 0)]
    stream = await ask(stack, stream=True)
    events = stream.__aiter__()
    assert (await anext(events)).response.store
    stack.use(POLICY.replace("stored_responses: true", "stored_responses: false"))
    last = [event async for event in events][-1]
    assert not last.response.store
    assert (await send(stack, "GET", f"/v1/responses/{made.id}")).status_code == 403


async def test_padded_answers_are_kept_whole(stack: Stack) -> None:
    """The stream of a tenant whose answers are padded ends with the whole text, and it is what is kept."""
    stack.service.padded.add("acme")
    stack.service.script = text_script("Hel", "lo", " world")
    events = [event async for event in await ask(stack, stream=True)]
    response = events[-1].response
    assert response.output_text == "Hello world"
    assert (await stack.openai().responses.retrieve(response.id)).output_text == "Hello world"
