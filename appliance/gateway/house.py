"""Where a request is worked on: in its model's shared sandboxes, or, as its tenant's class asks, in some of its own.

Sandboxes of single tenants are booted when a request comes for them and stay until others need their place
(``appliance.residency``). The gateway asks the supervisor, which decides for itself whether the policy grants them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from appliance.control import Control, Release, Want
from appliance.errors import NoPlaceLeftError
from appliance.gateway.rooms import ModelRooms
from appliance.residency import NOTHING, Key, Need, NoPlaceError, Residency, ResidentLimits, need_of
from policy.model import IsolationClass, PolicySet

log = structlog.get_logger()

ASK_AGAIN_S = 1.0
"""How often the supervisor is asked for sandboxes that do not come: it may have been started afresh since."""

NO_RESIDENTS = ResidentLimits(engines=0, texts=0, memory_bytes=0, engine_bytes=0)
"""Of an appliance without sandboxes of single tenants: who needs them is refused."""


@dataclass(slots=True)
class Place:
    """Where one request is worked on; ``leave`` is called once it is over."""

    engine: ModelRooms
    """Whose engine computes it."""
    text: ModelRooms
    """Whose text sandbox reads and writes it."""
    _left: Callable[[], None] | None = None

    def leave(self) -> None:
        """The request is over; idempotent."""
        left, self._left = self._left, None
        if left is not None:
            left()


@dataclass(slots=True)
class House:
    """All sandboxes of single tenants, as the gateway knows them. ``tell`` speaks to the supervisor."""

    limits: ResidentLimits = NO_RESIDENTS
    tell: Callable[[Control], None] = lambda _message: None
    clock: Callable[[], float] = time.monotonic
    forget: Callable[[Key], None] = lambda _key: None
    """Told of sandboxes that are not shown any more."""
    _rooms: dict[Key, ModelRooms] = field(default_factory=dict)
    _asked: dict[Key, float] = field(default_factory=dict)
    _residency: Residency = field(init=False)
    _draining: bool = False

    def __post_init__(self) -> None:
        self._residency = Residency(self.limits)

    @property
    def rooms(self) -> tuple[ModelRooms, ...]:
        """Of all that are resident."""
        return tuple(self._rooms.values())

    def find(self, model: str, tenant: str) -> ModelRooms | None:
        """The rooms of one tenant, if it has any now."""
        return self._rooms.get((model, tenant))

    def place(self, shared: ModelRooms, tenant: str, isolation_class: IsolationClass) -> Place:
        """A place for one request of this tenant; its own sandboxes may still have to boot.

        Raises:
            NoPlaceLeftError: its class asks for sandboxes of its own, and there may be no more.
        """
        need = need_of(isolation_class)
        if need == NOTHING:
            return Place(shared, shared)
        key = shared.name, tenant
        try:
            going = self._residency.enter(key, need, self.clock())
        except NoPlaceError as error:
            raise NoPlaceLeftError(
                f"the sandboxes that this tenant's class asks for cannot be had now: {error}",
                retry_after_s=error.retry_after_s or None,
            ) from None
        for other in going:
            self._end(other, "others needed its place")
        rooms = self._rooms.get(key)
        if rooms is None:
            rooms = ModelRooms(shared.name, shared.runner, truncates=shared.truncates, tenant=tenant)
            rooms.draining = self._draining
            self._rooms[key] = rooms
        self._ask(key, rooms, need)
        if not need.engines:
            rooms.capacity = shared.capacity
        return Place(rooms if need.engines else shared, rooms, lambda: self._leave(key))

    def refuse(self, model: str, tenant: str, cause: str) -> None:
        """The supervisor does not boot them: who waits for them hears so."""
        rooms = self._rooms.get((model, tenant))
        if rooms is not None:
            log.warning("sandboxes of a tenant were refused", model=model, tenant=tenant, cause=cause)
            rooms.refuse()
            self._residency.doom((model, tenant))

    def reconsider(self, policy: PolicySet) -> None:
        """A policy came into force: sandboxes that it does not grant any more go once nobody is in them."""
        for key in self._residency.reconsider(policy):
            self._end(key, "the policy grants it no more")

    def begin_drain(self) -> None:
        """Let nobody wait any more."""
        self._draining = True
        for rooms in self._rooms.values():
            rooms.begin_drain()

    def _ask(self, key: Key, rooms: ModelRooms, need: Need) -> None:
        there = rooms.text is not None and (rooms.engine is not None or not need.engines)
        now = self.clock()
        if not there and now - self._asked.get(key, float("-inf")) >= ASK_AGAIN_S:
            self._asked[key] = now
            self.tell(Want(*key))

    def _leave(self, key: Key) -> None:
        if self._residency.leave(key, self.clock()):
            self._end(key, "nobody may use it any more")

    def _end(self, key: Key, reason: str) -> None:
        rooms = self._rooms.pop(key)
        self._asked.pop(key, None)
        log.info("sandboxes of a tenant end", model=key[0], tenant=key[1], reason=reason)
        # Before the channels close: a sandbox that ends by itself is started again where nobody has said otherwise.
        self.tell(Release(*key))
        engine, text = rooms.engine, rooms.text
        rooms.set_engine(None)
        rooms.set_text(None)
        for link in (engine, text):
            if link is not None:
                link.close()
        self.forget(key)
