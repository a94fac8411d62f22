"""Sleeping models from the point of view of one request: it wakes its model, and what it was served counts as a use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from appliance.common.errors import ApplianceError, FeatureNotAllowedError
from appliance.gateway.sandboxes.model_leaving import Leaving, model_leaves

if TYPE_CHECKING:
    from appliance.gateway.request.lifecycle import Lifecycle


async def awaken(life: Lifecycle, until: float) -> None:
    """Note a thaw, have the model woken that a route passed over because it sleeps, and wait for the shared sandboxes
    of a request to be woken, where it uses them and they sleep: before its first attempt, or since a supervisor that
    has come anew left them asleep.

    Raises:
        ApplianceError: the model will not be awake by ``until``, in monotonic seconds, or may not be woken.
    """
    sleep = life.dependencies.sleep
    if life.pair.text.frozen or life.pair.engine.frozen:
        life.trace.annotate(sandbox_thawed=True)
    if sleep is None or life.model not in (life.pair.engine, life.pair.text):
        return
    admitted = life.admitted
    assert admitted is not None, "the policy has agreed"
    tenant, wakes = life.principal.tenant, admitted.obligations.wakes
    if life.outcome.came is None:
        life.outcome.came = sleep.decisions.clock()
    if life.passed_over and wakes:
        sleep.wake_behind(life.passed_over, tenant)
    with life.waiting():
        try:
            waited_s = await sleep.awaken(life.model, until, tenant, wakes=wakes)
        except FeatureNotAllowedError as error:  # It fell asleep after the policy had looked.
            error.by_rule(f"tenants.{tenant}.features.wake", admitted.policy)
            raise
        except ApplianceError as error:
            if life.model.leaving is Leaving.NO:
                raise
            call, again = life.call, life.model.leaving is Leaving.AGAIN
            routed = call.alias not in ("", call.adapter)  # The route leads elsewhere soon.
            raise model_leaves(call.alias or life.model.name, again=again or routed, running=False) from error
    if life.pair.text is not life.pair.engine:
        # A model that has begun asleep announces its limits at its first wake, after the text sandbox was chosen.
        life.pair.text.capacity = life.pair.engine.capacity
    if waited_s:
        life.trace.annotate(model_waited_for_wake_ms=round(1e3 * waited_s))


def note_use(life: Lifecycle, *, served: bool) -> None:
    """Count the use of the model by a request that has ended. ``served``: it was answered, or an engine took it up and
    it is charged; what was refused before costs its tenant nothing and counts nothing, but for a model's rest: that
    begins anew with each request that was admitted."""
    life.model.sleep_state.used_at = time.monotonic()
    sleep, came = life.dependencies.sleep, life.outcome.came
    if sleep is None:
        return
    if came is not None and served:
        sleep.served(life.model, life.principal.tenant, came)
    sleep.waits.changed()  # Its model may give its place to another now.
