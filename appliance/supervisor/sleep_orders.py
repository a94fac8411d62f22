"""Puts models to sleep and wakes them as the gateway orders. Which one and when is the gateway's decision, since it
knows their requests; a gateway that was taken over can do no more with it than refuse those requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from appliance.common.audit.entry import Entry, entry
from appliance.common.control import Control
from appliance.common.control_models import SleepModel, WakeModel
from appliance.common.errors import ControlError
from appliance.common.sleep_rules import SLEEP_REASONS, WAKE_REASONS
from appliance.supervisor.model_keepers import ModelKeepers

log = structlog.get_logger()

MAX_ORDERS = 256
"""Most orders under way: two for each of 64 models, twice. A gateway gives one at a time for each model."""

MAX_TENANT_CHARS = 128
"""Longest name of a tenant in an order, as in policies."""


class SleepOrders:
    """Carries out sleep and wake; all methods run in one event loop."""

    def __init__(
        self, models: ModelKeepers, publish: Callable[[Control, tuple[int, ...]], bool], record: Callable[[Entry], None]
    ) -> None:
        self._models = models
        self._publish = publish
        self._record = record
        self._sleeps: set[asyncio.Task[None]] = set()
        self._wakes: set[asyncio.Task[None]] = set()

    def take(self, message: SleepModel | WakeModel) -> None:
        """Take an order of the gateway; one about a model that is not there any more is nothing.

        Raises:
            ControlError: no gateway gives it.
        """
        known = SLEEP_REASONS if isinstance(message, SleepModel) else WAKE_REASONS
        tenant = message.tenant if isinstance(message, WakeModel) else ""
        if message.reason not in known or len(tenant) > MAX_TENANT_CHARS:
            raise ControlError("an order to sleep or wake that no gateway gives")
        if len(self._sleeps) + len(self._wakes) >= MAX_ORDERS:
            raise ControlError("more orders to sleep and wake than a gateway gives")
        if message.model not in self._models.entries:
            return
        if isinstance(message, SleepModel):
            self._begin(self._sleeps, self._sleep(message))
        else:
            # What was put to sleep before gives its memory back before a program starts.
            self._begin(self._wakes, self._wake(message, tuple(self._sleeps)))

    def _begin(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="sleep and wake")
        tasks.add(task)
        task.add_done_callback(lambda done: self._done(tasks, done))

    def _done(self, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._models.fail(task)

    async def close(self) -> None:
        """Give up what is under way; keepers that run are ended by their owner."""
        tasks = (*self._sleeps, *self._wakes)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sleep(self, order: SleepModel) -> None:
        if await self._models.sleep(order.model):
            log.info("a model sleeps", model=order.model, reason=order.reason)
            self._note("sleep", order.model, order.reason, "")
        self._tell(order.model)

    async def _wake(self, order: WakeModel, before: tuple[asyncio.Task[None], ...]) -> None:
        if await self._models.wake(order.model, lambda: self._tell(order.model), before):
            cause = self._models.sleep_word(order.model).cause if order.model in self._models.entries else ""
            log.info("a model wakes", model=order.model, reason=order.reason, problem=cause)
            self._note("wake", order.model, order.reason, order.tenant, "FAILED" if cause else "OK")
        self._tell(order.model)

    def _tell(self, model: str) -> None:
        if model in self._models.entries:
            self._publish(self._models.sleep_word(model), ())

    def _note(self, what: str, model: str, reason: str, tenant: str, outcome: str = "OK") -> None:
        self._record(
            entry(
                "model",
                what=what,
                model=model,
                model_digest=self._models.digests.get(model, ""),
                model_signer=self._models.signers.get(model, ""),
                source="",
                user=0,
                outcome=outcome,
                count=0,
                reason=reason,
                tenant=tenant,
            )
        )
