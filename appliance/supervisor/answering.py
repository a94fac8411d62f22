"""Questions of the gateway that take a file or a key to answer: one at a time, in a thread, each answered by its id."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from appliance.common.control import Attest, Control
from appliance.common.control_usage import UsageQuestion
from appliance.common.errors import ControlError

MAX_WAITING = 64
"""Questions that wait for their answers; more are not kept, and the gateway's wait for them ends."""

MAX_ID_CHARS = 64
"""Longest id of a request; a gateway's have 28 characters."""

Question = Attest | UsageQuestion
Publish = Callable[[Control, tuple[int, ...]], bool]


class Answerer(Protocol):
    """Answers one kind of question."""

    def check(self, message: Any) -> None:
        """Refuse what no gateway asks.

        Raises:
            ControlError: it is such a question.
        """
        ...

    def answer(self, message: Any) -> Control:
        """Return the answer. Blocks."""
        ...


class Answering:
    """Takes questions and sends answers; its coroutine and callbacks run in one event loop."""

    def __init__(self, publish: Publish, answerers: Mapping[type[Question], Answerer]) -> None:
        """``publish`` sends to the gateway."""
        self._publish = publish
        self._answerers = answerers
        self._waiting: deque[Question] = deque()
        self._more = asyncio.Event()

    def answers(self, message: Question) -> bool:
        """Return whether questions of this kind are answered here."""
        return type(message) in self._answerers

    def take(self, message: Question) -> None:
        """Take a question. Of more than can wait nothing is kept.

        Raises:
            ControlError: it is none that a gateway asks.
        """
        if len(message.request) > MAX_ID_CHARS:
            raise ControlError("a question has an id that no gateway gives")
        self._answerers[type(message)].check(message)
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(message)
            self._more.set()

    def gateway_left(self) -> None:
        """Forget what a gateway that is gone asked."""
        self._waiting.clear()

    async def run(self) -> None:
        """Answer questions as they come, until cancelled."""
        while True:
            await self._more.wait()
            self._more.clear()
            while self._waiting:
                message = self._waiting.popleft()
                self._publish(await asyncio.to_thread(self._answerers[type(message)].answer, message), ())


class Lanes:
    """Several answerings beside each other: what takes seconds holds up nothing that takes milliseconds."""

    def __init__(self, *lanes: Answering) -> None:
        """Each kind of question has one lane."""
        self._lanes = lanes

    def take(self, message: Question) -> None:
        """Take a question into its lane.

        Raises:
            ControlError: it is none that a gateway asks.
        """
        next(lane for lane in self._lanes if lane.answers(message)).take(message)

    def gateway_left(self) -> None:
        """Forget what a gateway that is gone asked."""
        for lane in self._lanes:
            lane.gateway_left()

    async def run(self) -> None:
        """Answer questions as they come, until cancelled."""
        await asyncio.gather(*(lane.run() for lane in self._lanes))
