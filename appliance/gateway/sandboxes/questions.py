"""Questions to the supervisor that have one answer each, by the id that they were asked under."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from appliance.common.control import Attest, Attested, Control
from appliance.common.control_usage import Overview, UsageQuestion, UsageTable, Used
from appliance.common.errors import UnavailableError
from appliance.gateway.sandboxes.link import RETRY_AFTER_S

MAX_WAITING = 64
"""Questions of one kind that wait for their answers; further ones are refused at once. The supervisor keeps as many."""

ANSWER_S = 5.0
"""Longest wait for an answer, whose work takes some milliseconds, and a tenth of a second after an upgrade of runsc."""

LONG_ANSWER_S = 65.0
"""Longest wait for what is read from the whole usage book: two sums, each of which the supervisor ends after 30
seconds."""

A = TypeVar("A", Attested, Used, Overview, UsageTable)


class Questions(Generic[A]):
    """Asks the supervisor questions of one kind. ``what`` names an answer, as in "no attestation"."""

    def __init__(self, tell: Callable[[Control], None], what: str, answer_s: float | None = None) -> None:
        """``tell`` sends to the supervisor; ``answer_s`` is the longest wait, in place of ``ANSWER_S``."""
        self._tell = tell
        self._what = what
        self._answer_s = answer_s
        self._waiting: dict[str, asyncio.Future[A]] = {}

    async def ask(self, question: Attest | UsageQuestion, timeout_s: float | None = None) -> A:
        """Return the answer; ``timeout_s`` makes the wait shorter.

        Raises:
            UnavailableError: there is none, or none came in time.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise UnavailableError(f"too many callers wait for an {self._what}", retry_after_s=RETRY_AFTER_S)
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting[question.request] = answer
        self._tell(question)
        try:
            longest_s = ANSWER_S if self._answer_s is None else self._answer_s
            async with asyncio.timeout(longest_s if timeout_s is None else min(longest_s, timeout_s)):
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
    overviews: Questions[Overview]
    tables: Questions[UsageTable]

    @classmethod
    def to(cls, tell: Callable[[Control], None]) -> SupervisorQuestions:
        """Return those that ``tell`` sends."""
        return cls(
            Questions(tell, "attestation"),
            Questions(tell, "account of usage"),
            Questions(tell, "overview of usage", LONG_ANSWER_S),
            Questions(tell, "account of usage", LONG_ANSWER_S),
        )

    @property
    def takers(self) -> dict[type[Control], Callable[[Any], None]]:
        """What takes each kind of answer."""
        return {
            Attested: self.attestations.take,
            Used: self.usage.take,
            Overview: self.overviews.take,
            UsageTable: self.tables.take,
        }
