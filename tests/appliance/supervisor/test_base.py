"""One checkpoint from which the engines of all models begin: their own answers, nothing of theirs in it, and what
happens when it, or a model, is no good. Real sandboxes."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.common.catalog import embedded_model, read_model
from appliance.common.control import COLD, FALLEN_BACK, RESTORED
from appliance.selftest import intruder
from appliance.supervisor.boot import Booted, BootPlan, boot, end, plan_boot
from appliance.supervisor.layout import GUEST_KERNELS
from appliance.supervisor.saved_start import MOST_BLAMES, MOST_BROKEN, BaseTrust, BrokenModels
from appliance.supervisor.templates import start_is_base, starts
from appliance.supervisor.warm import WarmStarts, open_warm_starts
from isolation.errors import IsolationError
from isolation.gvisor.checkpoint import Checkpoint
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.spec import Mount
from isolation.ipc.engine import StepOutput
from isolation.ipc.messages import Role
from tests.appliance.supervisor.warm_plans import configure
from tests.engine.support import model_config, save_model, submit

pytestmark = pytest.mark.runsc

TOKENS = 12
CANARY = "canary-of-a-model-3f9a"


@pytest.fixture(scope="module", autouse=True)
def at_once() -> Iterator[None]:
    """Templates wait for nobody here, and have a whole core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("appliance.supervisor.warm.BEGIN_AFTER_S", 0.0)
        patch.setattr("appliance.supervisor.templates.TEMPLATE_CORES", 1.0)
        yield


@dataclass(frozen=True)
class Base:
    """The checkpoint, which was made for the first of two engines."""

    warm: WarmStarts
    plans: tuple[BootPlan, BootPlan]

    @property
    def key(self) -> str:
        """Its name."""
        return self.warm.key(starts(self.plans[0])[-1].spec)

    def find(self) -> Checkpoint:
        """The checkpoint, which is there."""
        found = self.warm.store.find(self.key)
        assert found is not None
        return found

    def make(self) -> None:
        """Make it where there is none; copies of it have patience with a busy machine."""
        self.warm.take(starts(self.plans[0])[-1], 60.0)


@pytest.fixture(scope="module")
def gvisor(runsc_path: Path) -> Iterator[GvisorRuntime]:
    """Real sandboxes whose folders a restore fills, or a skip with the reason."""
    try:
        with intruder.gvisor() as runtime:
            if not runtime.fills_folders:
                pytest.skip("this runsc compares the mounts of a restore with those of its checkpoint")
            yield runtime
    except intruder.CannotBeShownError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another size than the embedded one, under a name that tells it."""
    folder = Path(os.path.realpath(tmp_path_factory.mktemp("models"))) / CANARY
    folder.mkdir()
    save_model(folder, model_config(max_positions=64))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model() / name, folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


@pytest.fixture(scope="module")
def made(gvisor: GvisorRuntime, small: Path) -> Iterator[Base]:
    """The checkpoint of what engines import."""
    with tempfile.TemporaryDirectory(prefix="b-") as short:
        folder = Path(os.path.realpath(short))
        folder.chmod(0o755)
        warm, plans = None, []
        for model in (embedded_model(), small):
            config = configure(folder, model=model)
            warm = warm or open_warm_starts(config, gvisor)
            files = read_model("athanor-mini", model)
            plans.append(plan_boot(config, config.models[0], files, gvisor, Role.ENGINE))
        assert warm is not None
        base = Base(warm, (plans[0], plans[1]))
        base.make()
        yield base


@pytest.fixture
def base(made: Base) -> Base:
    """The checkpoint, made again where a test has spent it."""
    made.make()
    return made


def answer(booted: Booted) -> list[int]:
    """Tokens of a greedy request, and the end of the sandbox."""
    try:
        channel, tokens = booted.channel, list[int]()
        assert channel is not None
        channel.send(submit(9, range(40, 60), TOKENS))
        while len(tokens) < TOKENS:
            for message in channel.receive(16):
                if isinstance(message, StepOutput):
                    tokens += [
                        token for token, one in zip(message.token_ids, message.requests, strict=True) if one == 9
                    ]
            channel.wait(1.0)
            assert booted.sandbox.poll() is None, booted.sandbox.output_tail()
        return tokens
    finally:
        end(booted)


@pytest.mark.parametrize("which", [1, pytest.param(0, marks=pytest.mark.full)])
def test_two_models_begin_from_one_and_answer_as_ever(base: Base, gvisor: GvisorRuntime, which: int) -> None:
    """Engines of two models, of which the checkpoint's sandbox had none and was made for the first, are restored from
    the same file; one gives the tokens of its cold start. Control: the two models' tokens differ."""
    answers = []
    for plan in base.plans:
        restored = base.warm.boot(plan, threading.Event())
        assert (restored.start, restored.ahead) == (RESTORED, False)
        answers.append(answer(restored))
    assert answers[0] != answers[1], "the control"
    assert answer(boot(base.plans[which], gvisor, threading.Event())) == answers[which]
    assert os.listdir(base.warm.store.root) == [base.key]


def test_nothing_of_a_model_is_in_it(base: Base, small: Path) -> None:
    """Neither names, nor places, nor digests, nor contents of the files of the model that it was made for, nor of one
    that began from it. Control: what was imported is there."""
    images = b"".join(path.read_bytes() for path in base.find().folder.iterdir())
    assert b"load_engine" in images and b"HostRunner" in images, "the control"
    for plan in base.plans:
        assert plan.files is not None
        for secret in (plan.digest.encode(), bytes.fromhex(plan.digest), plan.configuration, plan.model.encode()):
            assert secret not in images
        for name, path in plan.files.engine:
            content = path.read_bytes()
            assert content[:200] not in images and content[-200:] not in images, name
            assert str(path).encode() not in images
    assert CANARY.encode() not in images


def test_what_it_depends_on_is_in_its_name_and_the_model_is_not(
    base: Base, gvisor: GvisorRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two models have one name, with kernels or without; another processor, another program, other files and other
    threads have others, so that the base of other code is never found."""
    first, second = (starts(plan)[-1] for plan in base.plans)
    assert start_is_base(first) and base.warm.key(first.spec) == base.warm.key(second.spec) == base.key
    assert not [mount for mount in first.spec.mounts if mount.target.startswith("/model")]
    (tmp_path / "kernels").write_text("other")
    (tmp_path / "more").mkdir()
    compiled = Mount(tmp_path / "more", GUEST_KERNELS)
    (with_kernels,) = starts(replace(first, spec=replace(first.spec, mounts=(*first.spec.mounts, compiled))))
    assert base.warm.key(with_kernels.spec) == base.key
    names, key = set[str](), base.key
    code = replace(first.spec.rootfs, mounts=(*first.spec.rootfs.mounts, Mount(tmp_path / "kernels", "/opt/more")))
    others = [
        replace(first.spec, mounts=(*first.spec.mounts, Mount(tmp_path / "kernels", "/more"))),
        replace(first.spec, rootfs=code),
        replace(first.spec, env=(*first.spec.env, ("OMP_NUM_THREADS", "31"))),
        replace(first.spec, folders=("/model",)),
    ]
    names |= {base.warm.key(one) for one in others}
    (tmp_path / "kernels").write_text("another")
    names |= {base.warm.key(others[0])}
    monkeypatch.setattr("isolation.gvisor.gvisor_runtime.processor", lambda: "another")
    names |= {base.warm.key(first.spec)}
    assert len(names) == 6 and key not in names


def test_a_model_that_cannot_be_loaded_costs_the_others_nothing(base: Base, small: Path, tmp_path: Path) -> None:
    """A sandbox whose model is no good ends restored and cold, with the reason of the cold start, and the base stays.
    Control: with its file whole it is restored."""
    broken = Path(os.path.realpath(tmp_path)) / "broken"
    shutil.copytree(small, broken)
    config = configure(base.warm.run_dir.parent, model=broken)

    def plan(tokenizer: str) -> BootPlan:
        (broken / "tokenizer.json").write_text(tokenizer)
        files = read_model("athanor-mini", broken)
        return plan_boot(config, config.models[0], files, base.warm._runtime, Role.TEXT)

    good = (small / "tokenizer.json").read_text()
    made = base.warm.take(starts(plan(good))[-1], 60.0)
    assert made is not None
    with pytest.raises(IsolationError, match="cannot load"):
        base.warm.boot(plan(good[: len(good) // 2]), threading.Event())
    assert base.warm.store.find(made.key) == made
    restored = base.warm.boot(plan(good), threading.Event())
    end(restored)
    base.warm.store.drop(made.key)
    assert restored.start == RESTORED, "the control"


def test_one_model_that_dies_takes_it_from_nobody(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold starts after deaths in a row drop the base, since it may be the cause, three times at most, and never where
    another sandbox became ready from it: that model then begins without. Control: the other one begins with it."""
    monkeypatch.setattr("appliance.supervisor.warm.boot", lambda *_args, **_named: None)
    monkeypatch.setattr(base.warm, "_trust", BaseTrust())
    dropped: list[str] = []
    monkeypatch.setattr(type(base.warm.store), "drop", lambda _self, key: dropped.append(key))
    dies = replace(base.plans[1], name="engine-dies")
    for _ in range(MOST_BLAMES + 2):
        base.warm.boot_cold(dies, threading.Event())
    assert dropped == [base.key] * MOST_BLAMES
    base.warm.leave([dies])
    base.warm._trust.note_ready(base.key, base.plans[0].name)
    base.warm.boot_cold(dies, threading.Event())
    assert len(dropped) == MOST_BLAMES
    found = [base.warm._find(starts(plan)[-1]) for plan in (dies, base.plans[0])]
    assert found[0] is None and found[1] is not None
    base.warm.leave([dies])
    assert base.warm._find(starts(dies)[-1]) is not None, "another model of its name begins with it"


@pytest.mark.parametrize("others", [0, 1])
def test_who_fails_with_it_alone_begins_without_it(base: Base, monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    """A sandbox that does not come up from the base and does without drops it where none other did, and else begins
    without it from then on: it is neither made again and again nor lost to the others."""
    begun: list[bool] = []

    def booting(plan: BootPlan, _runtime: object, _stop: object, saved: object = None, gate: object = None) -> Any:
        begun.append(saved is not None)
        if saved is not None and plan.name == "engine-odd":
            raise IsolationError("it waits for ever")
        return SimpleNamespace(ahead=False, start=COLD)

    monkeypatch.setattr("appliance.supervisor.warm.boot", booting)
    monkeypatch.setattr(base.warm, "_trust", BaseTrust())
    for _ in range(others):
        base.warm.boot(base.plans[0], threading.Event())
    begun.clear()
    for _ in range(3):
        base.warm.boot(replace(base.plans[1], name="engine-odd"), threading.Event())
    assert begun == [True, False, False, False]
    assert (base.warm.store.find(base.key) is not None) == bool(others)


def test_a_broken_model_costs_one_boot_a_try(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that failed with the base and cold is started cold alone, also under another name, and is not taken for a
    reason to drop the base. A boot that was given up shows nothing, one that works ends it, and other files are another
    model."""
    begun: list[bool] = []
    works = False

    def booting(_plan: BootPlan, _runtime: object, _stop: object, saved: object = None, gate: object = None) -> Any:
        begun.append(saved is not None)
        if works:
            return SimpleNamespace(ahead=False, start=COLD)
        raise IsolationError("it cannot be loaded")

    def tries(plan: BootPlan, *, given_up: bool = False) -> list[bool]:
        begun.clear()
        stop = threading.Event()
        if given_up:
            stop.set()
        with suppress(IsolationError):
            base.warm.boot(plan, stop)
        return list(begun)

    monkeypatch.setattr("appliance.supervisor.warm.boot", booting)
    monkeypatch.setattr(base.warm, "_trust", BaseTrust())
    monkeypatch.setattr(base.warm, "_broken", BrokenModels())
    plan = base.plans[1]
    assert plan.files is not None
    assert tries(plan, given_up=True) == [True]
    assert tries(plan) == [True, False], "the control"
    again = replace(plan, name="engine-again")
    assert [tries(plan), tries(again)] == [[False], [False]]
    with pytest.raises(IsolationError):
        base.warm.boot_cold(plan, threading.Event())
    assert base.warm.store.find(base.key) is not None
    mended = replace(plan, files=replace(plan.files, digest="0" * 64))
    assert tries(mended) == [True, False]
    works = True
    assert [tries(plan), tries(plan)] == [[False], [True]]


def test_broken_models_are_bounded() -> None:
    """As many are remembered as are told, the newest."""
    broken = BrokenModels()
    for number in range(MOST_BROKEN + 1):
        broken.note(str(number), "engine")
    assert not broken.knows("0", "engine")
    assert broken.knows("1", "engine") and broken.knows(str(MOST_BROKEN), "engine")


def test_what_was_made_since_is_not_dropped(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox whose base is made anew while it starts fails with the old one, and the new one stays."""
    old, again = base.find(), list[Checkpoint]()

    def booting(_plan: object, _runtime: object, _stop: object, saved: Any = None, gate: object = None) -> Any:
        if saved is not None:
            saved.verdict.result()
            base.warm.store.drop(base.key)
            base.make()
            again.append(base.find())
            saved.verified()
        return SimpleNamespace(ahead=False, start=COLD)

    monkeypatch.setattr("appliance.supervisor.warm.boot", booting)
    booted = base.warm.boot(base.plans[1], threading.Event())
    assert booted.start == FALLEN_BACK
    assert again == [base.find()] and again != [old]


async def test_it_outlives_the_models(base: Base) -> None:
    """A model that leaves takes its own checkpoints along and not the base, which the next one begins with."""
    plan = base.plans[1]
    base.warm.leave([plan])
    await base.warm.forget([plan], [])
    assert base.warm.store.find(base.key) is not None
