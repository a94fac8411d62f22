"""Sandboxes of single tenants, and the choice of the sandboxes that work on a request: its model's shared ones, or, as
its tenant's class demands, some of the tenant's own.

A tenant's own sandboxes are booted when a request comes for them and stay until others need their place
(``appliance.common.residency``). The gateway asks the supervisor, which decides for itself whether the policy grants
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from appliance.common.control import Control, Release, Want
from appliance.common.errors import NoPlaceLeftError
from appliance.common.external_config import EXTERNAL
from appliance.common.residency import (
    NOTHING,
    Key,
    Need,
    NoPlaceError,
    Residency,
    ResidentLimits,
    need_of,
    without_engine,
)
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from policy.model import IsolationClass, PolicySet

log = structlog.get_logger()

ASK_AGAIN_S = 1.0
"""Seconds between two requests to the supervisor for sandboxes that do not come: it may have been restarted since."""

NO_RESIDENTS = ResidentLimits(engines=0, texts=0, memory_bytes=0, engine_bytes=0)
"""Limits of an appliance without sandboxes of single tenants: tenants that need some are refused."""


@dataclass(slots=True)
class SandboxPair:
    """Sandboxes that work on one request; ``leave`` is called once it is over."""

    engine: ModelSandboxes
    """Has the engine that computes the request."""
    text: ModelSandboxes
    """Has the text sandbox that encodes and decodes the request."""
    _left: Callable[[], None] | None = None

    def leave(self) -> None:
        """Leave the sandboxes, as the request is over; idempotent."""
        left, self._left = self._left, None
        if left is not None:
            left()


@dataclass(slots=True)
class TenantSandboxes:
    """All sandboxes of single tenants, as the gateway knows them; ``tell`` sends to the supervisor."""

    limits: ResidentLimits = NO_RESIDENTS
    tell: Callable[[Control], None] = lambda _message: None
    clock: Callable[[], float] = time.monotonic
    _models: dict[Key, ModelSandboxes] = field(default_factory=dict)
    _asked: dict[Key, float] = field(default_factory=dict)
    _residency: Residency = field(init=False)
    _draining: bool = False

    def __post_init__(self) -> None:
        self._residency = Residency(self.limits)

    @property
    def resident(self) -> tuple[ModelSandboxes, ...]:
        """Sandboxes of single tenants that are there or are being booted."""
        return tuple(self._models.values())

    def find(self, model: str, tenant: str) -> ModelSandboxes | None:
        """Return the sandboxes of one tenant, if it has any now."""
        return self._models.get((model, tenant))

    def place(self, shared: ModelSandboxes, tenant: str, isolation_class: IsolationClass) -> SandboxPair:
        """Choose the sandboxes for one request of this tenant; its own may still have to boot.

        Raises:
            NoPlaceLeftError: its class asks for sandboxes of its own, and there may be no more.
        """
        need = need_of(isolation_class)
        if shared.runner == EXTERNAL:
            need = without_engine(need)
        if need == NOTHING:
            return SandboxPair(shared, shared)
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
        own = self._models.get(key)
        if own is None:
            own = ModelSandboxes(
                shared.name,
                shared.runner,
                truncates=shared.truncates,
                tenant=tenant,
                templated=shared.templated,
                labels=shared.labels,
            )
            own.draining = self._draining
            self._models[key] = own
        self._ask(key, own, need)
        if not need.engines:
            own.capacity = shared.capacity
        return SandboxPair(own if need.engines else shared, own, lambda: self._leave(key))

    def refuse(self, model: str, tenant: str, cause: str) -> None:
        """End all waits for sandboxes that the supervisor refuses to boot."""
        own = self._models.get((model, tenant))
        if own is not None:
            log.warning("sandboxes of a tenant were refused", model=model, tenant=tenant, cause=cause)
            own.refuse()
            self._residency.doom((model, tenant))

    def reconsider(self, policy: PolicySet) -> None:
        """End sandboxes that a new policy does not grant any more, each once no request is in it."""
        for key in self._residency.reconsider(policy):
            self._end(key, "the policy grants it no more")

    def end_model(self, model: str) -> int:
        """End all sandboxes of a model that is taken away or sleeps; no request is in them any more. Returns of how
        many tenants there were some."""
        keys = [key for key in self._models if key[0] == model]
        for key in keys:
            self._residency.end(key)
            self._end(key, "its model is taken away or sleeps")
        return len(keys)

    def begin_drain(self) -> None:
        """End all waits, now and from now on."""
        self._draining = True
        for own in self._models.values():
            own.begin_drain()

    def _ask(self, key: Key, own: ModelSandboxes, need: Need) -> None:
        there = own.text is not None and (own.engine is not None or not need.engines)
        now = self.clock()
        if not there and now - self._asked.get(key, float("-inf")) >= ASK_AGAIN_S:
            self._asked[key] = now
            self.tell(Want(*key))

    def _leave(self, key: Key) -> None:
        if self._residency.leave(key, self.clock()):
            self._end(key, "nobody may use it any more")

    def _end(self, key: Key, reason: str) -> None:
        own = self._models.pop(key, None)
        if own is None:
            return  # They ended with their model, and its last request has left now.
        self._asked.pop(key, None)
        log.info("sandboxes of a tenant end", model=key[0], tenant=key[1], reason=reason)
        # Before the channels close: the supervisor starts a sandbox again that ends without having been released.
        self.tell(Release(*key))
        own.close_links()
