"""Models that sleep: which may be woken now, what has to sleep for it, and how often. Pure; times are monotonic seconds
of the caller.

A sleeping model has no sandboxes: it takes no processes and no memory. Its first request wakes it. Where not all models
fit, the least used one that is not always kept and has no request makes room (``appliance.common.model_uses``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from appliance.common.figures import size

AWAKE, WAKING, ASLEEP = SLEEP_STATES = ("awake", "waking", "asleep")
"""States of a model's shared sandboxes: they are there or are kept alive, they are being booted after a sleep, there
are none."""

SLEEP_REASONS = OPERATOR, IDLE, MEMORY = ("operator", "idle", "memory")
"""Why a model is put to sleep: by command, without a request for long enough, or another model needs its memory."""

WAKE_REASONS = (OPERATOR, REQUEST := "request")
"""Why a model is woken: by command, or for a request."""

ALWAYS, WHILE_USED, NEVER = KEEPS = ("always", "while_used", "never")
"""Values of a model's ``keep``."""

DEFAULT_WAKE_S = 10.0
"""Expected seconds of a wake before the first boot of the model was measured: a model of 1 GB, started without a
checkpoint in 2 to 5 s, on a machine with other work."""

MOST_WAKES_OF_MODEL = 6
"""Most wakes of one model in ``WINDOW_S``: a wake takes seconds of all cores, and one every ten seconds takes as much
as it gives."""

MOST_WAKES = 20
"""Most wakes of all models in ``WINDOW_S``: wakes run one beside the other, and each takes seconds."""

MOST_WAKES_OF_TENANT = 6
"""Most wakes that requests of one tenant begin in ``WINDOW_S``, of all models together: what it wakes takes processor
and memory from all, and its own excess is refused to it alone."""

KEPT_WAKES = 14
"""Wakes of ``MOST_WAKES`` that are kept for the most used models that fit together. Where more wakes are asked for than
may begin, models that are seldom used, the *guests*, would otherwise keep those asleep. Of the other six a tenant
begins one while those that it has begun are fewer than half of what is left: two at first, so that four tenants get
some. Chosen by simulation, as are the numbers of seconds below (``bench/residency_policies.py``)."""

GUESTS_GAP_S = 40.0
"""Seconds from one time at which a guest takes the place of one of the most used models that fit to the next. Guests
follow each other in that place until the model is asked for that has slept for them."""

STAY_S = 20.0
"""Seconds that a model that was woken several times in ``WINDOW_S`` stays awake, unless the operator has it sleep. Two
tenants whose models do not fit together would otherwise end each other's with each request."""

LEAST_STAY_S = 2.5
"""Seconds that a model stays after its third wake in ``WINDOW_S``. With each further one it stays twice as long, up to
``STAY_S``. After the first two its requests alone keep it: a model that is seldom used gives its place to the next one
like it, so that both together take one place."""

FREE_WAKES = 2
"""Wakes of one model in ``WINDOW_S`` after which its requests alone keep it."""

KEPT_WAIT_S = 10.0
"""Longest that one of the most used models waits for the place of a guest that is in use, in seconds, before it takes
that of another of them: a few wakes with their answers."""

GUEST_WAIT_S = GUESTS_GAP_S
"""Longest that a guest waits for the place of other guests, in seconds; then it takes its turn before others, and the
place of any model. So each that was let wait is served, whatever is asked for beside it."""

WINDOW_S = 60.0
"""Seconds over which wakes are counted."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model, for the decision."""

    name: str
    sleep_state: str
    keep: str
    need_bytes: int
    used_at: float
    """When a request last used it."""
    uses: float = 0.0
    """How much it is used, compared with the others (``ModelUses.of``)."""
    live: int = 0
    """Requests that use it."""
    ending: bool = False
    """Whether it sleeps, and its sandboxes have not ended yet."""
    stays: bool = False
    """Whether it was woken so lately that it does not sleep yet (``stay_s``)."""
    gives_in_s: float = 0.0
    """Seconds until it may sleep, as far as they are known: until it is awake and need not stay any more. When requests
    end is not known."""

    @property
    def gives(self) -> bool:
        """Whether it may be put to sleep for another model, now."""
        return self.sleep_state == AWAKE and self.keep != ALWAYS and not self.live and not self.stays

    @property
    def may_give(self) -> bool:
        """Whether it may be put to sleep for another model, now or once its requests have ended."""
        return self.sleep_state != ASLEEP and self.keep != ALWAYS


@dataclass(frozen=True, slots=True)
class Wake:
    """The model may be woken once these have been put to sleep."""

    evicted: tuple[str, ...] = ()
    kept: bool = True
    """Whether it is one of the most used models that fit together, or there is room for it; else it is a guest."""
    costs: bool = False
    """Whether it is a guest, and one of those sleeps for it."""
    cheaper_soon: bool = False
    """Whether a model that is used less than those that sleep for it is awake and cannot sleep yet; of two guests it
    does not matter to a model of the others."""


@dataclass(frozen=True, slots=True)
class Wait:
    """There is no room before other models may sleep."""

    kept: bool = True
    """As in ``Wake``."""
    room_s: float = 0.0
    """Least seconds until there is room, as far as they are known (``ModelFacts.gives_in_s``)."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """There is no room, and waiting makes none."""

    why: str


def decide(name: str, models: Iterable[ModelFacts], budget: int, available: int) -> Wake | Wait | Refuse:
    """Decide about the wake of a sleeping model.

    Args:
        name: the model.
        models: all models, it among them.
        budget: bytes that all awake models may need together; 0: no such bound.
        available: bytes that the machine has available now.
    """
    known = {one.name: one for one in models}
    wanted = known.pop(name)
    need = wanted.need_bytes
    there = [one for one in known.values() if one.sleep_state != ASLEEP]
    # What boots has not taken all of its memory yet, and what ends has not given it back.
    free = (
        available
        - _sum(one for one in there if one.sleep_state == WAKING)
        + _sum(o for o in known.values() if o.ending)
    )
    if budget:
        free = min(free, budget - _sum(there))
    keeps = _most_used([*known.values(), wanted], name, free + _sum(there))
    evicted: list[ModelFacts] = []
    for one in sorted((one for one in there if one.gives), key=lambda one: (one.uses, one.used_at)):
        if need <= free + _sum(evicted):
            break
        evicted.append(one)
    if need <= free + _sum(evicted):
        going = _needed(evicted, need - free)
        kept = name in keeps or not going
        dear = [one for one in going if not kept or one.name in keeps]
        soon = any(_spares(one, dear) for one in there if one.may_give and not one.gives)
        costs = not kept and any(one.name in keeps for one in going)
        return Wake(tuple(one.name for one in going), kept, costs, soon)
    later = [one for one in there if one.may_give]
    if need <= free + _sum(later):
        return Wait(name in keeps, _room_s(later, need - free))
    bound = f" of the {size(budget)} for models" if budget else ""
    return Refuse(f"it needs about {size(need)}, and {size(max(0, free))}{bound} can be had")


def _most_used(models: Iterable[ModelFacts], wanted: str, room: int) -> set[str]:
    """Return the most used models that fit together: those that would be awake if uses alone decided. One that is
    always kept comes first, unless the operator has it sleep and nobody asks for it: then it takes no room."""
    kept = set[str]()
    for one in sorted(models, key=lambda one: (not _stays_kept(one, wanted), -one.uses, -one.used_at)):
        if one.need_bytes <= room:
            kept.add(one.name)
            room -= one.need_bytes
    return kept


def _stays_kept(model: ModelFacts, wanted: str) -> bool:
    """Return whether a model is always kept, and awake or about to be."""
    return model.keep == ALWAYS and (model.sleep_state != ASLEEP or model.name == wanted)


def _room_s(later: Iterable[ModelFacts], lack: int) -> float:
    """Return the least seconds until so much memory can be had of these models."""
    room_s = 0.0
    for one in sorted(later, key=lambda one: one.gives_in_s):
        if lack <= 0:
            break
        lack -= one.need_bytes
        room_s = one.gives_in_s
    return room_s


def _spares(model: ModelFacts, evicted: Iterable[ModelFacts]) -> bool:
    """Return whether the memory of a model that cannot sleep yet would do in place of one that is used more."""
    return any(model.uses < one.uses and model.need_bytes >= one.need_bytes for one in evicted)


def _sum(models: Iterable[ModelFacts]) -> int:
    return sum(one.need_bytes for one in models)


def _needed(evicted: list[ModelFacts], lack: int) -> list[ModelFacts]:
    """Leave out what turned out not to be needed: a small model before the large one that makes the room."""
    kept = list(evicted)
    for one in reversed(evicted):
        if _sum(kept) - one.need_bytes >= lack:
            kept.remove(one)
    return kept


def sleeps(model: ModelFacts, now: float, idle_s: float) -> bool:
    """Return whether a model has been without a request for long enough to sleep."""
    return model.gives and unused(model.keep, model.used_at, now, idle_s)


def unused(keep: str, used_at: float, now: float, idle_s: float) -> bool:
    """Return whether a model that no request uses has been without one for as long as its ``keep`` asks."""
    return keep == NEVER or now - used_at >= idle_s


@dataclass(frozen=True, slots=True)
class _CountedWake:
    """A wake that was begun for a request."""

    at: float
    model: str
    tenant: str
    kept: bool
    """Whether the model was one of the most used that fit."""


@dataclass(slots=True)
class WakeGuard:
    """Counts wakes, so that models that do not fit together do not take turns all the time."""

    of_model: int = MOST_WAKES_OF_MODEL
    of_all: int = MOST_WAKES
    of_tenant: int = MOST_WAKES_OF_TENANT
    kept: int = KEPT_WAKES
    gap_s: float = GUESTS_GAP_S
    _wakes: deque[_CountedWake] = field(default_factory=deque)
    _cost_at: float = -math.inf
    """When a guest last took the place of a model that is used more."""

    def wait_s(self, model: str, tenant: str, now: float, *, kept: bool = True) -> float:
        """Return the seconds until a wake of this model may be asked for by this tenant; 0: now. ``kept`` as in
        ``Wake``."""
        wakes = self._counted(now)
        counted = (
            ([one.at for one in wakes if one.model == model], self.of_model),
            ([one.at for one in wakes if one.tenant == tenant], self.of_tenant),
            ([one.at for one in wakes], self.of_all),
        )
        waits = [times[-most] + WINDOW_S - now if len(times) >= most else 0.0 for times, most in counted]
        return max(*waits, 0.0 if kept else self._guest_wait_s(tenant, now))

    def _guest_wait_s(self, tenant: str, now: float) -> float:
        """Return the seconds until the tenant has a wake again of those that are not kept. It may begin one while those
        that it has begun are fewer than half of what is left, so that some are left for tenants that come later."""
        guests = [one for one in self._counted(now) if not one.kept]
        for gone in range(len(guests) + 1):
            left = guests[gone:]
            mine = sum(one.tenant == tenant for one in left)
            if 2 * mine < self.of_all - self.kept - len(left):
                return guests[gone - 1].at + WINDOW_S - now if gone else 0.0
        return WINDOW_S

    def guests_begun(self, tenant: str, now: float) -> int:
        """Return how many wakes of guests requests of a tenant have begun in the last minute."""
        return sum(one.tenant == tenant and not one.kept for one in self._counted(now))

    def place_wait_s(self, now: float) -> float:
        """Return the seconds until a guest may take the place of a model that is used more; 0: now."""
        return max(0.0, self._cost_at + self.gap_s - now)

    def note_cost(self, now: float) -> None:
        """Note that a guest takes the place of a model that is used more."""
        self._cost_at = now

    def stay_s(self, model: str, now: float) -> float:
        """Return the seconds that a model stays awake after its last wake; one that the operator woke stays longest."""
        wakes = sum(one.model == model for one in self._counted(now))
        if 0 < wakes <= FREE_WAKES:
            return 0.0
        return min(STAY_S, LEAST_STAY_S * 2 ** (wakes - FREE_WAKES - 1)) if wakes else STAY_S

    def note(self, model: str, tenant: str, now: float, *, kept: bool = True) -> None:
        """Count a wake that a request of this tenant has asked for."""
        self._wakes.append(_CountedWake(now, model, tenant, kept))

    def _counted(self, now: float) -> deque[_CountedWake]:
        while self._wakes and now - self._wakes[0].at >= WINDOW_S:
            self._wakes.popleft()
        return self._wakes


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepOutcome:
    """Result of a command that puts a model to sleep or wakes it."""

    ok: bool
    state: str
    """State of the model after it, one of ``SLEEP_STATES``; empty where there is none."""
    message: str
    """One line for the operator."""
    found: bool = True
    """Whether there is such a model."""
