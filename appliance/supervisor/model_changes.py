"""Models that come and go while the appliance serves.

The operator says which models there are: in athanor.yaml and in models.d beside it. A reload has the gateway ask
whether what is written there can be served, and then that it be; the supervisor reads the files itself, so the gateway
can order nothing that is not written. What is to come is checked whole before anything changes: files, pinned digests,
memory, GPUs. What shall go is drained by the gateway, for a bounded time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from appliance.common.audit.entry import Entry, entry
from appliance.common.card_table import CardUse
from appliance.common.catalog import check_files, read_model
from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.config_loader import Resolved
from appliance.common.control import Control
from appliance.common.control_models import (
    ApplyModels,
    ModelDrained,
    ModelGone,
    ModelsReviewed,
    ModelWishes,
    ReviewModels,
    SleepModel,
    WakeModel,
)
from appliance.common.errors import ApplianceError, ConfigError, ModelDigestError, ModelSignatureError, os_errors_as
from appliance.common.figures import counted
from appliance.common.model_digests import DigestCache
from appliance.common.model_memory import machine_memory, no_room
from appliance.common.model_signature import with_signer
from appliance.common.served_models import DRAIN_BOUND_S, ModelDifference, difference, models_digest
from appliance.common.sleep_rules import ALWAYS
from appliance.supervisor.adapters import leave_out, refuse, with_adapters
from appliance.supervisor.boot import BootPlan, plan_boots
from appliance.supervisor.gpu import Cards
from appliance.supervisor.model_keepers import ModelKeepers, PlannedModel
from appliance.supervisor.residents import Residents
from appliance.supervisor.sleep_orders import SleepOrders
from appliance.supervisor.warm import WarmStarts
from isolation.errors import IsolationError
from isolation.gvisor.runtime import Runtime

log = structlog.get_logger()

MAX_PROBLEMS = 64
MAX_PROBLEM_CHARS = 1_000
"""Most lines of one answer, and characters of each: in ASCII half of a datagram."""

MAX_PROBLEMS_BYTES = 100_000
"""Most bytes of the lines of one answer, so that it fits a datagram whatever characters file names have."""

MAX_ID_CHARS = 64
"""Longest id of a question; a gateway's have 28 characters."""

Reread = Callable[[], Resolved]
"""Reads file, models.d, variables and options as at the start; raises ``ConfigError``."""


@dataclass(frozen=True, slots=True)
class ServedNow:
    """Models that are served and stay, and which of them take memory now."""

    models: dict[str, PlannedModel]
    awake: frozenset[str]
    """Those that are waking or boot among them."""
    booting: frozenset[str] = frozenset()
    """Those whose engine is not there yet, or not at present: it takes its memory when it boots."""

    def about(self, names: Iterable[str]) -> int:
        """Memory of those models, as far as their files are there: those of a model that goes may be gone already."""
        total = 0
        for name in names:
            with suppress(OSError):
                total += self.models[name].need.about
        return total


@dataclass(frozen=True, slots=True)
class _Reviewed:
    """What was found good, until it is applied."""

    request: str
    found: ModelDifference
    coming: tuple[PlannedModel, ...]


class ModelChanges:
    """Reviews and applies; one review at a time. All methods run in one event loop."""

    def __init__(
        self,
        config: ApplianceConfig,
        models: ModelKeepers,
        runtime: Runtime,
        publish: Callable[[Control, tuple[int, ...]], bool],
        record: Callable[[Entry], None],
        reread: Reread | None,
    ) -> None:
        """``config`` is what runs: of what is read anew the models alone count. ``reread`` None: nobody knows where it
        came from, and models never change."""
        self._config = config
        self._models = models
        self._runtime = runtime
        self._publish = publish
        self._record = record
        self._reread = reread
        self._sleep_orders = SleepOrders(models, publish, record)
        self.residents: Residents | None = None
        self.warm: WarmStarts | None = None
        """Set by the owner: what else belongs to a model."""
        self.out: Callable[[], Mapping[int, str]] = dict
        """Why each card that gets no engine gets none; set by the owner."""
        self.turn = asyncio.Lock()
        """Held while engines get their cards; set by the owner (``CardPlacement.turn``)."""
        self._reviewing = False
        self._changing = False
        """Whether models come and go now: what is reviewed meanwhile would be out of date when it is applied."""
        self._reviewed: _Reviewed | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: ModelWishes) -> None:
        """Take a word of the gateway.

        Raises:
            ControlError: no gateway says it.
        """
        if isinstance(message, SleepModel | WakeModel):
            self._sleep_orders.take(message)
        elif isinstance(message, ModelDrained):
            self._models.drained(message.model)
        elif isinstance(message, ApplyModels):
            self._apply(message.request)
        elif self._reviewing or self._changing:
            self._answer(message.request, ["another change of the models is under way; try again in a moment"])
        else:
            self._reviewing = True
            self._begin(self._review(message))

    async def close(self) -> None:
        """Give up what is under way."""
        await self._sleep_orders.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="models")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._models.fail(task)

    async def _review(self, message: ReviewModels) -> None:
        self._reviewed, problems = None, list[str]()
        if not self._changing:
            self._models.coming = ()
        entries, leaving = self._models.entries, self._models.leaving
        planned = {name: self._models.planned(name) for name in entries}
        served, uses = ServedNow(planned, self._models.awake, self._models.booting), self._uses()
        try:
            found, coming = await asyncio.to_thread(self._plan, message.entries, entries, leaving, served)
            async with self.turn:
                if uses != self._uses():
                    # An engine got a card meanwhile: weights are hashed by now, so this plan takes no long turn.
                    found, coming = await asyncio.to_thread(self._plan, message.entries, entries, leaving, served)
                self._reviewed = _Reviewed(message.request[:MAX_ID_CHARS], found, coming)
                self._models.coming = tuple(plan for planned in coming for plan in planned.plans)
        except ApplianceError as error:
            problems = error.message.splitlines()
        except (OSError, IsolationError) as error:
            problems = [f"models cannot be looked at: {error}"]
        finally:
            self._reviewing = False
        self._answer(message.request, problems)

    def _answer(self, request: str, problems: list[str]) -> None:
        if problems:
            log.warning("models are not changed", problems=problems)
        self._publish(ModelsReviewed(request[:MAX_ID_CHARS], told_problems(problems)), ())

    def _plan(
        self, digest: str, entries: dict[str, str], leaving: frozenset[str], served: ServedNow
    ) -> tuple[ModelDifference, tuple[PlannedModel, ...]]:
        """Find what comes and goes, and check what comes. Blocks: weights that are not known are read.

        Raises:
            ApplianceError: something cannot be served; a line for each problem.
        """
        if self._reread is None:
            raise ConfigError("this supervisor was not told where its configuration lies; restart the appliance")
        wanted = self._reread()
        if models_digest(wanted.config.models) != digest:
            raise ConfigError(
                "gateway and supervisor read different models: a file changed meanwhile, or their units have other "
                "variables ATHANOR_MODELS; make them the same, then reload again"
            )
        found = difference(entries, wanted.config.models)
        config = self._config.model_copy(update={"models": wanted.config.models})
        cache = DigestCache.load(config.digest_cache)
        for one in served.models.values():
            cache.remember(one.files.hashed)
        problems, coming = list[str](), list[PlannedModel]()
        out = dict(self.out())
        cards = self._cards({*found.removed, *(model.name for model in found.changed)})
        for model in found.coming:
            try:
                if model.name in leaving:
                    raise ConfigError(f"model {model.name}: an earlier one of this name is ending; try again shortly")
                coming.append(_planned(config, model, cache, self._runtime, cards))
            except ApplianceError as error:
                problems.append(f"{_place(wanted, model, error)}: {error.message}")
        for name, problem in lacking(config, coming, found, served).items():
            model = next(one for one in found.coming if one.name == name)
            problems.append(f"{_place(wanted, model)}: model {name}: {problem}")
        if out != self.out():
            problems.append("a GPU was lost or came back meanwhile, and engines were placed anew; try again")
        if problems:
            raise ConfigError("\n".join(problems))
        cache.save()
        return found, tuple(coming)

    def _cards(self, going: set[str]) -> Cards:
        """GPUs of this machine, with what engines hold of them, those of single tenants among them, once these models
        have ended."""
        plans = self._engines()
        uses = [plan.card for plan in plans if plan.card is not None]
        return Cards(uses, [plan.name for plan in plans if plan.model in going], self.out())

    def _engines(self) -> list[BootPlan]:
        """Plans of all sandboxes, those of single tenants among them; also for other threads."""
        plans = [keeper.plan for keeper in self._models.keepers]
        return plans if self.residents is None else plans + self.residents.plans

    def _uses(self) -> dict[str, CardUse]:
        """What each engine holds of a card, by sandbox."""
        return {plan.name: plan.card for plan in self._engines() if plan.card is not None}

    def _apply(self, request: str) -> None:
        reviewed, self._reviewed = self._reviewed, None
        if reviewed is None or reviewed.request != request or self._changing:
            log.warning("models that were not reviewed are not changed")
            return
        self._changing = True
        self._begin(self._change(reviewed))

    async def _change(self, reviewed: _Reviewed) -> None:
        try:
            gone = await self._carry_out(reviewed)
        finally:
            self._changing, self._models.coming = False, ()
        # Last: a checkpoint that is being made holds this up.
        if self.warm is not None:
            plans = [plan for planned in gone for plan in planned.plans]
            await self.warm.forget(plans, [keeper.plan for keeper in self._models.keepers])

    async def _carry_out(self, reviewed: _Reviewed) -> list[PlannedModel]:
        """Have models come and go; returns those that went, also where others of their names have come."""
        found = reviewed.found
        changed = frozenset(model.name for model in found.changed)
        going = [name for name in (*found.removed, *changed) if name in self._models.entries]
        for name in going:
            self._models.leave(name, again=name in changed)
            self._publish(self._models.word(name), ())
        new = [one for one in reviewed.coming if one.entry.name not in changed]
        for one in new:
            self._add(one)
        ended = await asyncio.gather(*(self._end(name, again=name in changed) for name in going))
        if self.warm is not None:
            self.warm.leave(plan for one in ended for plan in one.plans)
        for one in reviewed.coming:
            if one.entry.name in changed:
                self._add(one)
        # Only now: what went has given its memory back.
        for one in reviewed.coming:
            self._models.start(one.entry.name)
        return ended

    def _add(self, planned: PlannedModel) -> None:
        name = planned.entry.name
        self._models.add(planned)
        log.info(
            "a model comes",
            model=name,
            digest=planned.files.digest,
            signer=planned.files.signer,
            folder=str(planned.files.folder),
        )
        self._record(_entry("serve", planned))
        self._publish(self._models.word(name), ())
        self._publish(self._models.sleep_word(name), ())

    async def _end(self, name: str, *, again: bool) -> PlannedModel:
        log.info("a model goes", model=name, again=again)
        planned = await self._models.end(name, DRAIN_BOUND_S)
        if self.residents is not None:
            await self.residents.end_model(name)
        self._record(_entry("end", planned))
        if not again:  # Else the gateway's requests wait for the one that comes.
            self._publish(ModelGone(name), ())
        log.info("a model is gone", model=name)
        return planned


def _planned(
    config: ApplianceConfig, model: ModelConfig, cache: DigestCache, runtime: Runtime, cards: Cards
) -> PlannedModel:
    with os_errors_as(f"model {model.name}: cannot read its files"):
        files = with_adapters(
            read_model(model.name, model.folder, cache, external=model.external is not None), model, cache, refuse
        )
        files = with_signer(files, config.keys_for(model))
        check_files(files, model.digest)
    return PlannedModel(config, model, files, plan_boots(config, model, files, runtime, cards))


def lacking(
    config: ApplianceConfig, coming: Iterable[PlannedModel], found: ModelDifference, served: ServedNow
) -> dict[str, str]:
    """Why models that come find no memory, by name. What sleeps takes none; one that begins asleep gets it at its wake,
    from the models that may sleep then. An engine that wakes, boots, or is down has not taken all of its memory: it is
    subtracted if the model stays, and is none that is given back if it goes."""
    going = {*found.removed, *(model.name for model in found.changed)}
    staying = served.models.keys() - going
    kept = {name for name in staying if served.models[name].entry.keep == ALWAYS}
    given = served.about(going & (served.awake - served.booting))
    free = machine_memory().available + given - served.about(staying & served.booting)
    needs = {one.entry.name: one.need for one in coming}
    asleep = {one.entry.name for one in coming if one.entry.keep != ALWAYS}
    always = sum(need.about for name, need in needs.items() if name not in asleep)
    most = free - always + served.about((staying - kept) & served.awake)
    if budget := config.sandbox.models_memory_bytes:
        most = min(most, budget - always - served.about(kept))
    return no_room(needs.values(), config.sandbox.memory_bytes, free, asleep=asleep, most=most)


def read_models(config: ApplianceConfig, runtime: Runtime) -> Iterator[PlannedModel]:
    """Plan every model of a configuration, in its order; the pinned digest is compared, and a signature demanded, at
    each boot. Blocks.

    Raises:
        ConfigError: a needed file is missing or unreadable.
        StartError: a model is to have what this machine cannot give.
    """
    cache = DigestCache.load(config.digest_cache)
    files = {}
    for model in config.models:
        with os_errors_as(f"model {model.name}: cannot read its files"):
            found = with_signer(
                read_model(model.name, model.folder, cache, external=model.external is not None), config.keys_for(model)
            )
        files[model.name] = with_adapters(found, model, cache, leave_out)
    cache.save()
    cards = Cards(start=True)
    for model in config.models:
        plans = plan_boots(config, model, files[model.name], runtime, cards)
        yield PlannedModel(config, model, files[model.name], plans)


_KEYS = {ModelDigestError: "digest", ModelSignatureError: "signed_by", ConfigError: "path"}
"""Key of an entry that is at fault, by the error; the first that fits counts."""


def _place(wanted: Resolved, model: ModelConfig, error: ApplianceError | None = None) -> str:
    """Place of what is at fault in an entry: digest, keys, else the folder where it names one, else the name."""
    index = [one.name for one in wanted.config.models].index(model.name)
    key = next((key for kind, key in _KEYS.items() if isinstance(error, kind)), "name")
    origin = wanted.origins.get(f"models[{index}].{key}", "")
    return origin if ":" in origin else wanted.origins[f"models[{index}].name"]


def _entry(what: str, planned: PlannedModel) -> Entry:
    """Entry for the audit log. Who ordered it is told by the command, in an entry of its own."""
    return entry(
        "model",
        what=what,
        model=planned.entry.name,
        model_digest=planned.files.digest,
        model_signer=planned.files.signer,
        source=str(planned.files.folder),
        user=0,
        outcome="OK",
        count=0,
        reason="",
        tenant="",
    )


def told_problems(problems: Sequence[str]) -> list[str]:
    """Return the first problems, as many as one answer holds, and in their last line how many more there are."""
    told, left = [], MAX_PROBLEMS_BYTES
    for line in problems[:MAX_PROBLEMS]:
        cut = line[:MAX_PROBLEM_CHARS]
        left -= len(json.dumps(cut))
        if left < 0:
            break
        told.append(cut)
    if more := len(problems) - len(told):
        told.append(f"{counted(more, 'problem', 'problems')} more; the supervisor's log has all")
    return told
