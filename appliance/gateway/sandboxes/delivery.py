"""Delivery of arrived tokens to their requests, all streams of a step in one pass; ``flush_interval`` says how often.

While passes follow each other the engine need not ring for its frames: each pass begins by taking what is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from appliance.gateway.sandboxes.flush_interval import FlushInterval
from appliance.gateway.sandboxes.stream import TokenStream


class Delivery:
    """Passes over one engine's streams. ``live`` counts the streams; ``look`` takes the frames that are there, and
    while a pass ``will_look`` the engine rings for urgent frames only."""

    def __init__(self, live: Callable[[], int], look: Callable[[], None]) -> None:
        self._live = live
        self._look = look
        self._flush_interval = FlushInterval()
        self._loop = asyncio.get_running_loop()
        self._due: list[TokenStream] = []
        self._urgent: list[TokenStream] = []
        self._soon = False
        self._planned: asyncio.TimerHandle | None = None
        self._planned_for = 0.0
        self._looks = False

    @property
    def will_look(self) -> bool:
        """Whether a pass is planned that takes frames by itself."""
        return self._planned is not None and self._looks

    def add(self, stream: TokenStream) -> None:
        """Hand on a stream's tokens in the next pass."""
        stream.due = True
        self._due.append(stream)

    def hurry(self, stream: TokenStream) -> None:
        """Hand on a stream's tokens in this turn of the loop: its first token, its end, or a fixed interval."""
        self._urgent.append(stream)

    def plan(self) -> None:
        """Plan a pass after a frame was taken. It runs in a later callback, so that its cost does not count against the
        engine's share of the loop."""
        if self._urgent and not self._soon:
            self._soon = True
            self._loop.call_soon(self._hand_on_urgent)
        if self._due and self._planned is None:
            now = time.monotonic()
            self._plan_pass(now, self._flush_interval.wait_s(now, self._live()))

    def _plan_pass(self, now: float, wait_s: float) -> None:
        self._planned_for = now + wait_s
        self._looks = wait_s > 0
        self._planned = self._loop.call_later(wait_s, self._pass)

    def _hand_on_urgent(self) -> None:
        self._soon = False
        urgent, self._urgent = self._urgent, []
        for stream in urgent:
            stream.notify()

    def _pass(self) -> None:
        now = time.monotonic()
        self._flush_interval.passed(now, now - self._planned_for)
        looked = self._looks
        if looked:
            self._look()
        self._planned = None
        due, self._due = self._due, []
        wait_s = self._flush_interval.wait_s(now, self._live())
        if due and wait_s > 0:
            self._plan_pass(now, wait_s)
        elif looked:
            self._look()  # No pass looks from here on: the engine has to ring again.
        for stream in due:
            stream.due = False
            stream.notify()
