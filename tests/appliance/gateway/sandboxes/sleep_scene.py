"""Models that sleep, in virtual time: the control of the gateway, and a stand-in for what tells it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from appliance.common.control_models import ModelRest
from appliance.common.sleep_rules import ASLEEP, STAY_S, WAKING
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes, SandboxRecord
from appliance.gateway.sandboxes.sleep_commands import SleepCommands
from appliance.gateway.sandboxes.sleep_control import SleepControl
from appliance.gateway.sandboxes.sleep_decisions import SleepDecisions
from tests.appliance.gateway.request.virtual_time import virtual_now

GIB = 1 << 30
WAKE_MS = 5_000
"""What the supervisor says that a boot took."""


class FakeLink:
    """A link that can be closed."""

    ready = None
    generation = 1
    hang = ""
    table = None

    def close(self) -> None:
        """Nothing is open."""

    def set_quotas(self, _quotas: object) -> None:
        """As an engine's."""


def sandboxes(name: str) -> ModelSandboxes:
    """Sandboxes of a model, by the loop's time."""
    one = ModelSandboxes(name)
    one.clock = virtual_now
    return one


@dataclass
class Scene:
    """Models of one GiB, of which two fit, and what the supervisor was told."""

    told: list[Any] = field(default_factory=list)
    counted: list[tuple[str, str, str]] = field(default_factory=list)
    live: dict[str, int] = field(default_factory=dict)
    attached: bool = True
    own: dict[str, int] = field(default_factory=dict)
    """Tenants with sandboxes of their own, by model."""

    def __post_init__(self) -> None:
        self.models = {name: sandboxes(name) for name in "abc"}
        self.decisions = SleepDecisions(
            self.models,
            lambda: self.attached,
            lambda *what: self.counted.append(what),
            lambda: {self.models[name]: count for name, count in self.live.items()},
            budget=2 * GIB,
            available=lambda: 8 * GIB,
            clock=virtual_now,
        )
        self.control = SleepControl(self.decisions, self.told.append, lambda name: self.own.pop(name, 0))
        self.commands = SleepCommands(self.control)
        for name, one in self.models.items():
            one.records |= {role: SandboxRecord() for role in ("engine", "text")}
            self.word(name, ASLEEP)

    def word(self, name: str, state: str, cause: str = "") -> None:
        """Take the supervisor's word."""
        self.control.take(ModelRest(name, state, cause, GIB, WAKE_MS, "while_used", 60_000))

    def come_up(self, name: str) -> None:
        """Have the sandboxes of a waking model there."""
        one = self.models[name]
        one.engine, one.text = FakeLink(), FakeLink()  # type: ignore[assignment]
        one._tell()

    def awake(self, name: str, used_at: float) -> None:
        """Have a model awake that was woken long ago."""
        self.word(name, WAKING)
        self.come_up(name)
        self.models[name].sleep_state.since = used_at - STAY_S
        self.models[name].sleep_state.wake_s = WAKE_MS / 1e3
        self.models[name].sleep_state.used_at = used_at

    def free(self, *names: str) -> None:
        """Have the requests of models end."""
        for name in names:
            self.live[name] = 0
        self.control.waits.changed()

    def ask(self, name: str, seconds: float = 60.0, tenant: str = "t") -> asyncio.Task[float]:
        """A request with a deadline."""
        return asyncio.create_task(self.control.awaken(self.models[name], virtual_now() + seconds, tenant))


async def turns() -> None:
    """Let all tasks run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def used(scene: Scene, counts: dict[str, int], since_s: float = -1_000.0) -> None:
    """Have models used so often, long ago or soon."""
    for name, count in counts.items():
        for number in range(count):
            scene.decisions.uses.note(name, f"u-{number}", virtual_now() + since_s + 2 * number)
