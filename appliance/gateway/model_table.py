"""The models that are served, as the supervisor tells them: they come and go while requests run.

The supervisor's word is the table; the gateway's own configuration only says what to expect before the first word.
A model that leaves takes no request any more. Those that run have ``DRAIN_S`` to end and are cut with a typed error
then; the supervisor ends the sandboxes once it knows that no request is left.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import structlog

from appliance.common.config import MODEL_NAME, ApplianceConfig, ModelConfig
from appliance.common.control import Control, Welcome
from appliance.common.control_models import (
    ApplyModels,
    ModelDrained,
    ModelGone,
    ModelServed,
    ModelsReviewed,
    ReviewModels,
)
from appliance.common.errors import ConfigError
from appliance.common.external_config import EXTERNAL
from appliance.common.served_models import (
    DRAIN_S,
    LEAVING,
    SERVED,
    ModelDifference,
    difference,
    entry_digest,
    models_digest,
)
from appliance.gateway.request.lifecycle import Lifecycle
from appliance.gateway.request.service import GatewayService
from appliance.gateway.request.suspects import Suspects
from appliance.gateway.sandboxes.model_leaving import Leaving, model_leaves
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes

log = structlog.get_logger()

REVIEW_S = 3_600.0
"""Seconds that a review may take: all weights of a model that is to come are read, a terabyte at 300 MB a second."""

REVIEW_LOOK_S = 0.5
"""Seconds between two looks whether the supervisor that reviews is still there."""

MAX_TABLE = 256
"""Most models of the table: 64 that are served, and as many again that leave, twice."""

LOOK_S = 0.05
"""Seconds between two looks whether a leaving model's requests have ended."""

CUT_S = 2.0
"""Seconds that requests which were cut have to end: they only have to take their error."""

RUNNERS = ("model", "embed", "classify", EXTERNAL, "null")

COMING = ""
"""In place of the digest of a model's entry while it comes again with another: it is neither new nor changed."""


class ServedNames(Collection[str]):
    """Names of the models that are served, and whole names of their adapters: a view that follows the models."""

    def __init__(self, models: Mapping[str, ModelSandboxes]) -> None:
        self._models = models

    def __iter__(self) -> Iterator[str]:
        for model in self._models.values():
            yield from (model.name, *model.adapters)

    def __contains__(self, name: object) -> bool:
        return any(name == one for one in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ModelTable:
    """Keeps the service's models as the supervisor tells them. All methods run in one event loop."""

    def __init__(
        self,
        service: GatewayService,
        tell: Callable[[Control], None],
        attached: Callable[[], bool],
        changed: Callable[[tuple[str, ...], tuple[str, ...]], None],
        drain_s: float = DRAIN_S,
    ) -> None:
        """``tell`` sends to the supervisor, which is there while ``attached``; ``changed`` is called with the names of
        models that have come and that are gone, after the table has changed."""
        self._service = service
        self._tell = tell
        self._attached = attached
        self._changed = changed
        self._drain_s = drain_s
        self._entries: dict[str, str] | None = None
        """Digests of the entries that are served and stay, by model; None before the supervisor has said them."""
        self._reviews: dict[str, asyncio.Future[list[str]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def takers(self) -> dict[type[Control], Callable[[Any], None]]:
        """What takes each kind of message."""
        return {ModelServed: self.served, ModelGone: self.gone, ModelsReviewed: self._reviewed}

    def welcome(self, message: Welcome) -> None:
        """Drop what a supervisor that has come does not serve; a word about each model that it serves follows."""
        self._entries = {}
        self._end_reviews()
        for name in [name for name in self._service.model_sandboxes if name not in message.models]:
            self._drop(name)

    def served(self, message: ModelServed) -> None:
        """Take the supervisor's word about a model.

        Raises:
            ValueError: no supervisor of this release sends it.
        """
        name, models = message.model, self._service.model_sandboxes
        known = re.fullmatch(MODEL_NAME, name) and message.runner in RUNNERS and message.state in (SERVED, LEAVING)
        if not known or len(models) >= MAX_TABLE:
            raise ValueError("a model that no supervisor of this release serves")
        entries = self._entries = self._entries or {}
        if message.state == LEAVING:
            entries.pop(name, None)
            if message.again:
                entries[name] = COMING
            self._leave(name, again=bool(message.again))
            return
        before, adapters = models.get(name), _adapters(message)
        if before is not None and before.leaving is not Leaving.NO:
            self._drop(name)
            before = None
        entries[name] = message.entry
        if before is not None:  # The supervisor's word counts: this process may have begun with another configuration.
            before.runner, before.truncates, before.adapters = message.runner, bool(message.truncates), adapters
            before.templated, before.labels = bool(message.templated), tuple(message.labels)
        else:
            model = ModelSandboxes(
                name,
                message.runner,
                truncates=bool(message.truncates),
                adapters=adapters,
                templated=bool(message.templated),
                labels=tuple(message.labels),
            )
            model.arriving = True
            for role in ("engine", "text"):
                model.record(role)
            self._service.suspects.setdefault(name, Suspects())
            models[name] = model
            self._service.publications.model_came(name)
            log.info("a model comes", model=name)
            self._changed((name,), ())

    def gone(self, message: ModelGone) -> None:
        """Drop a model of which nothing is left."""
        self._drop(message.model)

    def difference(self, running: Iterable[ModelConfig], wanted: Iterable[ModelConfig]) -> ModelDifference:
        """Compare the wanted models with the served ones; with ``running`` where no supervisor has said any."""
        entries = self._entries
        if entries is None:
            entries = {model.name: entry_digest(model) for model in running}
        return difference(entries, wanted)

    async def review(self, wanted: Iterable[ModelConfig]) -> str:
        """Have the supervisor check whether these models can be served; returns the id under which they are applied.

        Raises:
            ConfigError: they cannot; a line for each problem.
        """
        if not self._attached():
            raise ConfigError("models cannot change while there is no supervisor: systemctl status athanor-supervisor")
        request = secrets.token_hex(8)
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._reviews[request] = answer
        self._tell(ReviewModels(request, models_digest(wanted)))
        until = time.monotonic() + REVIEW_S
        try:
            while not answer.done():
                await asyncio.wait((answer,), timeout=REVIEW_LOOK_S)
                if not self._attached() or time.monotonic() > until:
                    self._end_reviews()
            problems = answer.result()
        finally:
            del self._reviews[request]
        if problems:
            raise ConfigError("\n".join(problems))
        return request

    def apply(self, request: str) -> None:
        """Have what was reviewed come and go."""
        self._tell(ApplyModels(request))

    def close(self) -> None:
        """Give up what is under way; the process ends."""
        for task in self._tasks:
            task.cancel()

    def _end_reviews(self) -> None:
        """End reviews that no supervisor will answer any more."""
        for answer in self._reviews.values():
            if not answer.done():
                answer.set_result(["the supervisor went while it looked at the models, or took too long; try again"])

    def _reviewed(self, message: ModelsReviewed) -> None:
        answer = self._reviews.get(message.request)
        if answer is not None and not answer.done():
            answer.set_result(message.problems)

    def _leave(self, name: str, *, again: bool) -> None:
        model = self._service.model_sandboxes.get(name)
        if model is None:
            self._tell(ModelDrained(name))
            return
        if model.leaving is Leaving.NO:
            model.leave(again=again)
            log.info("a model goes", model=name, again=again, seconds=self._drain_s)
            task = asyncio.create_task(self._drain(model), name=f"drain of {name}")
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a model was not drained", task=task.get_name(), error=repr(error), exc_info=error)

    async def _drain(self, model: ModelSandboxes) -> None:
        """Wait for a model's requests, cut those that are left, and say so."""
        await self._emptied(model, self._drain_s)
        if self._service.model_sandboxes.get(model.name) is not model:
            return  # Dropped meanwhile; another of this name may be served.
        if cut := self._cut(model):
            log.warning("requests of a leaving model are cut", model=model.name, requests=cut)
            await self._emptied(model, CUT_S)
        self._service.tenant_sandboxes.end_model(model.name)
        # Before the channels close: the supervisor starts a sandbox again that ends and has not been drained.
        self._tell(ModelDrained(model.name))
        model.close_links()

    async def _emptied(self, model: ModelSandboxes, longest_s: float) -> None:
        until = time.monotonic() + longest_s
        while True:
            if not self._requests(model) or time.monotonic() >= until:
                return
            await asyncio.sleep(LOOK_S)

    def _requests(self, model: ModelSandboxes) -> list[Lifecycle]:
        """Return the requests that use a model."""
        return [life for life in self._service.live if life.model is model]

    def _cut(self, model: ModelSandboxes) -> int:
        """End all requests of a model; returns how many there were."""
        found, again = self._requests(model), model.leaving is Leaving.AGAIN
        for life in found:
            call = life.call
            routed = call.alias not in ("", call.adapter)
            life.withdraw(model_leaves(call.alias or model.name, again=again or routed, running=True))
        return len(found)

    def _drop(self, name: str) -> None:
        model = self._service.model_sandboxes.get(name)
        if model is None:
            return
        if model.leaving is Leaving.NO:
            model.leave(again=False)
        self._cut(model)
        self._service.tenant_sandboxes.end_model(name)
        model.close_links()
        model.note_failure()  # Nobody waits for it any more.
        # What is known of its suspects stays: requests that were cut may still look, and it may come again.
        del self._service.model_sandboxes[name]
        log.info("a model is gone", model=name)
        self._changed((), (name,))


def _adapters(message: ModelServed) -> dict[str, bytes]:
    """Return digests of a model's adapters by whole name.

    Raises:
        ValueError: no supervisor of this release sends it.
    """
    pairs = [line.partition(" ") for line in message.adapters]
    if not all(re.fullmatch("[0-9a-f]{64}", digest) for _, _, digest in pairs):
        raise ValueError("adapters of a model that no supervisor of this release serves")
    return {name: bytes.fromhex(digest) for name, _, digest in pairs}


def shared_sandboxes(config: ApplianceConfig) -> dict[str, ModelSandboxes]:
    """Make the shared sandboxes of every model."""
    return {
        model.name: ModelSandboxes(
            model.name,
            model.runner,
            truncates=model.truncates,
            adapters=model.adapter_digests,
            templated=model.pairs == "template",
            labels=model.labels,
        )
        for model in config.models
    }
