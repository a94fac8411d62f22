"""Several outputs of one request, and its prompt as part of the answer, over a real channel to a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from array import array

import pytest

from appliance.common.errors import InternalError, InvalidRequestError, QuarantinedError, UnavailableError
from appliance.gateway.generate_request import (
    ChoiceFinished,
    Delta,
    Event,
    Finished,
    FinishReason,
    PromptTokens,
    Started,
)
from isolation.ipc.engine import Abort, RequestFailure, StepOutput, Submit
from isolation.ipc.logprob import PromptLogprobs
from isolation.ipc.messages import FailureCode, Finish
from tests.appliance.gateway.request.test_session import Stage, collect, hear, say, stage

__all__ = ["stage"]


def texts(events: list[Event]) -> dict[int, str]:
    """The text of each choice."""
    found: dict[int, str] = {}
    for event in events:
        if isinstance(event, Delta):
            found[event.choice] = found.get(event.choice, "") + event.text
    return found


async def test_choices_arrive_each_under_its_number(stage: Stage) -> None:
    """One submission for three; tokens interleave, each choice ends for itself, the prompt counts once."""
    pair = stage.boot()
    task = asyncio.ensure_future(collect(stage.session(max_tokens=4, choices=3)))
    submit = await hear(pair, Submit)
    assert (submit.choices, submit.max_tokens) == (3, 4)
    assert stage.ledger.concurrency("alpha") == 3
    first = submit.request
    say(pair, first, 5, started=True)
    say(pair, first + 1, 6, 7)
    say(pair, first, 8, finish=Finish.LENGTH)
    say(pair, first + 2, 9, finish=Finish.LENGTH)
    say(pair, first + 1, 10, finish=Finish.LENGTH)
    events = await task
    assert isinstance(events[0], Started)
    assert texts(events) == {0: "5 8 ", 1: "6 7 10 ", 2: "9 "}
    finished = events[-1]
    assert isinstance(finished, Finished)
    ended = [event.choice for event in events if isinstance(event, ChoiceFinished)]
    assert sorted([*ended, finished.choice]) == [0, 1, 2]
    assert (finished.input_tokens, finished.output_tokens) == (3, 6)


async def test_a_stop_string_ends_its_own_choice(stage: Stage) -> None:
    """The choice is aborted in the engine and charged up to its stop string; the other goes on."""
    pair = stage.boot()
    task = asyncio.ensure_future(collect(stage.session(max_tokens=6, choices=2, stop=("7",))))
    submit = await hear(pair, Submit)
    say(pair, submit.request, 5, 7, 8, started=True)
    assert (await hear(pair, Abort)).request == submit.request
    say(pair, submit.request + 1, 9, 10, finish=Finish.LENGTH)
    events = await task
    assert texts(events) == {0: "5 ", 1: "9 10 "}
    (ended,) = [event for event in events if isinstance(event, ChoiceFinished)]
    assert (ended.choice, ended.reason, ended.stop) == (0, FinishReason.STOP, "7")
    assert isinstance(events[-1], Finished)
    assert events[-1].output_tokens == 4


async def test_who_leaves_stops_all_choices_and_pays_for_what_was_computed(stage: Stage) -> None:
    """A cancelled request aborts each of its choices; unread tokens are charged."""
    pair = stage.boot()
    session = stage.session(max_tokens=6, choices=3)
    task = asyncio.ensure_future(collect(session))
    submit = await hear(pair, Submit)
    say(pair, submit.request, 5, started=True)
    await asyncio.sleep(0.05)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    gone = {(await hear(pair, Abort)).request for _ in range(3)}
    assert gone == {submit.request + index for index in range(3)}
    assert session.life.outcome.output_tokens == 1
    assert stage.model.engine is not None
    assert stage.model.engine.live == ()


async def test_what_ends_one_choice_badly_ends_the_request(stage: Stage) -> None:
    """The engine's failure of one choice is the request's error; the others are aborted."""
    pair = stage.boot()
    task = asyncio.ensure_future(collect(stage.session(max_tokens=6, choices=2)))
    submit = await hear(pair, Submit)
    pair.guest.send(StepOutput(failures=(RequestFailure(submit.request + 1, FailureCode.INTERNAL),)))
    with pytest.raises(InternalError):
        await task
    assert (await hear(pair, Abort)).request == submit.request


async def test_a_dead_engine_is_replaced_for_all_choices(stage: Stage) -> None:
    """Nothing was shown yet: all choices are asked for again in the next engine, with the same seed."""
    pair = stage.boot()
    task = asyncio.ensure_future(collect(stage.session(max_tokens=1, choices=2)))
    submit = await hear(pair, Submit)
    pair.guest.close()
    await asyncio.sleep(0.05)
    again = await hear(stage.boot(), Submit)
    assert (again.choices, again.sampling.seed) == (2, submit.sampling.seed)
    assert again.request > submit.request + 1
    for index in range(2):
        say(stage.pairs[-1], again.request + index, 5, finish=Finish.LENGTH)
    assert texts(await task) == {0: "5 ", 1: "5 "}


def part(request: int, start: int, *logprobs: float, width: int = 1, token: int = 7) -> StepOutput:
    """Log-probabilities of some positions of a prompt."""
    count = width * len(logprobs)
    alternatives = array("I", [token] * count), array("d", [-0.5] * count)
    return StepOutput(prompts=(PromptLogprobs(request, start, array("d", logprobs), *alternatives),))


@pytest.mark.parametrize("choices", [1, 2])
async def test_the_prompt_comes_before_any_output(stage: Stage, choices: int) -> None:
    """Parts are put together into one event with texts and alternatives, the first token without a number."""
    pair = stage.boot()
    session = stage.session(max_tokens=1, prompt_logprobs=1, echo=True, choices=choices)
    task = asyncio.ensure_future(collect(session))
    submit = await hear(pair, Submit)
    assert (submit.prompt_logprobs, submit.choices) == (1, choices)
    pair.guest.send(part(submit.request, 1, -1.0))
    pair.guest.send(part(submit.request, 2, -2.0))
    for index in range(choices):
        say(pair, submit.request + index, 9, finish=Finish.LENGTH, started=True)
    events = await task
    assert isinstance(events[0], Started)
    prompt = events[1]
    assert isinstance(prompt, PromptTokens)
    assert prompt.text == "1 2 3 "
    assert [(one.token_id, one.text, one.logprob) for one in prompt.tokens] == [
        (1, b"1 ", None),
        (2, b"2 ", -1.0),
        (3, b"3 ", -2.0),
    ]
    assert [one.top for one in prompt.tokens] == [(), ((7, b"7 ", -0.5),), ((7, b"7 ", -0.5),)]
    assert texts(events) == dict.fromkeys(range(choices), "9 ")


async def test_an_echo_alone_asks_the_engine_for_nothing(stage: Stage) -> None:
    """The prompt's text comes, without numbers."""
    pair = stage.boot()
    task = asyncio.ensure_future(collect(stage.session(max_tokens=1, echo=True)))
    submit = await hear(pair, Submit)
    assert submit.prompt_logprobs == -1
    say(pair, submit.request, 9, finish=Finish.LENGTH)
    assert (await task)[1] == PromptTokens("1 2 3 ", ())


@pytest.mark.parametrize("kind", ["gap", "again", "beyond", "wide", "vocabulary", "unasked", "early token", "unknown"])
async def test_scores_out_of_turn_break_the_protocol(stage: Stage, kind: str) -> None:
    """Whatever an engine sends besides the parts that come next ends it; the request is tried again and then told."""
    asked = -1 if kind == "unasked" else 1
    task = asyncio.ensure_future(collect(stage.session(max_tokens=1, prompt_logprobs=asked)))
    for _ in range(3):
        pair = stage.boot()
        try:
            submit = await hear(pair, Submit)
        except TimeoutError:
            break
        number = submit.request
        if kind == "again":
            pair.guest.send(part(number, 1, -1.0))
        if kind == "early token":
            say(pair, number, 9, finish=Finish.LENGTH)
        else:
            wrong = {
                "gap": part(number, 2, -1.0),
                "again": part(number, 1, -1.0),
                "beyond": part(number, 1, -1.0, -1.0, -1.0),
                "wide": part(number, 1, -1.0, width=2),
                "vocabulary": part(number, 1, -1.0, token=512),
                "unasked": part(number, 1, -1.0),
                "unknown": part(number + 1_000, 1, -1.0),
            }
            pair.guest.send(wrong[kind])
        async with asyncio.timeout(20):
            while stage.model.engine is not None:
                await asyncio.sleep(0.002)
        if task.done():
            break
    with pytest.raises((UnavailableError, QuarantinedError)):
        await task


async def test_a_prompt_with_too_many_numbers_is_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound counts alternatives; one number less is served (control)."""
    monkeypatch.setattr("appliance.gateway.request.session.MAX_NUMBERS", 6)
    pair = stage.boot()
    with pytest.raises(InvalidRequestError) as caught:
        await collect(stage.session(max_tokens=1, prompt_logprobs=2))
    assert caught.value.param == "prompt_logprobs"
    task = asyncio.ensure_future(collect(stage.session(max_tokens=1, prompt_logprobs=1)))
    submit = await hear(pair, Submit)
    pair.guest.send(part(submit.request, 1, -1.0, -2.0))
    say(pair, submit.request, 9, finish=Finish.LENGTH)
    assert isinstance((await task)[-1], Finished)
