"""The operator's commands that put a model to sleep and wake it."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.common.errors import UnavailableError
from appliance.common.figures import counted
from appliance.common.sleep_rules import ASLEEP, AWAKE, OPERATOR, Refuse, SleepOutcome, Wake
from appliance.gateway.sandboxes.model_leaving import Leaving
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.sleep_control import SleepControl

WAKE_PATIENCE_S = 600.0
"""Longest that the operator's command waits for a wake, in seconds: as long as a boot may take."""


@dataclass(frozen=True, slots=True)
class SleepCommands:
    """Carries the commands out. All methods run in one event loop."""

    control: SleepControl

    def put_to_sleep(self, name: str) -> SleepOutcome:
        """Put a model to sleep by the operator's command."""
        if (model := self._find(name)) is None:
            return SleepOutcome(ok=False, found=False, state="", message=f"no model {name} is served")
        sleep = model.sleep_state
        if sleep.asleep and not (live := self.control.decisions.live().get(model, 0)):
            ended = self.control.end_unused(model)
            also = f"; the sandboxes of {counted(ended, 'tenant')} end" if ended else ""
            return SleepOutcome(ok=True, state=ASLEEP, message=f"{name} is asleep already{also}")
        if sleep.asleep:
            message = f"{name} is asleep, and sandboxes of single tenants are in use: {counted(live, 'request')}"
            return SleepOutcome(ok=False, state=ASLEEP, message=message)
        if sleep.waking or not model.ready or not self.control.decisions.attached():
            return SleepOutcome(ok=False, state=sleep.state, message=f"{name} is starting; try again once it serves")
        if live := self.control.decisions.live().get(model, 0):
            return SleepOutcome(ok=False, state=sleep.state, message=f"{name} is in use: {counted(live, 'request')}")
        self.control.sleep(model, OPERATOR)
        return SleepOutcome(ok=True, state=ASLEEP, message=f"{name} sleeps; a request wakes it")

    async def wake_up(self, name: str) -> SleepOutcome:
        """Wake a model by the operator's command, and wait until it is awake."""
        if (model := self._find(name)) is None:
            return SleepOutcome(ok=False, found=False, state="", message=f"no model {name} is served")
        sleep, began = model.sleep_state, self.control.decisions.clock()
        if sleep.awake:
            return SleepOutcome(ok=True, state=AWAKE, message=f"{name} is awake already")
        if sleep.asleep:
            if not self.control.decisions.attached():
                return SleepOutcome(ok=False, state=ASLEEP, message="there is no supervisor that could wake it")
            decision = self.control.decisions.decision(model)
            if not isinstance(decision, Wake):
                why = decision.why if isinstance(decision, Refuse) else "requests use the memory that it needs"
                return SleepOutcome(ok=False, state=ASLEEP, message=f"{name} cannot be woken now: {why}")
            self.control.wake(model, decision, OPERATOR)
        try:
            await model.wait_woken(self.control.decisions.clock() + WAKE_PATIENCE_S)
        except UnavailableError as error:
            return SleepOutcome(ok=False, state=sleep.state, message=error.message)
        if model.leaving is not Leaving.NO:
            return SleepOutcome(ok=False, state=sleep.state, message=f"{name} is being taken away")
        if not model.ready:
            cause = sleep.cause or next((one.cause for one in model.records.values() if one.cause), "")
            return SleepOutcome(ok=False, state=sleep.state, message=f"{name} did not wake: {cause}")
        sleep.used_at = self.control.decisions.clock()
        return SleepOutcome(
            ok=True, state=AWAKE, message=f"{name} woke in {self.control.decisions.clock() - began:.1f} s"
        )

    def _find(self, name: str) -> ModelSandboxes | None:
        model = self.control.decisions.models.get(name)
        return model if model is not None and model.leaving is Leaving.NO else None
