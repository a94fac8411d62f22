"""Drives an engine in its own process, without a channel: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core.engine import Engine
from isolation.ipc.engine import Submit
from isolation.ipc.logprob import PromptLogprobs, TokenLogprobs
from isolation.ipc.messages import FailureCode, Finish


@dataclass(slots=True)
class Answer:
    """Everything that came for one request."""

    token_ids: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    failure: FailureCode | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt, part by part."""


def generate(engine: Engine, submits: Iterable[Submit]) -> dict[int, Answer]:
    """Run the requests together to their end; answers by request id."""
    answers: dict[int, Answer] = {}
    for submit in submits:
        answers[submit.request] = Answer()
        engine.add(submit)
    while engine.has_work:
        collect(engine, answers)
    return answers


def collect(engine: Engine, answers: dict[int, Answer]) -> None:
    """Run one step and add what it gave to the answers."""
    output = engine.step()
    if output is None:
        return
    for start in output.starts:
        answers.setdefault(start.request, Answer()).cached_tokens = start.cached_tokens
    for request, token_id, finish in zip(output.requests, output.token_ids, output.finishes, strict=True):
        answer = answers.setdefault(request, Answer())
        answer.token_ids.append(token_id)
        answer.finish = Finish(finish)
    for entry in output.logprobs:
        answers[output.requests[entry.index]].logprobs.append(entry)
    for part in output.prompts:
        answers.setdefault(part.request, Answer()).prompts.append(part)
    for failure in output.failures:
        answers.setdefault(failure.request, Answer()).failure = failure.code
