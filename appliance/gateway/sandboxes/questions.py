"""Questions to the supervisor that have one answer each, by the id that they were asked under."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from appliance.common.control import Attest, Attested, Control, UsageQuery, Used
from appliance.common.errors import UnavailableError
from appliance.gateway.sandboxes.link import RETRY_AFTER_S

MAX_WAITING = 64
"""Questions of one kind that wait for their answers; further ones are refused at once. The supervisor keeps as many."""

ANSWER_S = 5.0
"""Longest wait for an answer, whose work takes some milliseconds, and a tenth of a second after an upgrade of runsc."""

A = TypeVar("A", Attested, Used)


class Questions(Generic[A]):
    """Asks the supervisor questions of one kind. ``what`` names an answer, as in "no attestation"."""

    def __init__(self, tell: Callable[[Control], None], what: str) -> None:
        """``tell`` sends to the supervisor."""
        self._tell = tell
        self._what = what
        self._waiting: dict[str, asyncio.Future[A]] = {}

    async def ask(self, question: Attest | UsageQuery, timeout_s: float = ANSWER_S) -> A:
        """Return the answer.

        Raises:
            UnavailableError: there is none, or none came in time.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise UnavailableError(f"too many callers wait for an {self._what}", retry_after_s=RETRY_AFTER_S)
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting[question.request] = answer
        self._tell(question)
        try:
            async with asyncio.timeout(min(ANSWER_S, timeout_s)):
                found = await answer
        except TimeoutError:
            raise UnavailableError(f"no {self._what} can be made now", retry_after_s=RETRY_AFTER_S) from None
        finally:
            del self._waiting[question.request]
        if found.problem:
            raise UnavailableError(f"no {self._what} can be made: {found.problem}", retry_after_s=RETRY_AFTER_S)
        return found

    def take(self, message: A) -> None:
        """Take an answer; one to a question that waits no more changes nothing."""
        waiting = self._waiting.get(message.request)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)


@dataclass(frozen=True, slots=True)
class SupervisorQuestions:
    """All kinds of questions."""

    attestations: Questions[Attested]
    usage: Questions[Used]

    @classmethod
    def to(cls, tell: Callable[[Control], None]) -> SupervisorQuestions:
        """Return those that ``tell`` sends."""
        return cls(Questions(tell, "attestation"), Questions(tell, "account of usage"))

    @property
    def takers(self) -> dict[type[Control], Callable[[Any], None]]:
        """What takes each kind of answer."""
        return {Attested: self.attestations.take, Used: self.usage.take}
