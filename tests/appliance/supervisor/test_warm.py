"""Warm starts with real sandboxes: made once, used, dropped when damaged, and nothing of anybody in them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from appliance.common.catalog import embedded_model, read_model
from appliance.common.config import ApplianceConfig, ModelConfig, SandboxConfig
from appliance.common.control import COLD, FALLEN_BACK, RESTORED
from appliance.common.model_memory import Memory
from appliance.selftest import intruder
from appliance.supervisor import boot as boot_module
from appliance.supervisor.boot import Booted, BootPlan, end, plan_boot
from appliance.supervisor.keeper import Keeper
from appliance.supervisor.lifecycle import Life, State
from appliance.supervisor.warm import (
    MOST_AHEAD_BYTES,
    MOST_TEMPLATES,
    WarmStarts,
    open_warm_starts,
    start_is_ahead,
    starts,
)
from engine.config import TextConfig
from engine.text.grammar_matcher import CompiledGrammar
from engine.text.token_bytes import build_tokenizer
from engine.text.worker import load_worker
from isolation.errors import CheckpointError, SandboxStartError
from isolation.gvisor.checkpoint import Checkpoint, ListedFolders
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.spec import GpuAccess, Mount
from isolation.gvisor.unsafe_runtime import UnsafeRuntime
from isolation.ipc.channel import Channel
from isolation.ipc.grammar import Advance, GrammarKind, Masks, OpenGrammar
from isolation.ipc.messages import Failed, FailureCode, Role
from tests.engine.text.test_process import next_message

pytestmark = pytest.mark.runsc

CANARY = "canary-of-a-tenant-8d1f0c"


@pytest.fixture(scope="module", autouse=True)
def at_once() -> Iterator[None]:
    """Templates wait for nobody here, and have a whole core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("appliance.supervisor.warm.BEGIN_AFTER_S", 0.0)
        patch.setattr("appliance.supervisor.warm.TEMPLATE_CORES", 1.0)
        yield


@pytest.fixture(scope="module")
def gvisor(runsc_path: Path):
    """Real sandboxes, or a skip with the reason."""
    try:
        with intruder.gvisor() as runtime:
            yield runtime
    except intruder.CannotBeShownError as error:
        pytest.skip(str(error))


def configure(folder: Path, keep: str = "always", model: Path | None = None) -> ApplianceConfig:
    """An appliance of the embedded model, or a copy of it, whose checkpoints lie in this folder."""
    model = model or embedded_model()
    run_dir = folder / "run"
    run_dir.mkdir(parents=True, exist_ok=True)
    run_dir.chmod(0o755)
    return ApplianceConfig(
        models=(ModelConfig.model_validate({"name": "athanor-mini", "path": str(model), "keep": keep}),),
        policy=model,
        credentials=model,
        pepper=model,
        run_dir=run_dir,
        sandbox=SandboxConfig(checkpoints=folder / "saved"),
    )


def make(
    folder: Path, runtime: Any, role: Role = Role.TEXT, tenant: str = "", keep: str = "always"
) -> tuple[WarmStarts, BootPlan]:
    """Warm starts and the plan of one sandbox."""
    config = configure(folder, keep)
    warm = open_warm_starts(config, runtime)
    assert warm is not None
    files = read_model("athanor-mini", embedded_model())
    return warm, plan_boot(config, config.models[0], files, runtime, role, tenant)


@pytest.fixture(scope="module")
def made(gvisor: GvisorRuntime, tmp_path_factory: pytest.TempPathFactory) -> tuple[WarmStarts, BootPlan]:
    """The text sandbox's checkpoint, made from a template."""
    warm, plan = make(Path(os.path.realpath(tmp_path_factory.mktemp("w"))), gvisor)
    assert warm.take(plan, 1.0) is not None
    assert warm.take(plan, 1.0) is None, "one is enough"
    return warm, plan


def started(warm: WarmStarts, plan: BootPlan) -> str:
    """How a boot began; the sandbox has given real ids and is ended."""
    booted = warm.boot(plan, threading.Event())
    end(booted)
    return booted.start


def test_a_start_uses_the_checkpoint_and_damage_costs_nothing_but_time(
    made: tuple[WarmStarts, BootPlan], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sandbox comes up as a copy; with one bit wrong it comes up without, and the checkpoint is gone."""
    warm, plan = made
    assert started(warm, plan) == RESTORED
    found = warm.store.find(warm.key(plan.spec))
    assert found is not None
    pages = found.folder / "pages.img"
    data = bytearray(pages.read_bytes())
    data[len(data) // 2] ^= 1
    pages.write_bytes(data)
    assert started(warm, plan) == FALLEN_BACK
    assert "is damaged" in capsys.readouterr().out + caplog.text
    assert os.listdir(warm.store.root) == []
    assert warm.take(plan, 1.0) is not None
    assert started(warm, plan) == RESTORED


def test_whatever_a_copy_does_the_sandbox_starts(
    made: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that never becomes ready is given up in time, dropped, and followed by a cold start."""
    warm, plan = made
    real = boot_module._Booting.configure

    def hang(self: Any, channel: Any) -> None:
        if self.until is not None:
            raise SandboxStartError("a copy that says nothing")
        real(self, channel)

    monkeypatch.setattr(boot_module._Booting, "configure", hang)
    assert started(warm, plan) == FALLEN_BACK
    monkeypatch.undo()
    assert os.listdir(warm.store.root) == []
    assert warm.take(plan, 1.0) is not None


def test_a_copy_that_is_late_is_given_up(made: tuple[WarmStarts, BootPlan]) -> None:
    """Patience with a copy is bounded by what a cold start took."""
    _, plan = made

    class Lives:
        def poll(self) -> None:
            return None

    booting = boot_module._Booting(plan, Lives(), threading.Event(), until=0.0)  # type: ignore[arg-type]
    with pytest.raises(SandboxStartError, match="not ready in time"):
        booting._check()


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


def first_masks(channel: Channel, source: bytes) -> Masks:
    """The first row of request 1, which a machine under load may refuse a few times."""
    for _ in range(20):
        channel.send(OpenGrammar(1, bytes(16), GrammarKind.JSON_SCHEMA, source))
        answer = next_message(channel)
        if isinstance(answer, Masks):
            return answer
        assert isinstance(answer, Failed) and answer.code is FailureCode.DEADLINE, answer
    raise AssertionError("the grammar was never compiled in time")


def test_a_copy_computes_the_masks_of_a_grammar(made: tuple[WarmStarts, BootPlan]) -> None:
    """A text sandbox that began as a copy forks the processes of its grammars afterwards. They give, token by token,
    the rows that the compiler gives here, up to an output that satisfies the schema; what is no grammar is refused."""
    warm, plan = made
    words = load_worker(TextConfig(model_dir=str(embedded_model()))).words()
    assert words is not None
    source, rng, output = json.dumps(SCHEMA).encode(), random.Random(1), b""
    here = CompiledGrammar(build_tokenizer(words), GrammarKind.JSON_SCHEMA, source, words)
    booted = warm.boot(plan, threading.Event())
    try:
        assert booted.start == RESTORED
        channel = booted.channel
        assert channel is not None
        masks, row = first_masks(channel, source), here.open(1)
        while True:
            assert row is not None
            assert (bytes(masks.words), masks.states[0], masks.positions[0]) == (row.words, row.state, row.position)
            allowed = [place for place in range(8 * len(row.words)) if row.words[place >> 3] >> (place & 7) & 1]
            if not allowed:
                break
            token = rng.choice(allowed)
            output += words.entries[token]
            channel.send(Advance(array("Q", [1]), array("I", [token])))
            row, answer = here.advance(1, token), next_message(channel)
            assert isinstance(answer, Masks)
            masks = answer
        jsonschema.validate(json.loads(output), SCHEMA)
        channel.send(OpenGrammar(2, bytes(16), GrammarKind.REGEX, b"("))
        refused = next_message(channel)
        assert isinstance(refused, Failed) and refused.request == 2
    finally:
        end(booted)


def test_nothing_of_anybody_is_in_a_checkpoint(made: tuple[WarmStarts, BootPlan]) -> None:
    """Neither configuration nor model, name, key or socket of the host is in its bytes; the control: what the program
    imported is, so a canary would be seen."""
    warm, plan = made
    found = warm.store.find(warm.key(plan.spec))
    assert found is not None
    bytes_ = b"".join(path.read_bytes() for path in found.folder.iterdir())
    assert b"llguidance" in bytes_ and b"TextWorker" in bytes_, "the control"
    vocabulary = (embedded_model() / "tokenizer.json").read_bytes()
    for secret in (plan.configuration, CANARY.encode(), vocabulary[:200], vocabulary[-200:]):
        assert secret not in bytes_


def test_a_canary_put_into_a_guest_would_be_found(
    gvisor: GvisorRuntime, made: tuple[WarmStarts, BootPlan], tmp_path: Path
) -> None:
    """The control of the search: the same sandbox with the canary in its environment has it in its checkpoint, under
    another name, so that nobody else is ever started from it."""
    _, plan = made
    warm, _ = make(tmp_path, gvisor)
    marked = replace(plan, spec=replace(plan.spec, env=(*plan.spec.env, ("MARK", CANARY))))
    assert warm.key(marked.spec) != warm.key(plan.spec)
    checkpoint = warm.take(marked, 1.0)
    assert checkpoint is not None
    assert any(CANARY.encode() in path.read_bytes() for path in checkpoint.folder.iterdir())


def test_what_it_depends_on_is_in_its_name(
    gvisor: GvisorRuntime, made: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket's place and the sandbox's name do not matter; the role, the processor, and the driver of a GPU do."""
    warm, plan = made
    key = warm.key(plan.spec)
    on_cards = {warm.key(replace(plan.spec, gpu=GpuAccess(one, (), (), ()))) for one in ("550.90.07", "550.54.15")}
    assert len({key, "", *on_cards}) == 4
    assert warm.key(replace(plan.spec, name="other")) == key
    _, engine = make(warm.store.root.parent, gvisor, Role.ENGINE)
    assert warm.key(engine.spec) != key
    monkeypatch.setattr("isolation.gvisor.gvisor_runtime.processor", lambda: "another")
    assert warm.key(plan.spec) != key


def test_a_model_on_a_gpu_is_in_no_checkpoint(made: tuple[WarmStarts, BootPlan]) -> None:
    """An engine that may be saved with its model is saved without it where it has a card. Control: without a card."""
    _, plan = made
    large = replace(plan, ahead_bytes=1 << 20, configuration=b"{}")
    on_card = replace(large, spec=replace(large.spec, gpu=GpuAccess("550.90.07", (), (), ())))
    assert (len(starts(large)), starts(on_card)) == (2, (on_card,))


def test_tenants_own_sandboxes_have_none(gvisor: GvisorRuntime, made: tuple[WarmStarts, BootPlan]) -> None:
    """Copies lie in memory alike; a sandbox of a single tenant is never one, and nobody makes one for it."""
    warm, _ = made
    _, own = make(warm.store.root.parent, gvisor, tenant="t")
    assert warm._find(own) is None
    warm.ask(own, 1.0)
    assert warm._wanted.empty()


def test_where_nothing_can_be_saved_starts_are_cold(tmp_path: Path) -> None:
    """Without a sandbox there is no checkpoint, and nobody is bothered; a directory that others enter turns it off."""
    runtime = UnsafeRuntime(tmp_path / "unsafe")
    try:
        warm, plan = make(tmp_path, runtime)
        assert warm.take(plan, 1.0) is None
        assert warm._find(plan) is None
        (tmp_path / "saved").chmod(0o777)
        assert open_warm_starts(configure(tmp_path), runtime) is None
    finally:
        runtime.close()


def test_a_checkpoint_is_read_once_for_each_start_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that begins anew reads no checkpoint that the one before it has found whole, and reads one whose
    file was written since (control): damage is found."""
    runtime, read = UnsafeRuntime(tmp_path / "unsafe"), list[str]()
    verify = Checkpoint.verify

    def counted(checkpoint: Checkpoint) -> None:
        read.append(checkpoint.key)
        verify(checkpoint)

    monkeypatch.setattr(Checkpoint, "verify", counted)
    try:
        warm, _ = make(tmp_path, runtime)
        with warm.store.draft() as draft:
            (draft / "pages.img").write_bytes(b"pages")
            made = warm.store.keep(draft, "k" * 64, 1.0)
        for _ in range(2):
            warm._verify(made)
        again = WarmStarts(warm.store, runtime, tmp_path)
        again._verify(made)
        assert read == [made.key]
        (made.folder / "pages.img").write_bytes(b"pagez")
        with pytest.raises(CheckpointError, match="damaged"):
            WarmStarts(warm.store, runtime, tmp_path)._verify(made)
    finally:
        runtime.close()


async def test_a_sandbox_that_starts_while_the_supervisor_stops_is_no_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the end of making checkpoints and the end of the sandboxes one that was lost may begin again: it finds
    its checkpoint, and the stop stays an orderly one."""
    runtime = UnsafeRuntime(tmp_path / "unsafe")
    try:
        warm, plan = make(tmp_path, runtime)
        monkeypatch.setattr(warm, "key", lambda _spec: "k" * 64)
        with warm.store.draft() as draft:
            (draft / "pages.img").write_bytes(b"pages")
            warm.store.keep(draft, "k" * 64, 1.0)
        warm.close()
        found = warm._find(plan)
        assert found is not None
        found.verified()
    finally:
        runtime.close()


async def test_making_ends_with_the_supervisor(gvisor: GvisorRuntime, tmp_path: Path) -> None:
    """A checkpoint that cannot be made is a line in the log; a stop ends a template that is on its way, at once."""
    warm, plan = make(tmp_path, gvisor)
    running = asyncio.create_task(warm.run())
    warm.ask(replace(plan, spec=replace(plan.spec, argv=(plan.spec.argv[0], "-c", "raise SystemExit(1)"))), 1.0)
    hangs = (plan.spec.argv[0], "-c", "import time; time.sleep(60)")
    warm.ask(replace(plan, name="hangs", spec=replace(plan.spec, argv=hangs)), 1.0)
    await asyncio.sleep(1.0)
    warm.close()
    async with asyncio.timeout(20):
        await running
    assert os.listdir(warm.store.root) == []
    assert list((tmp_path / "run" / "ipc").iterdir()) == []


async def test_deaths_in_a_row_end_restoring(
    made: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three deaths in a row a sandbox starts without its checkpoint, in case that is why it dies."""
    warm, plan = made
    begun: list[str] = []
    monkeypatch.setattr(warm, "boot", lambda *_: begun.append("saved"))
    monkeypatch.setattr(warm, "boot_cold", lambda *_: begun.append("cold"))
    keeper = Keeper(plan, None, lambda *_: True, None, warm)  # type: ignore[arg-type]
    for failures in range(4):
        keeper.life = Life(State.BOOTING, failures=failures)
        keeper._boot(threading.Event())
    assert begun == ["saved", "saved", "saved", "cold"]


def test_a_cold_start_after_deaths_drops_the_checkpoint(made: tuple[WarmStarts, BootPlan]) -> None:
    """So that the next one is made of what runs then."""
    warm, plan = made
    booted: Booted = warm.boot_cold(plan, threading.Event())
    end(booted)
    assert booted.start == COLD
    assert os.listdir(warm.store.root) == []
    assert warm.take(plan, 1.0) is not None


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short name: the path of a socket is bounded."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(os.path.realpath(folder))


def test_an_engine_of_a_model_that_may_sleep_is_saved_with_it(
    gvisor: GvisorRuntime, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of it has the model already: nothing is loaded between its configuration and its first token, and what it
    announces is what a cold start does. A checkpoint that this life has made or read whole is not read again, unless a
    file of it was touched. A host with another configuration finds no checkpoint under its name, and a copy that is
    told another one ends; the sandbox then starts without."""
    warm, plan = make(short, gvisor, Role.ENGINE, keep="while_used")
    ahead, imports = starts(plan)
    assert (start_is_ahead(ahead), start_is_ahead(imports)) == (True, False)
    assert warm.key(ahead.spec) != warm.key(imports.spec)
    made = warm.take(ahead, 1.0)
    assert made is not None
    read: list[str] = []
    verify = Checkpoint.verify
    monkeypatch.setattr(Checkpoint, "verify", lambda one: (read.append(one.key), verify(one))[1])
    booted = warm.boot(plan, threading.Event())
    end(booted)
    assert (booted.start, booted.ahead, read) == (RESTORED, True, [])
    assert "engine computes with" in " ".join(booted.sandbox.output_tail())
    os.utime(made.folder / "pages.img")
    real = boot_module._Booting.configure

    def configure_otherwise(self: Any, channel: Any) -> None:
        if self.until is not None:
            self = replace(self, plan=replace(self.plan, configuration=other.configuration))
        real(self, channel)

    other = replace(plan, configuration=plan.configuration.replace(b'"max_num_seqs": ', b'"max_num_seqs": 1'))
    assert warm._find(starts(other)[0]) is None
    monkeypatch.setattr(boot_module._Booting, "configure", configure_otherwise)
    cold = warm.boot(plan, threading.Event())
    end(cold)
    assert (cold.start, cold.ahead, read) == (FALLEN_BACK, False, [made.key])
    assert cold.ready == booted.ready
    assert warm.store.find(made.key) is None


def test_only_models_that_may_sleep_are_saved_with_their_engine(tmp_path: Path) -> None:
    """None of a model that is always kept, of a text sandbox, of a tenant's own, or of more than the bound; the control
    has one."""
    runtime = UnsafeRuntime(tmp_path / "unsafe")
    try:
        _, plan = make(tmp_path, runtime, Role.ENGINE, keep="while_used")
        assert len(starts(plan)) == 2, "the control"
        assert len(starts(replace(plan, ahead_bytes=MOST_AHEAD_BYTES + 1))) == 1
        for role, tenant, keep in ((Role.ENGINE, "", "always"), (Role.TEXT, "", "never"), (Role.ENGINE, "t", "never")):
            _, plan = make(tmp_path, runtime, role, tenant, keep)
            assert starts(plan) == (plan,)
    finally:
        runtime.close()


class Filler:
    """Stands in for the template: writes an image, after what somebody does with the model's files meanwhile."""

    def __init__(self, meddle: Callable[[], object] = lambda: None) -> None:
        self.meddle = meddle
        self.stopped_by: list[threading.Event] = []

    def __call__(self, _runtime: Any, _spec: Any, folder: Path, *, stop: threading.Event, **_: Any) -> None:
        """What ``save_template`` does."""
        self.stopped_by.append(stop)
        self.meddle()
        if stop.is_set():
            raise SandboxStartError("a template did not come to the point where it waits")
        (folder / "pages.img").write_bytes(b"pages")


async def made_all(warm: WarmStarts) -> None:
    """Have everything made that was asked for."""
    warm._wanted.put_nowait(None)
    await warm.run()


def saved_keys(warm: WarmStarts) -> set[str]:
    """Names of the checkpoints that there are."""
    return set(os.listdir(warm.store.root))


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WarmStarts, BootPlan]]:
    """Warm starts without sandboxes, and the plan of an engine of a model of its own folder that may sleep."""
    runtime = UnsafeRuntime(tmp_path / "unsafe")
    monkeypatch.setattr(UnsafeRuntime, "identity", lambda _self, spec: repr(spec.argv))
    monkeypatch.setattr("appliance.supervisor.warm.machine_memory", lambda: Memory(64 << 30, 32 << 30))
    monkeypatch.setattr("appliance.supervisor.warm.save_template", Filler())
    folder = tmp_path / "model"
    shutil.copytree(embedded_model(), folder)
    config = configure(tmp_path, "while_used", folder)
    warm = open_warm_starts(config, runtime)
    assert warm is not None
    files = read_model("athanor-mini", folder)
    plan = plan_boot(config, config.models[0], files, runtime, Role.ENGINE)
    # Thousands of files of Python's take seconds to look at, and nothing here depends on them.
    mounts = tuple(one for one in plan.spec.mounts if one.source.is_relative_to(tmp_path))
    spec = replace(plan.spec, rootfs=replace(plan.spec.rootfs, mounts=()), mounts=mounts)
    try:
        yield warm, replace(plan, spec=spec)
    finally:
        runtime.close()


def changed_and_put_back(path: Path, *, whole_folder: bool = False) -> None:
    """Other bytes of the same size in the file, or in a folder in its folder's place, and the good ones again, with the
    times of content as they were."""
    if whole_folder:
        aside, other = path.parent.with_suffix(".aside"), path.parent.with_suffix(".other")
        shutil.copytree(path.parent, other, dirs_exist_ok=True)
        for source, target in ((path.parent, aside), (other, path.parent), (path.parent, other), (aside, path.parent)):
            source.rename(target)
        return
    found, data = path.stat(), path.read_bytes()
    for content in (bytes(len(data)), data):
        path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize("whole_folder", [False, True])
def test_weights_that_nobody_checked_are_in_no_checkpoint(
    ahead: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch, whole_folder: bool
) -> None:
    """Weights that are swapped while the template loads them and put back afterwards, with their size and the time of
    their content, leave no checkpoint. Controls: that of the imports alone, and one where nothing changes, are kept."""
    warm, plan = ahead
    with_model, imports = starts(plan)
    (weights,) = (path for name, path in plan.files.engine if name.endswith(".safetensors"))  # type: ignore[union-attr]
    meddle = Filler(lambda: changed_and_put_back(weights, whole_folder=whole_folder))
    monkeypatch.setattr("appliance.supervisor.warm.save_template", meddle)
    with pytest.raises(CheckpointError, match="have changed"):
        warm.take(with_model, 1.0)
    assert os.listdir(warm.store.root) == []
    assert warm.take(imports, 1.0) is not None
    monkeypatch.setattr("appliance.supervisor.warm.save_template", Filler())
    assert warm.take(with_model, 1.0) is not None


def test_a_template_loads_no_model_that_was_not_pinned(ahead: tuple[WarmStarts, BootPlan]) -> None:
    """Files that are not the pinned ones, or are not those of the start any more, are not loaded to be saved."""
    warm, plan = ahead
    with_model, _ = starts(plan)
    with pytest.raises(CheckpointError, match="pins"):
        warm.take(replace(with_model, pinned="0" * 64), 1.0)
    (weights,) = (path for name, path in plan.files.engine if name.endswith(".safetensors"))  # type: ignore[union-attr]
    found = weights.stat()
    weights.write_bytes(bytes(found.st_size))
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(CheckpointError, match="not what it was at the start"):
        warm.take(with_model, 1.0)
    assert os.listdir(warm.store.root) == []


def test_a_checkpoint_with_a_model_needs_room_for_all_of_it(
    ahead: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk with the least that is left free and little more no template with a model is started. Control: that of
    the imports alone is made."""
    warm, plan = ahead
    with_model, imports = starts(plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=(1 << 30) + 1))
    with pytest.raises(CheckpointError, match="are free"):
        warm.take(with_model, 1.0)
    assert warm.take(imports, 1.0) is not None


def told_a_form(plan: BootPlan) -> BootPlan:
    """A plan that tells the engine the form of an earlier trial."""
    return replace(plan, configuration=plan.configuration.replace(b'"form": ""', b'"form": "avx2"'))


@pytest.mark.parametrize("life", ["the same", "another", "another, and a form was tried", "the same, other files"])
async def test_what_leaves_takes_its_checkpoint_with_the_model_along(
    ahead: tuple[WarmStarts, BootPlan], life: str
) -> None:
    """A model that is taken away leaves neither of its checkpoints, whether this life or an earlier one has made them,
    also under the name of a form, also where its files are others by now. Control: both were there."""
    warm, plan = ahead
    told = told_a_form(plan) if "form" in life else plan
    assert ("form" in life) == (told != plan)
    for start in starts(told):
        warm.take(start, 1.0)
    assert len(saved_keys(warm)) == 2, "the control"
    if "another" in life:
        warm = WarmStarts(warm.store, warm._runtime, warm._run_dir)
        warm.told = told_a_form if "form" in life else warm.told
    with_model = warm.key(starts(told)[0].spec)
    if "files" in life:
        (plan.files.folder / "config.json").touch()  # type: ignore[union-attr]
        warm._listed = ListedFolders()
    warm.leave([plan])
    await warm.forget([plan], [])
    assert with_model not in saved_keys(warm)
    assert ("files" in life) or not saved_keys(warm)


async def test_a_changed_model_leaves_the_checkpoint_that_it_had(ahead: tuple[WarmStarts, BootPlan]) -> None:
    """The model comes again with another configuration, as without an adapter. The new one's checkpoint stays, also
    where it is made before the old one's goes, and the old one's goes, also where it is made too late. What both begin
    with stays."""
    warm, old = ahead
    new = replace(old, configuration=old.configuration.replace(b'"max_num_seqs": ', b'"max_num_seqs": 1'))
    for start in starts(old):
        warm.take(start, 1.0)
    warm.leave([old])
    assert warm.take(starts(new)[0], 1.0, 1) is not None
    await warm.forget([old], [new])
    assert saved_keys(warm) == {warm.key(start.spec) for start in starts(new)}
    warm.leave([new])
    assert warm.take(starts(replace(new, name=old.name, configuration=b"{}"))[0], 1.0, 1) is not None, "it is late"
    await warm.forget([new], [old])
    assert saved_keys(warm) == {warm.key(old.spec)}


async def test_what_left_while_it_waited_gets_no_template(ahead: tuple[WarmStarts, BootPlan]) -> None:
    """A template that was asked for before a model left is not made when another of its name has come. Control: that
    of the one that came is."""
    warm, old = ahead
    new = replace(old, configuration=old.configuration.replace(b'"max_num_seqs": ', b'"max_num_seqs": 1'))
    warm.ask(old, 1.0)
    warm.leave([old])
    warm.ask(new, 1.0)
    await made_all(warm)
    assert saved_keys(warm) == {warm.key(start.spec) for start in starts(new)}


async def test_what_was_put_off_does_not_count_as_made(
    ahead: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the memory is short, the checkpoint with the model is made once it is there. Control: failures
    count, and end it."""
    warm, plan = ahead
    warm.take(plan, 1.0)
    monkeypatch.setattr("appliance.supervisor.warm.machine_memory", lambda: Memory(64 << 30, 0))
    for _ in range(MOST_TEMPLATES + 1):
        warm.ask(plan, 1.0)
        await made_all(warm)
    monkeypatch.setattr("appliance.supervisor.warm.machine_memory", lambda: Memory(64 << 30, 32 << 30))
    failing = Filler(lambda: changed_and_put_back(plan.files.folder / "config.json"))  # type: ignore[union-attr]
    monkeypatch.setattr("appliance.supervisor.warm.save_template", failing)
    for _ in range(MOST_TEMPLATES - 1):
        warm.ask(plan, 1.0)
        await made_all(warm)
    assert len(saved_keys(warm)) == 1
    monkeypatch.setattr("appliance.supervisor.warm.save_template", Filler())
    warm.ask(plan, 1.0)
    await made_all(warm)
    assert len(saved_keys(warm)) == 2
    warm.ask(plan, 1.0)
    assert warm._wanted.empty(), "three were made or failed"


async def test_a_template_with_a_model_makes_way_for_wakes(
    ahead: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is begun with memory that a wake may need, and one under way, also one whose files are being checked, is
    given up when a model wakes that needs its memory, without a trace and uncounted. Controls: beside a wake that
    leaves it enough one is made, and that of the imports alone goes on."""
    warm, plan = ahead
    with_model, imports = starts(plan)
    warm.reserved = lambda: 32 << 30
    assert warm.take(with_model, 1.0) is None
    warm.reserved = lambda: 0
    monkeypatch.setattr("appliance.supervisor.warm.save_template", Filler(warm.make_way))
    assert warm.take(imports, 1.0) is not None
    warm.ask(plan, 1.0)
    await made_all(warm)
    assert (saved_keys(warm), warm._asked[plan.name]) == ({warm.key(imports.spec)}, 0)

    def wake_needs(memory: int) -> None:
        warm.reserved = lambda: memory
        warm.make_way_for_wake()

    def checked_meanwhile(_plan: BootPlan) -> dict[Path, Any]:
        wake_needs(32 << 30)
        return {}

    monkeypatch.setattr("appliance.supervisor.warm.save_template", Filler(lambda: wake_needs(32 << 30)))
    assert warm.take(with_model, 1.0) is None
    warm.reserved = lambda: 0
    with monkeypatch.context() as checking:  # Which may read all weights: a wake begins meanwhile.
        checking.setattr("appliance.supervisor.warm.save_template", Filler())
        checking.setattr("appliance.supervisor.warm._checked", checked_meanwhile)
        assert warm.take(with_model, 1.0) is None
    warm.reserved = lambda: 0
    monkeypatch.setattr("appliance.supervisor.warm.save_template", Filler(lambda: wake_needs(1 << 30)))
    assert warm.take(with_model, 1.0) is not None


def test_a_file_written_in_place_is_noticed_at_the_end(
    ahead: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file below a folder that is written while the template starts, without a change of its folder, leaves no
    checkpoint. Control: the next one is kept, under the name that it has then."""
    warm, plan = ahead
    (inside := plan.files.folder.parent / "below").mkdir()  # type: ignore[union-attr]
    (inside / "file").write_text("one")
    plan = replace(plan, spec=replace(plan.spec, mounts=(*plan.spec.mounts, Mount(inside, "/below"))))
    warm.key(plan.spec)
    filler = Filler(lambda: (inside / "file").write_text("other"))
    monkeypatch.setattr("appliance.supervisor.warm.save_template", filler)
    with pytest.raises(CheckpointError, match="have changed"):
        warm.take(plan, 1.0)
    monkeypatch.setattr("appliance.supervisor.warm.save_template", Filler())
    made = warm.take(plan, 1.0)
    assert made is not None and warm.store.find(warm.key(plan.spec)) == made
