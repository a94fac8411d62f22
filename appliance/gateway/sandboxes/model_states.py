"""State of a model's sandboxes as a route takes it: by what the gateway knows already, without asking them. Pure."""

from __future__ import annotations

from appliance.common.external_config import EXTERNAL
from appliance.gateway.sandboxes.engine_link import LAST_PLACES, MAX_LIVE_REQUESTS, EngineLink
from appliance.gateway.sandboxes.model_leaving import Leaving
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from policy.model import IsolationClass, ModelState

BUSY_QUEUE = 32
"""Requests that wait in an engine for a row, from which on it is busy: a quarter of the rows that an engine has by
default, so that a burst which the next steps take up is none."""

BUSY_LIVE = MAX_LIVE_REQUESTS - LAST_PLACES
"""Requests in an engine, running or waiting, from which on it is busy whatever it says: a tenant with many gets no
further place."""


def model_state(
    shared: ModelSandboxes | None,
    own: ModelSandboxes | None,
    isolation_class: IsolationClass,
    asleep: ModelState = ModelState.READY,
) -> ModelState:
    """Return the state of a model for a tenant of this class.

    Args:
        shared: the model's shared sandboxes; None where it is not served. A leaving one is as good as none.
        own: the tenant's own sandboxes of the model, if there are any now.
        isolation_class: says which of the two a request is given.
        asleep: state of a model whose shared sandboxes sleep (``SleepControl.route_state``).
    """
    if shared is None or shared.leaving is not Leaving.NO:
        return ModelState.UNREADY
    # A sleeping model that can be woken wakes for the first request, or a route would never come back to it.
    if not shared.sleep_state.awake and not isolation_class.own_engine:
        return asleep
    # Sandboxes of its own are booted for the first request, which waits for them: a model without them yet is as good
    # as one that has them, or it would never get any.
    engines = own if isolation_class.own_engine and shared.runner != EXTERNAL else shared
    texts = own if isolation_class.own_text else shared
    if engines is not None and (engines.engine is None or engines.draining or engines.hangs.get("engine")):
        return ModelState.UNREADY
    if texts is not None and (texts.text is None or texts.hangs.get("text")):
        return ModelState.UNREADY
    engine = None if engines is None else engines.engine
    return ModelState.BUSY if engine is not None and is_busy(engine) else ModelState.READY


def is_busy(engine: EngineLink) -> bool:
    """Return whether requests wait in an engine: ``BUSY_QUEUE`` of them, or any while its KV has no free block. What
    waits and what is free are the engine's own words of its last step; a lie moves requests of routes elsewhere, or
    leaves them until ``BUSY_LIVE``."""
    live = len(engine.live)
    waiting = min(live, engine.stats.waiting)
    return live >= BUSY_LIVE or waiting >= BUSY_QUEUE or (waiting > 0 and engine.stats.free_blocks == 0)
