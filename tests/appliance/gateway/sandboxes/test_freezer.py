"""Which sandboxes are frozen, when, and that the word to thaw is sent before anything that needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from appliance.common.control import Freeze, Frozen
from appliance.gateway.sandboxes.freezer import Freezer
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes, SandboxRecord
from appliance.gateway.sandboxes.probe import Probe
from policy.loader import Source, load_policy

TENANT = '  {name}: {{credentials: ["key:{name}"], models: ["{models}"], {rest}}}\n'


def policy(**tenants: str) -> Any:
    """A policy of these tenants; the text says what else stands there."""
    lines = [TENANT.format(name=name, models="*", rest=rest) for name, rest in tenants.items()]
    return load_policy([Source("p.yaml", "version: 1\ntenants:\n" + "".join(lines))])


@dataclass
class FakeLink:
    """A link of which the freezer sees what it counts."""

    generation: int = 1
    frames: int = 0
    occupied: bool = False
    closed: bool = False
    wake: Any = None
    probe: Probe = field(default_factory=lambda: Probe(0.0))

    def send(self) -> None:
        """As ``Link.send``: wakes before it sends."""
        self.frames += 1
        if self.wake is not None:
            self.wake()


@dataclass
class Room:
    """A freezer with a clock, and what it told."""

    models: list[ModelSandboxes]
    now: float = 100.0
    told: list[Freeze] = field(default_factory=list)
    thaws: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.freezer = Freezer(self.told.append, 30.0, self.thaws.append, lambda: self.now)

    def pass_s(self, seconds: float) -> list[Freeze]:
        """Look after so many seconds; what was told meanwhile."""
        self.now += seconds
        before = len(self.told)
        self.freezer.look(self.models)
        return self.told[before:]


def model(tenant: str = "", **links: Any) -> ModelSandboxes:
    """A model whose sandboxes are there."""
    one = ModelSandboxes("m", tenant=tenant)
    for role in ("engine", "text"):
        one.records[role] = SandboxRecord(state="ready", generation=1)
        setattr(one, role, links.get(role) or FakeLink())
    return one


@pytest.fixture
def room() -> Room:
    """One model, which may be frozen, seen once."""
    room = Room([model()])
    room.freezer.apply(policy(a="freeze_idle: true"), ["m"])
    room.pass_s(0)
    return room


BOTH = [Freeze("m", "engine", 1, 1), Freeze("m", "text", 1, 1)]
THAWED = [Freeze("m", "engine", 1, 0), Freeze("m", "text", 1, 0)]


def test_idle_sandboxes_are_frozen_once_and_thawed_by_the_first_frame(room: Room) -> None:
    """Both of the model, after the time and not before, and once; a frame to one of them thaws both, and the time
    begins anew."""
    assert room.pass_s(29) == []
    assert room.pass_s(1) == BOTH
    assert room.pass_s(1_000) == []
    before = len(room.told)
    room.models[0].text.send()
    assert room.told[before:] == THAWED
    room.models[0].engine.send()
    assert room.told[before:] == THAWED, "once"
    assert room.thaws == ["m"]
    assert room.pass_s(1) == room.pass_s(29) == []
    assert room.pass_s(1) == BOTH


def test_what_owes_an_answer_to_a_probe_is_not_frozen(room: Room) -> None:
    """A sandbox that hangs would count as ready once it is frozen; it is frozen as soon as it has answered, and the
    quiet time goes on meanwhile."""
    probe = room.models[0].text.probe
    number = probe.ask(room.now)
    assert room.pass_s(31) == room.pass_s(1_000) == []
    assert probe.answer(number, room.now)
    assert room.pass_s(1) == BOTH


@pytest.mark.parametrize("what", ["frames", "occupied", "generation"])
def test_what_goes_on_keeps_them_thawed(what: str, room: Room) -> None:
    """A frame either way, an answer that is outstanding, another sandbox in its place: the time begins anew."""
    link = room.models[0].engine
    room.pass_s(29)
    setattr(link, what, True if what == "occupied" else 7)
    assert room.pass_s(29) == room.pass_s(29) == []
    if what == "occupied":
        link.occupied = False
        assert room.pass_s(1_000) == []
    assert len(room.pass_s(31)) == 2


def test_a_model_that_lacks_a_sandbox_is_left_alone(room: Room) -> None:
    """Its other sandbox is needed the moment it is back."""
    room.models[0].engine = None
    assert room.pass_s(100) == room.pass_s(100) == []


@pytest.mark.parametrize(("adapter", "frozen"), [("m", False), ("other", True)])
def test_a_tenant_with_an_adapter_alone_must_allow_it_too(adapter: str, frozen: bool) -> None:
    """It uses the model's sandboxes; control: one whose adapter is another model's does not. Both have the same list of
    models."""
    text = TENANT.format(name="a", models="*", rest="freeze_idle: true")
    text += TENANT.format(name="b", models="none", rest="freeze_idle: true")
    text += TENANT.format(name="c", models="none", rest=f'adapters: ["{adapter}:x"]')
    room = Room([model()])
    room.freezer.apply(load_policy([Source("p.yaml", f"version: 1\ntenants:\n{text}")]), ["m"])
    room.pass_s(0)
    assert room.pass_s(100) == (BOTH if frozen else [])


@pytest.mark.parametrize(
    ("tenants", "shared", "own"),
    [
        ({"a": "freeze_idle: true"}, True, False),
        ({"a": "freeze_idle: true", "b": "weight: 1"}, False, False),
        ({"a": "freeze_idle: true", "b": "freeze_idle: true"}, True, False),
        ({"a": "freeze_idle: true", "b": "class: strict, kv: {reservation: 10%}"}, False, False),
        ({"a": "freeze_idle: true", "own": "class: dedicated"}, True, False),
        ({"a": "weight: 1", "own": "class: dedicated, freeze_idle: true"}, False, True),
        ({}, False, False),
    ],
)
def test_all_tenants_of_a_sandbox_must_allow_it(tenants: dict[str, str], shared: bool, own: bool) -> None:
    """A shared engine is frozen only where each tenant that may use it allows it, the strict ones never; sandboxes of
    one tenant follow that tenant alone. Without a word in the policy nothing is frozen."""
    room = Room([model(), model("own")])
    room.freezer.apply(policy(**(tenants or {"a": "weight: 1"})), ["m"])
    room.pass_s(0)
    assert {one.tenant for one in room.pass_s(100)} == {*([""] if shared else []), *(["own"] if own else [])}


def test_a_tenant_that_comes_by_an_alias_must_allow_it_too() -> None:
    """A route that leads a tenant to the model makes it one of its tenants; a route to another (control) does not."""
    for target, frozen in (("other", 2), ("m", 0)):
        text = 'version: 1\ntenants:\n  a: {credentials: ["key:a"], models: ["m"], freeze_idle: true}\n'
        text += f'  b: {{credentials: ["key:b"], models: ["fast"]}}\nroutes: {{fast: {{to: [{{model: {target}}}]}}}}\n'
        other = Room([model()])
        other.freezer.apply(load_policy([Source("p.yaml", text)]), ["m", "other"])
        other.pass_s(0)
        assert len(other.pass_s(60.0)) == frozen


def test_a_policy_that_forbids_it_thaws(room: Room) -> None:
    """At the next look, and what is not frozen stays so."""
    assert room.pass_s(30) == BOTH
    room.freezer.apply(policy(a="freeze_idle: false"), ["m"])
    assert room.pass_s(2) == THAWED
    assert room.pass_s(1_000) == []


def test_what_the_supervisor_says_is_shown_and_a_refusal_is_tried_again(room: Room) -> None:
    """Frozen is what the supervisor has frozen; one that computes is left alone, both are thawed, and the time begins
    anew. What it says of another generation is nothing."""
    records = room.models[0].records
    room.pass_s(30)
    room.freezer.take(Frozen("m", "engine", 1, 1))
    room.freezer.take(Frozen("m", "text", 2, 1))
    assert (records["engine"].frozen, records["text"].frozen, room.models[0].frozen) == (True, False, True)
    room.freezer.take(Frozen("m", "text", 1, 0))
    assert room.told[-2:] == THAWED
    room.freezer.take(Frozen("m", "engine", 1, 0))
    assert not room.models[0].frozen
    assert room.pass_s(29) == []
    assert room.pass_s(1) == BOTH
    room.freezer.take(Frozen("unknown", "engine", 1, 1))
    with pytest.raises(KeyError):
        room.freezer.take(Frozen("m", "kitchen", 1, 1))


def test_when_a_frozen_one_ends_the_other_does_not_stay_frozen(room: Room) -> None:
    """Its lone companion is thawed at the next look, and nothing is said of what has ended."""
    assert room.pass_s(30) == BOTH
    room.models[0].engine.closed = True
    room.models[0].engine = None
    assert room.pass_s(2) == [THAWED[1]]
    assert room.models[0].text.wake is None
    assert room.pass_s(1_000) == []
