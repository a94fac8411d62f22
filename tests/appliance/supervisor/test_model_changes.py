"""Changes of models that meet, and files that cannot be read: refused in words, and the supervisor goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.config_loader import Resolved
from appliance.common.control import Control
from appliance.common.control_models import ApplyModels, ModelsReviewed, ReviewModels
from appliance.common.model_digests import DigestCache
from appliance.common.model_memory import Memory, ModelNeed
from appliance.common.served_models import ModelDifference
from appliance.supervisor import model_changes
from appliance.supervisor.adapters import leave_out, with_adapters
from appliance.supervisor.gate import Latch
from appliance.supervisor.lifecycle import Life, State
from appliance.supervisor.model_changes import ModelChanges, ServedNow, lacking
from appliance.supervisor.model_keepers import ModelKeepers
from isolation.ipc.messages import Role


class Room:
    """Changes over no model at all, what they published, and how often the supervisor would have ended."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.published: list[Control] = []
        self.failed = 0
        self.problem = problem
        keepers = ModelKeepers(lambda _plan: pytest.fail("nothing boots"), self._fail)
        config = ApplianceConfig.model_construct(models=())
        self.changes = ModelChanges(config, keepers, None, self._publish, lambda _one: None, self._reread)  # type: ignore[arg-type]

    def _publish(self, message: Control, _fds: tuple[int, ...]) -> bool:
        self.published.append(message)
        return True

    def _fail(self) -> None:
        self.failed += 1

    def _reread(self) -> Resolved:
        assert self.problem is not None
        raise self.problem

    async def problems(self, request: str) -> list[str]:
        """What a review is answered."""
        self.changes.take(ReviewModels(request, "00"))
        async with asyncio.timeout(10):
            while not self.published:
                await asyncio.sleep(0.01)
        answer = self.published.pop()
        assert isinstance(answer, ModelsReviewed) and answer.request == request
        return answer.problems


async def test_a_file_that_cannot_be_read_is_a_problem_and_no_defect() -> None:
    """The answer names it, and the next review is taken."""
    room = Room(PermissionError(13, "Permission denied", "/srv/models/m"))
    for request in ("one", "two"):
        (problem,) = await room.problems(request)
        assert "/srv/models/m" in problem
    assert room.failed == 0


async def test_a_change_waits_for_the_one_before() -> None:
    """While models come and go neither a review nor an order is taken. Control: afterwards a review is."""
    room = Room(PermissionError(13, "Permission denied", "/m"))
    room.changes._changing = True
    assert await room.problems("one") == ["another change of the models is under way; try again in a moment"]
    room.changes.take(ApplyModels("one"))
    assert not room.changes._tasks
    room.changes._changing = False
    assert "/m" in (await room.problems("two"))[0]


def test_an_adapter_whose_folder_cannot_be_entered_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant's folder that only its owner may enter keeps nothing else from starting."""
    from types import SimpleNamespace

    from appliance.common.catalog import ModelFiles
    from appliance.supervisor import adapters

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "a"))

    monkeypatch.setattr(adapters, "read_adapter", refused)
    model = SimpleNamespace(name="m", adapters=[SimpleNamespace(name="a", path=tmp_path / "a", digest="00")])
    files = ModelFiles.__new__(ModelFiles)
    monkeypatch.setattr(adapters, "replace", lambda _files, adapters: adapters)
    assert with_adapters(files, model, DigestCache.load(None), leave_out) == ()  # type: ignore[arg-type]


class Kept:
    """A keeper as far as its model's end goes."""

    def __init__(self, plan: object) -> None:
        self.plan, self.life, self._stopped = plan, Life(), asyncio.Event()
        self.boot_s, self.gate = 0.0, Latch()
        self.first_boot: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Boots five times, until it is stopped."""
        for _ in range(5):
            self.life = replace(self.life, generation=self.life.generation + 1)
        await self._stopped.wait()

    def stop(self) -> None:
        """End."""
        self._stopped.set()


async def test_a_model_that_comes_again_goes_on_counting() -> None:
    """Sandboxes of a model that ended and came again have generations that none before had, so a late word about an
    earlier one ends nothing; its first boot is no restart. Control: the first life begins at nothing."""
    made: list[Kept] = []

    def make(plan: object) -> Kept:
        made.append(Kept(plan))
        return made[-1]

    keepers = ModelKeepers(make, lambda: None)  # type: ignore[arg-type]
    entry, files = SimpleNamespace(name="m", keep="always"), SimpleNamespace(digest="0", signer="")
    planned: Any = SimpleNamespace(entry=entry, files=files, plans=(SimpleNamespace(name="engine-m"),))
    for life in range(2):
        keepers.add(planned)
        assert (made[-1].life.generation, made[-1].life.restarts) == ((5, -1) if life else (0, 0))
        keepers.start("m")
        await asyncio.sleep(0)
        keepers.leave("m", again=not life)
        keepers.drained("m")
        await keepers.end("m", 5)
    assert made[-1].life.generation == 10


GIB = 1 << 30


def planned_model(name: str, keep: str, about: int) -> Any:
    """A plan of a model that needs so much."""
    need = ModelNeed(name, about, about, 0, engine=0)
    return SimpleNamespace(entry=SimpleNamespace(name=name, keep=keep), need=need)


def test_sleeping_models_take_no_memory_from_one_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three gigabytes are available. A model that begins asleep comes where all of them are needed by one that may
    sleep then, and none that could never be woken; one that is always kept needs memory now, and a sleeping model that
    goes gives none. Controls: the same models awake."""
    monkeypatch.setattr(model_changes, "machine_memory", lambda: Memory(16 * GIB, 3 * GIB))
    models = {one.entry.name: one for one in (planned_model("a", "while_used", GIB), planned_model("b", "always", GIB))}

    def found(comes: Any, *, awake: str = "ab", budget: int = 0, removed: tuple[str, ...] = ()) -> list[str]:
        sandbox = SimpleNamespace(models_memory_bytes=budget, memory_bytes=16 * GIB)
        difference = ModelDifference(removed=removed)
        served = ServedNow(models, frozenset(awake))
        config: Any = SimpleNamespace(sandbox=sandbox)
        return list(lacking(config, [comes], difference, served))

    sleeper, kept = planned_model("c", "while_used", 4 * GIB), planned_model("c", "always", 4 * GIB)
    assert found(sleeper) == []
    assert found(sleeper, awake="b") == ["c"], "3 GiB are there, and nothing that sleeps gives more"
    assert found(kept) == ["c"], "it boots now"
    assert found(kept, removed=("a",)) == []
    assert found(kept, awake="b", removed=("a",)) == ["c"], "what sleeps has nothing to give back"
    assert found(sleeper, budget=4 * GIB) == ["c"], "the kept one leaves 3 GiB of the budget"
    assert found(sleeper, budget=5 * GIB) == []


def test_a_model_that_boots_has_not_taken_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three gigabytes are available, and a model of one boots: two can be had, whether it stays or goes; one that
    comes asleep may have its memory later. Controls: the same model awake."""
    monkeypatch.setattr(model_changes, "machine_memory", lambda: Memory(16 * GIB, 3 * GIB))
    models = {"a": planned_model("a", "while_used", GIB)}

    def found(gib: int, keep: str, booting: str, removed: tuple[str, ...] = ()) -> list[str]:
        sandbox = SimpleNamespace(models_memory_bytes=0, memory_bytes=16 * GIB)
        served = ServedNow(models, frozenset("a"), frozenset(booting))
        config: Any = SimpleNamespace(sandbox=sandbox)
        return list(lacking(config, [planned_model("c", keep, gib * GIB)], ModelDifference(removed=removed), served))

    assert found(3, "always", "") == [], "the control"
    assert (found(2, "always", "a"), found(3, "always", "a")) == ([], ["c"]), "a stays, and takes 1 GiB more"
    assert found(4, "always", "", removed=("a",)) == [], "the control"
    assert (found(3, "always", "a", ("a",)), found(4, "always", "a", ("a",))) == ([], ["c"]), "a has nothing to give"
    assert (found(3, "while_used", "a"), found(4, "while_used", "a")) == ([], ["c"]), "a sleeps then"
    assert found(4, "while_used", "") == [], "the control"


async def test_an_engine_that_boots_or_is_down_has_not_taken_its_memory() -> None:
    """Two reloads one after the other are not promised one memory: a model counts as booting from the moment when it is
    added until its engine is there, and again while its engine is down. Controls: a text sandbox that is down, and a
    model that sleeps."""
    keepers = ModelKeepers(Kept, lambda: None)  # type: ignore[arg-type]
    files = SimpleNamespace(digest="0", signer="")
    for name, keep in (("m", "always"), ("sleeper", "while_used")):
        plans = [SimpleNamespace(name=f"{role.name.lower()}-{name}", role=role) for role in (Role.ENGINE, Role.TEXT)]
        keepers.add(SimpleNamespace(entry=SimpleNamespace(name=name, keep=keep), files=files, plans=plans))  # type: ignore[arg-type]
    engine, text = (one for one in keepers.keepers if one.plan.name.endswith("-m"))
    for up, booting in ((False, {"m"}), (True, set()), (False, {"m"})):
        engine.life = Life(state=State.READY if up else State.BOOTING)
        assert keepers.booting == booting
    engine.life, text.life = Life(state=State.READY), Life()
    assert not keepers.booting


def never_kept(name: str) -> ModelConfig:
    """An entry of a model that begins asleep."""
    return ModelConfig.model_validate({"name": name, "path": "/m", "keep": "never"})


class Checkpoints:
    """Warm starts as far as changes of models go: what they were told, in its order."""

    def __init__(self, keepers: ModelKeepers) -> None:
        self.keepers, self.said = keepers, list[tuple[str, list[str], list[str]]]()

    def leave(self, plans: Iterable[Any]) -> None:
        """Note what left, and what is there then."""
        self.said.append(("leave", [plan.digest for plan in plans], self.keepers.names))

    async def forget(self, plans: Iterable[Any], staying: Iterable[Any]) -> None:
        """Note what is removed, and what stays."""
        self.said.append(("forget", [plan.digest for plan in plans], [plan.digest for plan in staying]))


async def test_checkpoints_of_changed_models_go_too() -> None:
    """What a model had before it changed, as an adapter that was taken out, is in its old checkpoints: they are removed
    as those of a model that goes for good are, and those of what stays are not."""
    keepers = ModelKeepers(Kept, lambda: None)  # type: ignore[arg-type]
    changes = ModelChanges(None, keepers, None, lambda *_: True, lambda _one: None, None)  # type: ignore[arg-type]

    def planned(name: str, digest: str) -> Any:
        plan = SimpleNamespace(name=f"engine-{name}", digest=digest)
        entry = never_kept(name)
        files = SimpleNamespace(digest=digest, signer="", folder=Path("/"))
        return SimpleNamespace(entry=entry, files=files, plans=(plan,), need=ModelNeed(name, 1, 1, 0))

    for name in ("changed", "gone", "stays"):
        keepers.add(planned(name, f"{name} 1"))
    found = ModelDifference(changed=(never_kept("changed"),), removed=("gone",))
    changes.warm = said = Checkpoints(keepers)  # type: ignore[assignment]
    change = asyncio.create_task(
        changes._change(model_changes._Reviewed("", found, (planned("changed", "changed 2"),)))
    )
    await asyncio.sleep(0)
    for name in ("changed", "gone"):
        keepers.drained(name)
    await change
    (_, left, then), (_, removed, staying) = said.said
    assert [one for one, _, _ in said.said] == ["leave", "forget"]
    assert set(left) == set(removed) == {"changed 1", "gone 1"}
    assert then == ["stays"], "before the one that comes again"
    assert set(staying) == {"stays 1", "changed 2"}


async def test_memory_is_reserved_for_wakes() -> None:
    """That of the largest model that sleeps, and that of those that wake, from before a wake is told; none of those
    that are awake, and none where the files of one are gone."""
    keepers = ModelKeepers(Kept, lambda: None)  # type: ignore[arg-type]

    class Gone:
        @property
        def about(self) -> int:
            raise FileNotFoundError

    for name, about in (("a", 1), ("b", 4), ("c", 2), ("d", 0)):
        need = ModelNeed(name, about, about, 0, engine=0) if about else Gone()
        plans = (SimpleNamespace(name=f"engine-{name}", role=Role.ENGINE, card=None),)
        files = SimpleNamespace(digest=name, signer="")
        keepers.add(SimpleNamespace(entry=never_kept(name), files=files, plans=plans, need=need))  # type: ignore[arg-type]
    assert (keepers.reserved, keepers.booting) == (4, frozenset())
    told: list[tuple[int, frozenset[str]]] = []
    keepers.on_wake = lambda: told.append((keepers.reserved, keepers.booting))
    wakes = asyncio.create_task(keepers.wake("a", lambda: None))
    await asyncio.sleep(0)
    assert told == [(5, frozenset("a"))]
    keepers.keepers[0].first_boot.set_result(None)
    assert await wakes
    assert (keepers.reserved, keepers.awake) == (4, frozenset("a"))
    await keepers.sleep("a")


@pytest.mark.parametrize("card", [None, object()], ids=["host memory", "card"])
async def test_a_program_waits_for_the_memory_of_a_model_that_ends(card: object) -> None:
    """The sandbox of a model that wakes is made while another model ends, and its program is held back until nothing of
    that one is left; a model on a card begins no earlier, since its card is chosen by what is free."""
    begun, released, other_ends = list[str](), list[str](), asyncio.Event()

    class Held(Kept):
        async def run(self) -> None:
            begun.append("sandbox")
            await asyncio.to_thread(self.gate.wait, "engine-a", threading.Event())
            released.append("program")
            self.first_boot.set_result(None)  # type: ignore[arg-type]
            await super().run()

    keepers = ModelKeepers(Held, lambda: None)  # type: ignore[arg-type]
    plans = (SimpleNamespace(name="engine-a", role=Role.ENGINE, card=card),)
    files = SimpleNamespace(digest="a", signer="")
    keepers.add(SimpleNamespace(entry=never_kept("a"), files=files, plans=plans, need=ModelNeed("a", 1, 1, 0)))  # type: ignore[arg-type]
    ends = asyncio.create_task(other_ends.wait())
    wakes = asyncio.create_task(keepers.wake("a", lambda: None, (ends,)))
    await asyncio.sleep(0.05)
    assert (begun, released) == ([] if card else ["sandbox"], [])
    other_ends.set()
    assert await wakes
    assert released == ["program"]
    await keepers.sleep("a")


async def test_the_boots_of_one_model_at_a_time_wait_at_their_gates() -> None:
    """Boots that wait hold threads of a small pool, and what they wait for may itself wait for a boot: a model that is
    put to sleep, woken and put to sleep again while others wake in its place. So the boots of one model wait, the next
    model begins when the other has ended, and all come up although the pool has threads for those of one alone."""
    pool = ThreadPoolExecutor(2)

    class Pooled(Kept):
        async def run(self) -> None:
            loop, stop = asyncio.get_running_loop(), threading.Event()
            try:
                await loop.run_in_executor(pool, self.gate.wait, "engine", stop)
            finally:
                stop.set()
            self.first_boot.set_result(None)  # type: ignore[arg-type]
            await super().run()

    keepers = ModelKeepers(Pooled, lambda: None)  # type: ignore[arg-type]
    for name in "abc":
        plans = (SimpleNamespace(name=f"engine-{name}", role=Role.ENGINE, card=None),)
        files = SimpleNamespace(digest=name, signer="")
        need = ModelNeed(name, 1, 1, 0)
        keepers.add(SimpleNamespace(entry=never_kept(name), files=files, plans=plans, need=need))  # type: ignore[arg-type]
    assert await keepers.wake("a", lambda: None)
    orders: list[asyncio.Task[bool]] = [asyncio.create_task(keepers.sleep("a"))]
    orders.append(asyncio.create_task(keepers.wake("a", lambda: None, tuple(orders))))  # type: ignore[arg-type]
    orders.append(asyncio.create_task(keepers.sleep("a")))
    sleeps = orders[0], orders[2]
    for name in "bc":
        orders.append(asyncio.create_task(keepers.wake(name, lambda: None, sleeps)))  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(10):
            assert await asyncio.gather(*orders) == [True] * 5
    finally:
        for keeper in keepers.keepers:
            keeper.gate.open()  # Where it fails the threads of the pool shall end.
        await keepers.close()
        pool.shutdown()
