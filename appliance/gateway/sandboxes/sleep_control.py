"""Puts models to sleep and wakes them: by command, when nobody uses them, and for each other's memory.

A sleeping model is known and listed and has no sandboxes. The first request that comes for it wakes it, and waits where
its deadline leaves the time that a wake takes; all others that come meanwhile join it. One whose deadline is too short
is refused at once, with the time after which it may come again, and the wake goes on for it.

What is decided here is carried out by the supervisor (``appliance.supervisor.sleep_orders``), in the order in which it
is told: what sleeps has ended before a program of what wakes starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from appliance.common.control import Control
from appliance.common.control_models import ModelRest, SleepModel, WakeModel
from appliance.common.errors import FeatureNotAllowedError, ModelAsleepError, ModelWakeError, UnavailableError
from appliance.common.model_uses import REFUSED_GAP_S
from appliance.common.sleep_rules import (
    ASLEEP,
    AWAKE,
    GUEST_WAIT_S,
    IDLE,
    KEEPS,
    KEPT_WAIT_S,
    MEMORY,
    REQUEST,
    SLEEP_STATES,
    WAKING,
    WINDOW_S,
    Refuse,
    Wait,
    Wake,
    sleeps,
    unused,
)
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from appliance.gateway.sandboxes.model_leaving import Leaving
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.sleep_decisions import SLEPT, WOKEN, SleepDecisions
from appliance.gateway.sandboxes.sleep_state import LEAST_LEFT_S
from appliance.gateway.sandboxes.wake_waiting import LOOK_S, RELOOK_S, Waiter, WakeWaiting
from policy.model import ModelState

log = structlog.get_logger()

MAX_WAITING = 256
"""Most requests that wait for one model to wake: what an engine of the default size takes up in two steps."""

TENANT_WAITING = 64
"""Most of them of one tenant: the others find places."""

LONGEST_WAIT_S = 10.0
"""Longest that a request may be expected to wait for a wake to begin, in seconds; one for which more is expected is
refused at once."""

ROOM_WAIT_S = 120.0
"""Longest that a request waits for other models' requests to end, in seconds, so that its own model has room. When they
end nobody knows, so this cannot be told when it comes."""

FAILED_S = 30.0
"""Seconds after a wake that failed in which routes pass the model over: one that cannot boot takes as long to fail
again, and each of their requests would wait for that."""


@dataclass(slots=True)
class SleepControl:
    """Keeps which models sleep. All methods run in one event loop.

    A decision takes a look at all models and all requests: a millisecond where there are many. So each request that
    comes has one, and of those that wait for room the one that has waited longest looks again for all of them, when
    something has changed (``WakeWaiting``).
    """

    decisions: SleepDecisions
    """What is known and decided about the models."""
    tell: Callable[[Control], None]
    """Sends to the supervisor."""
    end_own: Callable[[str], int]
    """Ends the sandboxes of single tenants of a model; returns of how many tenants there were some."""
    waits: WakeWaiting = field(init=False)
    """Requests that wait; to be told when a request has ended (``changed``)."""

    def __post_init__(self) -> None:
        self.waits = WakeWaiting(self.decisions.clock)

    async def awaken(self, model: ModelSandboxes, until: float, tenant: str, *, wakes: bool = True) -> float:
        """Wait until a model is awake, and wake it if it sleeps; returns the seconds that this took.

        Raises:
            FeatureNotAllowedError: it sleeps, and the tenant may not wake it (``wakes``).
            ModelRemovedError: it is being taken away for good.
            UnavailableError: it will not be awake by ``until``, cannot be woken now, or the wake failed.
        """
        sleep, began = model.sleep_state, self.decisions.clock()
        sleep.used_at, sleep.used = began, True
        if sleep.awake:
            return 0.0
        if sleep.waiting[tenant] >= TENANT_WAITING or sleep.waiting.total() >= MAX_WAITING:
            raise self.decisions.asleep(model, "and too many requests wait for it", sleep.left_s(began))
        sleep.waiting[tenant] += 1
        me = self.waits.enter(model, tenant)
        try:
            await self._until_awake(model, until, me, wakes=wakes)
        except ModelAsleepError as error:
            # By its own count it may be one of the most used models now, and the next request be let in at once.
            if (
                self.decisions.uses.note(model.name, tenant, began, REFUSED_GAP_S)
                and sleep.asleep
                and error.retry_after_s
            ):
                error.retry_after_s = min(error.retry_after_s, self.decisions.again_s(model, tenant))
            raise
        finally:
            self.waits.leave(model, me)
            # Another of this name may be served by now, with requests that wait for it.
            if not self.waits.any_for(self.decisions.models.get(model.name, model)):
                self.decisions.queue.leave(model.name)
                self.waits.changed()
            sleep.waiting[tenant] -= 1
            if not sleep.waiting[tenant]:
                del sleep.waiting[tenant]
            sleep.used_at = self.decisions.clock()
        return self.decisions.clock() - began

    def served(self, model: ModelSandboxes, tenant: str, came: float) -> None:
        """Count the use of a model by a request that was served and came at this time. One that is refused counts
        seldom: a tenant could keep its models awake, and have those of others sleep, without being served."""
        self.decisions.uses.note(model.name, tenant, came)

    def wake_behind(self, name: str, tenant: str) -> None:
        """Wake a sleeping model for the requests to come, because a route has passed it over: no request waits for it,
        and no other model sleeps for it. Nothing happens where it cannot be woken now, or where other wakes are before
        it."""
        parts = self.decisions
        model = parts.models.get(name)
        if model is None or model.leaving is not Leaving.NO or not model.sleep_state.asleep:
            return
        if parts.held_s(model) or not parts.queue.is_free(len(parts.lefts())):
            return
        if self.route_state(model, tenant) is not ModelState.READY:
            return
        decision = parts.decision(model, tenant)
        if isinstance(decision, Wake) and not decision.evicted:
            model.sleep_state.used_at, model.sleep_state.used = parts.clock(), True
            self.wake(model, decision, REQUEST, tenant)

    async def _until_awake(self, model: ModelSandboxes, until: float, me: Waiter, *, wakes: bool) -> None:
        sleep, look_s = model.sleep_state, 0.0
        if sleep.waking and me.came + (left := sleep.left_s(me.came)) > until:
            raise self.decisions.late(model, left)
        if sleep.asleep and wakes:
            look_s = self._admit(model, until, me)
        # Who was admitted is not refused afterwards because of what others do.
        while not sleep.awake:
            if sleep.waking:
                await self._join(model, until)
                continue
            if not wakes:
                raise FeatureNotAllowedError("this tenant may not use a model that sleeps")
            await me.wait(look_s)
            if sleep.asleep:
                look_s = self._look_again(model, until, me)

    def _look_again(self, model: ModelSandboxes, until: float, me: Waiter) -> float:
        """Look whether a request may go on waiting, and begin the wake if it may; returns the seconds after which it
        looks again if nobody tells it to.

        Raises:
            ApplianceError: it waits in vain.
        """
        sleep, now = model.sleep_state, self.decisions.clock()
        self.decisions.check_there(model)
        waited_s = now - me.came
        if (spare_s := until - now - sleep.estimate_s) < 0:
            raise self.decisions.late(model, sleep.estimate_s)
        if waited_s > ROOM_WAIT_S:
            raise self.decisions.asleep(model, "and others use the memory that it needs", sleep.estimate_s)
        longest_s = min(spare_s, ROOM_WAIT_S - waited_s)
        if not self.waits.is_first(model, me):
            return longest_s
        decision = self.decisions.possible(model, me.tenant)
        return min(longest_s, self._take_turn(model, decision, me.tenant, waited_s, spare_s))

    def _admit(self, model: ModelSandboxes, until: float, me: Waiter) -> float:
        """Let a request wait for the wake of a sleeping model, or begin the wake; returns as ``_look_again``.

        Raises:
            UnavailableError: it cannot be woken now, or not in time.
        """
        tenant, sleep, now = me.tenant, model.sleep_state, me.came
        decision = self.decisions.decide(model, tenant)
        # It joins when it is admitted: one that is refused leaves its model's place as it was.
        turn = self.decisions.turn(model, decision, tenant)
        queue = self.decisions.queue.with_turn(model.name, turn)
        begins_s = self.decisions.begins_s(model, decision, queue)
        spare_s = until - now - begins_s - sleep.estimate_s
        if begins_s > LONGEST_WAIT_S:
            answers_s = self.decisions.answers_s(model, decision, queue)
            raise self.decisions.asleep(model, "and others are woken before it", answers_s)
        # One that cannot be answered in time ends no other model.
        if spare_s < 0 and not (isinstance(decision, Wake) and not decision.evicted and not begins_s):
            raise self.decisions.late(model, begins_s + sleep.estimate_s)
        self.decisions.queue.join(model.name, turn)  # Before its wake is counted: that is none that came before.
        self._grant(model, tenant, kept=decision.kept)
        look_s = self._take_turn(model, decision, tenant, 0.0, spare_s)
        if spare_s < 0:
            raise self.decisions.late(model, sleep.left_s(now))
        return min(look_s if self.waits.is_first(model, me) else ROOM_WAIT_S, spare_s)

    def _take_turn(
        self, model: ModelSandboxes, decision: Wake | Wait, tenant: str, waited_s: float, spare_s: float
    ) -> float:
        """Begin the wake of a model for which requests wait, if it is its turn and there is room. A guest that has
        waited for long waits for guests no more. Returns the seconds after which to look again if nobody says that
        something has changed."""
        parts, due = self.decisions, waited_s >= GUEST_WAIT_S
        parts.queue.join(model.name, parts.turn(model, decision, tenant, due=due))
        if isinstance(decision, Wait):
            if waited_s >= KEPT_WAIT_S and (decision.kept or due):
                parts.queue.reservation.claim(model.name, model.sleep_state.need_bytes, parts.clock())
            return _soonest_s(decision.room_s, GUEST_WAIT_S - waited_s)
        if (held_s := parts.held_s(model)) > 0:
            return _soonest_s(held_s, GUEST_WAIT_S - waited_s)
        if not parts.queue.is_turn(model.name, len(parts.lefts())):
            return _soonest_s(GUEST_WAIT_S - waited_s)
        wait_s = parts.guard.place_wait_s(parts.clock())
        if decision.costs and not due and (parts.queue.has_guests_before(model.name) or wait_s > 0):
            return _soonest_s(wait_s, GUEST_WAIT_S - waited_s)
        if (patient_s := _patience_s(decision, waited_s, spare_s)) > 0:
            return _soonest_s(patient_s)
        self.wake(model, decision, REQUEST, tenant)
        return 0.0

    async def _join(self, model: ModelSandboxes, until: float) -> None:
        """Wait for the end of a wake.

        Raises:
            ModelRemovedError: the model is being taken away for good.
            UnavailableError: the wake failed, or did not end in time.
        """
        try:
            await model.wait_woken(until)
        except UnavailableError as error:
            if model.draining:
                raise
            why = "and was not awake within the request's deadline"
            raise self.decisions.asleep(model, why, LEAST_LEFT_S) from error
        if model.leaving is not Leaving.NO:
            self.decisions.check_there(model)
        if not model.ready:
            raise ModelWakeError(
                f"the model {model.name} was asleep, and its sandboxes did not start; try again",
                retry_after_s=RETRY_AFTER_S,
            )

    def route_state(self, model: ModelSandboxes, tenant: str) -> ModelState:
        """Return how a route takes a model that is not awake: one that cannot be woken for this tenant now is passed
        over, as is one whose memory the requests of others use where the route passes over busy models."""
        sleep, now = model.sleep_state, self.decisions.clock()
        if sleep.waiting[tenant] >= TENANT_WAITING or sleep.waiting.total() >= MAX_WAITING:
            return ModelState.BUSY
        if not sleep.asleep:
            return ModelState.READY
        failed, decision = bool(sleep.cause) and now - sleep.since < FAILED_S, self.decisions.decision(model, tenant)
        if failed or not self.decisions.attached() or self.decisions.guarded_s(model, tenant, decision):
            return ModelState.UNREADY
        if self.decisions.held_s(model) > LONGEST_WAIT_S:
            return ModelState.BUSY
        found = {Wake: ModelState.READY, Wait: ModelState.BUSY, Refuse: ModelState.UNREADY}
        return found[type(decision)]

    def wake(self, model: ModelSandboxes, decision: Wake, reason: str, tenant: str = "") -> None:
        """Begin a wake, once what makes room for it has been put to sleep."""
        for name in decision.evicted:
            self.sleep(self.decisions.models[name], MEMORY)
        log.info("a model wakes", model=model.name, reason=reason, evicted=list(decision.evicted))
        if reason == REQUEST:
            self._grant(model, tenant, kept=decision.kept)
            if decision.costs:
                self.decisions.guard.note_cost(self.decisions.clock())
        model.sleep_state.counted_until = 0.0
        self.decisions.queue.leave(model.name)
        model.begin_wake()
        self.tell(WakeModel(model.name, reason, tenant))
        self.decisions.count(WOKEN, model.name, reason)

    def _grant(self, model: ModelSandboxes, tenant: str, *, kept: bool) -> None:
        """Count a wake that begins now, or once there is room for it."""
        now = self.decisions.clock()
        if now >= model.sleep_state.counted_until:
            self.decisions.guard.note(model.name, tenant, now, kept=kept)
            model.sleep_state.counted_until = now + WINDOW_S

    def sleep(self, model: ModelSandboxes, reason: str) -> None:
        """Put a model to sleep."""
        log.info("a model sleeps", model=model.name, reason=reason)
        model.sleep_state.ending = True
        self.end_own(model.name)
        # Before the channels close: the supervisor starts a sandbox again that ends and shall not sleep.
        self.tell(SleepModel(model.name, reason))
        model.close_links()
        model.fall_asleep()
        self.decisions.count(SLEPT, model.name, reason)

    def look(self) -> None:
        """Put to sleep what nobody has used for long enough, and end what tenants have of their own of a model that
        sleeps; to be called every few seconds."""
        now, counts = self.decisions.clock(), self.decisions.live()
        self.decisions.uses.keep(self.decisions.models.keys())
        for model in self.decisions.models.values():
            if not self.decisions.attached():
                continue
            if sleeps(self.decisions.facts(model, counts), now, model.sleep_state.idle_s):
                self.sleep(model, IDLE)
            elif model.sleep_state.asleep and unused(
                model.sleep_state.keep, model.sleep_state.used_at, now, model.sleep_state.idle_s
            ):
                self.end_unused(model)

    def end_unused(self, model: ModelSandboxes) -> int:
        """End the sandboxes that single tenants have of a sleeping model, unless a request is in them; they were
        booted while it slept. Returns of how many tenants."""
        return 0 if self.decisions.live().get(model) else self.end_own(model.name)

    def welcome(self) -> None:
        """Forget what an earlier supervisor was told; the one that has come says what it has."""
        for model in self.decisions.models.values():
            model.sleep_state.ending = model.sleep_state.heard = False

    def take(self, message: ModelRest) -> None:
        """Take the supervisor's word about a model.

        Raises:
            ValueError: no supervisor of this release sends it.
        """
        least = min(message.need_bytes, message.boot_ms, message.idle_ms)
        if message.state not in SLEEP_STATES or message.keep not in KEEPS or least < 0:
            raise ValueError("a model's state that no supervisor of this release tells")
        model = self.decisions.models.get(message.model)
        if model is None:
            return
        model.changed = partial(self.waits.model_changed, model)
        sleep = model.sleep_state
        sleep.keep, sleep.idle_s = message.keep, message.idle_ms / 1e3
        sleep.need_bytes, sleep.boot_s = message.need_bytes, message.boot_ms / 1e3
        if sleep.ending:
            # Until it has ended what is told is of the time before.
            sleep.ending = message.state != ASLEEP
        elif message.state == WAKING:
            if not sleep.waking:
                model.begin_wake()
            sleep.heard = True
        elif message.state == AWAKE:
            for record in model.records.values() if sleep.asleep else ():
                record.become("booting")  # By a supervisor that has come anew.
            sleep.note_awake(self.decisions.clock())
        elif not sleep.waking or sleep.heard:
            model.fall_asleep(message.cause)
        model.changed()


def _patience_s(decision: Wake, waited_s: float, spare_s: float) -> float:
    """Return the seconds that a request waits for a model that can sleep soon and is used less than the one that could
    at once."""
    patience_s = KEPT_WAIT_S if decision.kept else GUEST_WAIT_S
    return min(patience_s - waited_s, spare_s - 2 * LOOK_S) if decision.cheaper_soon else 0.0


def _soonest_s(*known_s: float) -> float:
    """Return the seconds until a request looks again of itself: at the first of the times that are known, and at
    intervals."""
    return min([RELOOK_S, *(one for one in known_s if one > 0)])
