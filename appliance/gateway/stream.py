"""What has arrived for one request and was not read yet, between the engine's link and the request's session."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from appliance.errors import ApplianceError
from appliance.gateway.grammars import GrammarRun
from appliance.gateway.prompt_report import PromptScores
from isolation.ipc.messages import FailureCode, Finish, Started, TokenLogprobs


@dataclass(slots=True, eq=False)
class TokenStream:
    """One request's tokens. A session waits on ``wake``, or sets ``deliver`` and is called."""

    request: int
    grant: int
    keeps_logprobs: bool = False
    """Whether the request asked for log-probabilities; others are dropped."""
    every_step: bool = False
    """Whether its tokens are handed on at each step, however busy the machine is: a cadence that others cannot move."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """In parallel with ``token_ids`` where they are kept, else empty."""
    scores: PromptScores | None = None
    """Where the prompt's log-probabilities go, if they were asked for."""
    started: Started | None = None
    finish: Finish = Finish.NONE
    failure: FailureCode | None = None
    engine_gone: str | None = None
    grammar: GrammarRun | None = None
    """What its output follows, if anything."""
    grammar_error: ApplianceError | None = None
    """Why it cannot be followed further."""
    overrun: bool = False
    """Whether it was aborted because nobody read it."""
    received: int = 0
    """Tokens ever received: what a replay is judged by."""
    fingerprint: bytes = b""
    """What ``suspects`` knows the request by."""
    namespace: bytes = b""
    """Whose it is."""
    expired: bool = False
    """Whether the request's deadline passed; set by a timer of the session, which then wakes."""
    due: bool = False
    """Whether it is in a delivery's next pass."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    embeds: bool = False
    """Whether the request is for a vector; its one token has no meaning."""
    vector: array[float] | None = None
    deliver: Callable[[], None] | None = None
    """Called in place of waking anybody; takes what it can use and never raises."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return (
            self.finish is not Finish.NONE
            or self.failure is not None
            or self.engine_gone is not None
            or self.grammar_error is not None
            or self.overrun
        )

    def take(self) -> tuple[list[int], Sequence[TokenLogprobs | None]]:
        """The unread tokens and their logprobs, which then count as read."""
        taken = self.token_ids, self.logprobs
        self.token_ids, self.logprobs = [], []
        return taken

    def notify(self) -> None:
        """Hand on what has arrived."""
        if self.deliver is not None:
            self.deliver()
        else:
            self.wake.set()
