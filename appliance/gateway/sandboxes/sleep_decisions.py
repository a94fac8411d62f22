"""Facts and decisions about models that sleep, of one gateway: what a request of a sleeping model has to expect.

No model is woken or put to sleep here; ``appliance.gateway.sandboxes.sleep_control`` carries out what is decided.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from appliance.common.errors import ModelAsleepError, UnavailableError
from appliance.common.model_memory import machine_memory
from appliance.common.model_uses import ModelUses
from appliance.common.sleep_rules import ModelFacts, Refuse, Wait, Wake, WakeGuard, decide
from appliance.common.wake_queue import WakeQueue, WakeTurn, most_at_once
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from appliance.gateway.sandboxes.model_leaving import Leaving, model_leaves
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes

log = structlog.get_logger()

COUNTED = WOKEN, SLEPT, TURNED_AWAY = ("woken", "slept", "turned_away")
"""What is counted of a model: it is woken, it is put to sleep, a request is refused because it sleeps."""


@dataclass(slots=True)
class SleepDecisions:
    """Decides about sleeping models; all methods run in one event loop."""

    models: Mapping[str, ModelSandboxes]
    """Shared sandboxes by model."""
    attached: Callable[[], bool]
    """Whether a supervisor is there."""
    count: Callable[[str, str, str], None] = lambda _what, _model, _reason: None
    """Called with one of ``COUNTED``, the model and the reason."""
    live: Callable[[], Mapping[ModelSandboxes, int]] = dict
    """Counts the requests that use each model, in one pass over all requests."""
    budget: int = 0
    """Bytes that all awake models may need together; 0: what the machine has available."""
    available: Callable[[], int] = lambda: machine_memory().available
    clock: Callable[[], float] = time.monotonic
    guard: WakeGuard = field(default_factory=WakeGuard)
    queue: WakeQueue = field(default_factory=lambda: WakeQueue(most_at_once(len(os.sched_getaffinity(0)))))
    uses: ModelUses = field(default_factory=ModelUses)

    def begins_s(self, model: ModelSandboxes, decision: Wake | Wait, queue: WakeQueue) -> float:
        """Return the expected seconds until the wake of a sleeping model begins that has joined this queue."""
        turn_s = max(self.held_s(model), queue.left_s(model.name, self.lefts(), self._wake_s, self.guard.gap_s))
        if isinstance(decision, Wait):
            return max(turn_s, decision.room_s)
        dear = decision.costs and not decision.cheaper_soon
        return turn_s + (self.guard.place_wait_s(self.clock()) if dear else 0.0)

    def answers_s(self, model: ModelSandboxes, decision: Wake | Wait, queue: WakeQueue) -> float:
        """Return the expected seconds until a sleeping model is awake that has joined this queue, of who is refused."""
        place_s = self.guard.place_wait_s(self.clock())
        begins_s = max(self.held_s(model), queue.expected_s(model.name, self.lefts(), self._wake_s, place_s))
        if isinstance(decision, Wait):
            begins_s = max(begins_s, decision.room_s)
        elif decision.costs:
            begins_s = max(begins_s, place_s)
        return begins_s + model.sleep_state.estimate_s

    def again_s(self, model: ModelSandboxes, tenant: str) -> float:
        """Return the expected seconds until a request for a sleeping model is answered that comes again at the best
        time, after one that was refused and counted."""
        decision = self.decision(model, tenant)
        if isinstance(decision, Refuse):
            return math.inf
        counted = self.clock() < model.sleep_state.counted_until
        wait_s = 0.0 if counted else self.guarded_s(model, tenant, decision)
        queue = self.queue.with_turn(model.name, self.turn(model, decision, tenant))
        return max(wait_s, self.answers_s(model, decision, queue))

    def held_s(self, model: ModelSandboxes) -> float:
        """Return the seconds for which the wake of a model waits, at most, because a larger one reserves room."""
        return self.queue.reservation.left_s(model.name, model.sleep_state.need_bytes, self.clock())

    def _wake_s(self, name: str) -> float:
        """Return the expected seconds of a wake; none of a model that is gone, for which requests wait that are told so
        in this turn of the loop."""
        model = self.models.get(name)
        return 0.0 if model is None else model.sleep_state.estimate_s

    def turn(self, model: ModelSandboxes, decision: Wake | Wait, tenant: str, *, due: bool = False) -> WakeTurn:
        """Return the turn of a model for which a tenant's request waits."""
        begun = self.guard.guests_begun(tenant, self.clock())
        return WakeTurn(
            decision.kept,
            model.sleep_state.need_bytes,
            isinstance(decision, Wake),
            due=due,
            held=self.held_s(model) > 0,
            begun=begun,
        )

    def lefts(self) -> list[float]:
        """Return the expected seconds that are left of each wake. A model that leaves is not woken any more, and nobody
        says so."""
        now, there = self.clock(), [one for one in self.models.values() if one.leaving is Leaving.NO]
        return [one.sleep_state.left_s(now) for one in there if one.sleep_state.waking]

    def decide(self, model: ModelSandboxes, tenant: str) -> Wake | Wait:
        """Decide about a sleeping model that a tenant's request needs, which has just come.

        Raises:
            UnavailableError: it cannot be woken now.
        """
        decision = self.possible(model, tenant)
        counted = self.clock() < model.sleep_state.counted_until
        wait_s = 0.0 if counted else self.guarded_s(model, tenant, decision)
        if wait_s:
            queue = self.queue.with_turn(model.name, self.turn(model, decision, tenant))
            again_s = max(wait_s, self.answers_s(model, decision, queue))
            raise self.asleep(model, "and models were woken too often in the last minute", again_s)
        return decision

    def check_there(self, model: ModelSandboxes) -> None:
        """Check that a model can be woken by anybody.

        Raises:
            ModelRemovedError: it is being taken away for good.
            UnavailableError: it is being started anew, or no supervisor is there.
        """
        if model.leaving is not Leaving.NO:
            raise model_leaves(model.name, again=model.leaving is Leaving.AGAIN, running=False)
        if not self.attached():
            raise UnavailableError(
                f"the model {model.name} is not available at the moment", retry_after_s=RETRY_AFTER_S
            )

    def possible(self, model: ModelSandboxes, tenant: str) -> Wake | Wait:
        """Decide whether there is room for a sleeping model.

        Raises:
            UnavailableError: there will be none, or nobody is there who could wake it.
        """
        self.check_there(model)
        decision = self.decision(model, tenant)
        if isinstance(decision, Refuse):
            log.warning("a model cannot be woken", model=model.name, reason=decision.why)
            raise self.asleep(model, "and there is no memory for it", model.sleep_state.estimate_s)
        return decision

    def guarded_s(self, model: ModelSandboxes, tenant: str, decision: Wake | Wait | Refuse) -> float:
        """Return the seconds until a wake may begin, so that not too many do; 0: now."""
        return self.guard.wait_s(
            model.name, tenant, self.clock(), kept=not isinstance(decision, Refuse) and decision.kept
        )

    def decision(self, model: ModelSandboxes, tenant: str = "") -> Wake | Wait | Refuse:
        """Decide about a sleeping model by what is there now; ``tenant``: whose request needs it, empty for the
        operator's command."""
        counts = self.live()
        facts = (self.facts(one, counts, tenant if one is model else "") for one in self.models.values())
        return decide(model.name, facts, self.budget, self.available())

    def facts(self, model: ModelSandboxes, counts: Mapping[ModelSandboxes, int], asked_by: str = "") -> ModelFacts:
        """Return what is known of one model, with the requests that use each; ``asked_by`` as in ``ModelUses.of``."""
        sleep = model.sleep_state
        # One that is being taken away gives its memory back without being told to.
        live = counts.get(model, 0) if model.ready and model.leaving is Leaving.NO else 1
        facts = sleep.state, sleep.keep, sleep.need_bytes, sleep.used_at, self.uses.of(model.name, asked_by)
        stays_s = sleep.stays_for_s(now := self.clock(), self.guard.stay_s(model.name, now))
        gives_in_s = sleep.left_s(now) if sleep.waking else stays_s
        return ModelFacts(model.name, *facts, live=live, ending=sleep.ending, stays=stays_s > 0, gives_in_s=gives_in_s)

    def late(self, model: ModelSandboxes, left_s: float) -> ModelAsleepError:
        """Return the error of a request whose deadline is before the end of the wake, in so many seconds; counts it."""
        return self.asleep(model, "and its wake takes longer than the request's deadline", left_s)

    def asleep(self, model: ModelSandboxes, why: str, retry_after_s: float) -> ModelAsleepError:
        """Return the error of a request that is refused because its model sleeps; counts it."""
        self.count(TURNED_AWAY, model.name, "")
        return ModelAsleepError(f"the model {model.name} is asleep, {why}", retry_after_s=retry_after_s)
