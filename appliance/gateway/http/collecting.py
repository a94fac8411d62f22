"""Answers that are sent as one object: the events of a session collected, and sessions for several prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from appliance.common.errors import RateLimitedError
from appliance.common.tracebacks import forget_frames
from appliance.gateway.generate_request import (
    CallContext,
    ChoiceFinished,
    Delta,
    Event,
    Finished,
    GenerateRequest,
    Principal,
    PromptTokens,
    Started,
)
from appliance.gateway.http.openai_objects import Writer
from appliance.gateway.service import Service

AT_ONCE = 16
"""Prompts of one request that run at a time: enough to fill an engine's batches, few beside its queue."""

Events = AsyncGenerator[Event, None]


async def started(events: Events) -> Started:
    """Wait until the session's request runs."""
    first = await anext(events, None)
    if not isinstance(first, Started):
        raise RuntimeError("the session's first event is not Started")
    return first


async def collect(events: Events) -> tuple[list[PromptTokens | Delta | ChoiceFinished], Finished]:
    """Return the events behind the first, and the last one."""
    heard: list[PromptTokens | Delta | ChoiceFinished] = []
    finished: Finished | None = None
    async for event in events:
        if isinstance(event, PromptTokens | Delta | ChoiceFinished):
            heard.append(event)
        elif isinstance(event, Finished):
            finished = event
    return heard, checked(finished)


def checked(finished: Finished | None) -> Finished:
    """Return the session's last event, which every one that ends well has."""
    if finished is None:
        raise RuntimeError("the session ended without Finished")
    return finished


class Several:
    """Runs the requests for the prompts of one call, each a session of its own, some at a time."""

    def __init__(
        self,
        service: Service,
        principal: Principal,
        context: CallContext,
        created: int,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """``created``: Unix seconds, for the answer; ``begun`` is called when an engine works for one of them."""
        self._begun = begun
        self._service = service
        self._principal = principal
        self._context = context
        self._created = created
        self._room = asyncio.Condition()
        self._running = 0
        self._most = AT_ONCE

    async def answers(self, requests: Sequence[GenerateRequest]) -> list[dict[str, Any]]:
        """Return the answer to each; the first error ends all of them.

        Raises:
            ApplianceError: one of them cannot be served.
        """
        tasks = [asyncio.ensure_future(self._answer(number, request)) for number, request in enumerate(requests)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _answer(self, number: int, request: GenerateRequest) -> dict[str, Any]:
        while True:
            async with self._room:
                await self._room.wait_for(lambda: self._running < self._most)
                self._running += 1
            try:
                return await self._run(number, request)
            except RateLimitedError as error:
                # The tenant has fewer slots than these prompts: as many as it has run at a time, if any does.
                if self._running == 1:
                    raise
                forget_frames(error)
                self._most = min(self._most, self._running - 1)
            finally:
                async with self._room:
                    self._running -= 1
                    self._room.notify_all()

    async def _run(self, number: int, request: GenerateRequest) -> dict[str, Any]:
        async with aclosing(self._service.generate(self._principal, request, self._context)) as events:
            await started(events)
            self._begun()
            heard, finished = await collect(events)
        return Writer(request, self._created, include_usage=False, number=number).collected(heard, finished)
