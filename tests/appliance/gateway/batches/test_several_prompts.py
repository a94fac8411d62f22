"""Lines of several prompts: one result in the prompts' order, an entry for each, answers that outlast a delay."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.common.batches.values import DAY_S
from appliance.common.errors import ApplianceError, InvalidRequestError, RateLimitedError, UnavailableError
from appliance.gateway.batches import room, runner, turns
from appliance.gateway.generate_request import (
    CallContext,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Principal,
    Started,
    TextPrompt,
)
from isolation.ipc.messages import Priority
from tests.appliance.common.audit.entries import filled
from tests.appliance.gateway.batches.stack import POLICY, Stack, stacked, until
from tests.appliance.gateway.batches.test_batches import begin, line, results
from tests.appliance.gateway.front.support import MODEL
from tests.system.audit_files import written

URL = "/v1/completions"


class Prompts:
    """The service's ``generate``: each prompt is answered with itself, and charged what its characters are."""

    def __init__(self) -> None:
        self.tries: Counter[str] = Counter()
        self.running = self.most = 0
        self.errors: dict[str, list[ApplianceError | RuntimeError]] = {}
        """Errors of the next tries of a prompt."""
        self.gates: dict[str, asyncio.Event] = {}
        self.requests: list[GenerateRequest] = []

    async def generate(
        self, principal: Principal, request: GenerateRequest, context: CallContext, _sink: Any = None
    ) -> AsyncGenerator[Event]:
        """Answer a prompt."""
        assert isinstance(request.prompt, TextPrompt)
        text = request.prompt.text
        self.tries[text] += 1
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        outcome = "CANCELLED"
        try:
            yield Started(len(text), 1)
            await asyncio.sleep(0.001)
            if text in self.gates:
                await self.gates[text].wait()
            if self.errors.get(text):
                outcome = "INTERNAL"
                raise self.errors[text].pop(0)
            yield Delta(text)
            outcome = "OK"
            yield Finished(FinishReason.STOP, len(text), 1, 2)
        finally:
            self.running -= 1
            assert context.line is not None
            context.line.charge(
                filled(
                    "request",
                    "",
                    request=request.request_id,
                    tenant=principal.tenant,
                    batch=context.line.batch,
                    operation="text_completion",
                    outcome=outcome,
                    input_tokens=len(text),
                    output_tokens=2 if outcome == "OK" else 0,
                    cost=len(text),
                )
            )


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack of its own."""
    async with stacked(tmp_path) as made:
        yield made


@pytest.fixture
def prompts(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Prompts:
    """What answers the prompts of this stack."""
    made = Prompts()
    monkeypatch.setattr(stack.service, "generate", made.generate)
    return made


async def batch_of(client: openai.AsyncOpenAI, *lines: list[str], **body: Any) -> Any:
    """A new batch with a line for each list of prompts."""
    return await begin(client, [line(f"l-{n}", URL, prompt=each, **body) for n, each in enumerate(lines)], URL)


async def charges(stack: Stack, batch: str, end: str = "completed") -> dict[str, tuple[str, int]]:
    """Outcome and cost of the batch's requests, by the rest of their ids, once the log has the batch's end."""

    def look() -> list[dict[str, Any]] | None:
        mine = [one for one in written(stack.folder / "audit") if one.get("batch") == batch]
        return mine if any((one.get("event"), one.get("principal")) == (end, "") for one in mine) else None

    found = [one for one in await until(look) if one["kind"] == "request"]
    assert len({one["request"] for one in found}) == len(found), "no request is charged twice"
    return {one["request"].removeprefix(batch): (one["outcome"], one["cost"]) for one in found}


async def test_prompts_of_a_line_are_one_result(stack: Stack, prompts: Prompts) -> None:
    """The choices stand in the prompts' order with the sums of usage; each prompt is a request of low priority, charged
    once, and no more run at once than lines may. A line of one prompt (control) is one request."""
    client, texts = stack.openai(), [f"p{number}" for number in range(40)]
    batch = await batch_of(client, texts, ["alone"])
    done = await stack.ended(client, batch.id, "completed")
    assert (done.request_counts.total, done.request_counts.completed) == (2, 2)
    found, alone = await results(client, done.output_file_id)
    body = found["response"]["body"]
    assert [(one["index"], one["text"]) for one in body["choices"]] == list(enumerate(texts))
    size = sum(map(len, texts))
    assert body["usage"] == {
        "prompt_tokens": size,
        "completion_tokens": 80,
        "total_tokens": size + 80,
        "prompt_tokens_details": {"cached_tokens": 40},
    }
    assert [one["text"] for one in alone["response"]["body"]["choices"]] == ["alone"]
    assert {one.priority for one in prompts.requests} == {Priority.LOW}
    assert 1 < prompts.most <= room.RUNNING_EACH
    names = ["-1", *(f"-1.{number}" for number in range(1, 40))]
    wanted = {name: ("OK", len(text)) for name, text in zip(names, texts, strict=True)}
    assert await charges(stack, batch.id) == {**wanted, "-2": ("OK", 5)}


@pytest.mark.parametrize(
    "error", [RateLimitedError("later", retry_after_s=0.1), UnavailableError("away", retry_after_s=0.1)]
)
async def test_answers_outlast_a_delay(stack: Stack, prompts: Prompts, error: ApplianceError) -> None:
    """A prompt that meets a limit, or whose model goes away, is tried again alone, and the others are neither computed
    nor charged twice. Where no answers may be held (control) the line begins anew, and is still charged once."""
    client, texts = stack.openai(), ["a", "bb", "ccc"]
    prompts.errors["bb"] = [error, error]
    batch = await batch_of(client, texts)
    done = await stack.ended(client, batch.id, "completed")
    (found,) = await results(client, done.output_file_id)
    assert [one["text"] for one in found["response"]["body"]["choices"]] == texts
    assert prompts.tries == {"a": 1, "bb": 3, "ccc": 1}
    wanted = {"-1": ("OK", 1), "-1.1": ("OK", 2), "-1.2": ("OK", 3)}
    assert await charges(stack, batch.id) == wanted
    prompts.errors["bb"] = [error]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "PROGRESS_BYTES", 0)
        batch = await batch_of(client, texts)
        await stack.ended(client, batch.id, "completed")
    assert prompts.tries["ccc"] == 3
    assert await charges(stack, batch.id) == wanted


@pytest.mark.parametrize("error", [InvalidRequestError("too long", param="prompt[1]"), RuntimeError("oops")])
async def test_a_prompt_that_fails_ends_its_line(
    stack: Stack, prompts: Prompts, error: ApplianceError | RuntimeError
) -> None:
    """The line has the error, its running prompts are stopped, those behind them do not begin, and what they were given
    is charged, as the route charges it. The next line (control) is answered."""
    client = stack.openai()
    prompts.gates["waits"] = asyncio.Event()
    prompts.gates["wrong"] = asyncio.Event()
    prompts.errors["wrong"] = [error]
    stack.use(POLICY.replace("requests_per_minute: 100000", "requests_per_minute: 100000, concurrency: 6"))
    batch = await batch_of(client, ["good", "wrong", "waits", *["later"] * 3], ["next"])
    await until(lambda: prompts.tries["waits"] and prompts.running == 2)
    prompts.gates["wrong"].set()
    done = await stack.ended(client, batch.id, "completed")
    (failed,), (good,) = await results(client, done.error_file_id), await results(client, done.output_file_id)
    assert failed["response"]["status_code"] == (400 if isinstance(error, InvalidRequestError) else 500)
    assert good["custom_id"] == "l-1"
    charged = await charges(stack, batch.id)
    assert charged["-1"] == ("OK", 4)
    assert charged["-1.1"] == ("INTERNAL", 5)
    assert charged["-1.2"] == ("CANCELLED", 5)
    assert charged["-2"] == ("OK", 4)


@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_a_line_that_ends_with_its_batch_is_charged_for_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Of a line that waits with two of three answers, those two are charged when its batch is cancelled or expires; the
    line has an error that says so. A line of which nothing was answered is charged for nothing."""
    made = Prompts()
    made.errors["waits"] = [RateLimitedError("later", retry_after_s=60.0)]
    made.errors["not"] = [RateLimitedError("later", retry_after_s=60.0) for _ in range(2)]
    async with stacked(tmp_path, shift_s=0.0 if end == "cancelled" else 2.0 - DAY_S) as stack:
        monkeypatch.setattr(stack.service, "generate", made.generate)
        client = stack.openai()
        batch = await batch_of(client, ["good", "waits", "fine"], ["not", "not"])

        def held() -> bool:
            views = stack.runner.views(1)
            return bool(views) and (views[0].obstacle, views[0].running) == ("delayed", 0)

        await until(held)
        if end == "cancelled":
            await client.batches.cancel(batch.id)
        done = await stack.ended(client, batch.id, end)
        found = await results(client, done.error_file_id)
        assert {one["custom_id"]: one["error"]["code"] for one in found}["l-0"] == f"batch_{end}"
        assert await charges(stack, batch.id, end) == {"-1": ("OK", 4), "-1.2": ("OK", 4)}


async def test_prompts_leave_room(stack: Stack, prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """None begins while half of its tenant's places is in use: the line is continued where it stood once they are
    free."""
    client = stack.openai()
    stack.use(POLICY.replace("requests_per_minute: 100000", "requests_per_minute: 100000, concurrency: 4"))
    prompts.gates["first"] = asyncio.Event()
    monkeypatch.setattr(turns, "RUNNING_IN_ALL", 1)
    batch = await batch_of(client, ["first", *(f"p{number}" for number in range(6))])
    await until(lambda: prompts.tries["first"])
    held = [stack.ledger.admit("acme", MODEL, 1) for _ in range(2)]
    prompts.gates["first"].set()
    await until(lambda: prompts.running == 0)
    begun = prompts.tries.total()
    await asyncio.sleep(0.4)
    assert prompts.tries.total() == begun < 7
    for one in held:
        one.settle(0, 0)
    done = await stack.ended(client, batch.id, "completed")
    assert set(prompts.tries.values()) == {1}
    assert len((await results(client, done.output_file_id))[0]["response"]["body"]["choices"]) == 7


async def test_tenants_lines_have_turns_between_prompts(stack: Stack, prompts: Prompts) -> None:
    """A line of 128 prompts does not hold up another tenant's line that comes later."""
    client, other = stack.openai(), stack.openai("globex")
    prompts.gates["slow"] = asyncio.Event()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(turns, "RUNNING_IN_ALL", 2)
        batch = await batch_of(client, ["slow", *(f"p{number}" for number in range(127))])
        await until(lambda: prompts.tries.total() > 3)
        late = await batch_of(other, ["other"])
        await until(lambda: prompts.tries["other"])
        assert prompts.tries.total() < 128
        prompts.gates["slow"].set()
        await stack.ended(other, late.id, "completed")
        done = await stack.ended(client, batch.id, "completed")
    assert done.request_counts.completed == 1
    assert set(prompts.tries.values()) == {1}
