"""What the client of a text sandbox asks for, and what the work on prompts counts as."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from appliance.common.errors import ApplianceError, QuarantinedError
from appliance.gateway.generate_request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.text_client import TextClient
from appliance.gateway.sandboxes.text_link import Answer, Job
from isolation.ipc.messages import MAX_TOKENS_PER_REQUEST, Failed, FailureCode
from isolation.ipc.text import Encode, Encoded
from tests.appliance.gateway.pairs import ENGINE_READY

LONG = "x" * 4_000
CONTEXT = ENGINE_READY.max_context


def client(most: int = MAX_TOKENS_PER_REQUEST, *, known: bool = True) -> TextClient:
    """A client of a model whose context is known, or not yet."""
    model = ModelSandboxes("m")
    model.capacity = ENGINE_READY if known else None
    return TextClient(model, lambda: 1, "alpha", most)


def answering(monkeypatch: pytest.MonkeyPatch, answer: Answer | ApplianceError) -> list[Job]:
    """Have every job answered so; gives the list of the jobs."""
    jobs: list[Job] = []

    async def ask(_client: TextClient, make_job: Callable[[Any], Job], _until: float) -> Answer:
        jobs.append(make_job(None))
        if isinstance(answer, ApplianceError):
            raise answer
        return answer

    monkeypatch.setattr(TextClient, "ask", ask)
    return jobs


@pytest.mark.parametrize(
    ("most", "known", "counted"),
    [
        (CONTEXT // 2, True, CONTEXT // 2),
        (CONTEXT * 2, True, CONTEXT),
        (CONTEXT * 2, False, CONTEXT * 2),
        (MAX_TOKENS_PER_REQUEST * 2, False, MAX_TOKENS_PER_REQUEST),
    ],
)
async def test_a_prompt_is_counted_no_further_than_it_may_go(
    most: int, known: bool, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox is told the least of the caller's bound, the model's context once it is known, and the wire's."""
    jobs = answering(monkeypatch, Encoded(1, array("I", [5])))
    await client(most, known=known).encode(TextPrompt("x"), time.monotonic() + 1)
    (job,) = jobs
    assert isinstance(job, Encode)
    assert job.max_tokens == counted


@pytest.mark.parametrize(
    ("prompt", "answer", "tokens"),
    [
        (TextPrompt(LONG), Failed(1, FailureCode.TOO_LONG, "more"), 200),
        (TextPrompt("x" * 400), Failed(1, FailureCode.INVALID, "a mark"), 100),
        (ChatPrompt(LONG.encode()), Failed(1, FailureCode.INVALID, "no such role"), 200),
        (TextPrompt(LONG), Failed(1, FailureCode.INTERNAL, "a defect"), 0),
        (TextPrompt(LONG), Failed(1, FailureCode.OVERLOADED, "busy"), 0),
        (TextPrompt(LONG), QuarantinedError("twice"), 200),
        (TextPrompt("x"), Encoded(1, array("I", [5, 6, 7])), 3),
        (TextPrompt("x"), Encoded(1, array("I")), 0),
        (TokenPrompt(array("I", [1] * 9)), Encoded(1, array("I", [5])), 0),
    ],
)
async def test_what_the_work_on_a_prompt_counts_as(
    prompt: Prompt, answer: Answer | ApplianceError, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens where they were counted, else what its bytes suggest, and never more than it would have been counted
    to; the sandbox's own failures and prompts of ids count nothing."""
    answering(monkeypatch, answer)
    one = client(200)
    try:
        await one.encode(prompt, time.monotonic() + 1)
    except ApplianceError:
        assert not (isinstance(answer, Encoded) and answer.token_ids)
    assert one.text_tokens == tokens
