"""Warm starts with real sandboxes: made once, used, dropped when damaged, and nothing of anybody in them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import threading
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from appliance.common.catalog import embedded_model
from appliance.common.control import COLD, FALLEN_BACK, RESTORED
from appliance.selftest import intruder
from appliance.supervisor import boot as boot_module
from appliance.supervisor.boot import Booted, BootPlan, end
from appliance.supervisor.keeper import Keeper
from appliance.supervisor.lifecycle import Life, State
from appliance.supervisor.templates import start_is_ahead, starts
from appliance.supervisor.warm import WarmStarts
from engine.config import TextConfig
from engine.text.grammar_matcher import CompiledGrammar
from engine.text.token_bytes import build_tokenizer
from engine.text.worker import load_worker
from isolation.errors import SandboxStartError
from isolation.gvisor.checkpoint import Checkpoint
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.spec import GpuAccess
from isolation.ipc.channel import Channel
from isolation.ipc.grammar import Advance, GrammarKind, Masks, OpenGrammar
from isolation.ipc.messages import Failed, FailureCode, Role
from tests.appliance.supervisor.warm_plans import make
from tests.engine.text.test_process import next_message

pytestmark = pytest.mark.runsc

CANARY = "canary-of-a-tenant-8d1f0c"


@pytest.fixture(scope="module", autouse=True)
def at_once() -> Iterator[None]:
    """Templates wait for nobody here, and have a whole core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("appliance.supervisor.warm.BEGIN_AFTER_S", 0.0)
        patch.setattr("appliance.supervisor.templates.TEMPLATE_CORES", 1.0)
        yield


@pytest.fixture(scope="module")
def gvisor(runsc_path: Path):
    """Real sandboxes, or a skip with the reason."""
    try:
        with intruder.gvisor() as runtime:
            yield runtime
    except intruder.CannotBeShownError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def made(gvisor: GvisorRuntime, tmp_path_factory: pytest.TempPathFactory) -> tuple[WarmStarts, BootPlan]:
    """The text sandbox's checkpoint, made from a template."""
    warm, plan = make(Path(os.path.realpath(tmp_path_factory.mktemp("w"))), gvisor)
    assert warm.take(base(plan), 60.0) is not None
    assert warm.take(base(plan), 60.0) is None, "one is enough"
    return warm, plan


def base(plan: BootPlan) -> BootPlan:
    """The plan of what is saved before anything of a model."""
    return starts(plan)[-1]


def started(warm: WarmStarts, plan: BootPlan) -> str:
    """How a boot began; the sandbox has given real ids and is ended."""
    booted = warm.boot(plan, threading.Event())
    end(booted)
    return booted.start


@pytest.mark.parametrize("torn", [False, True])
def test_a_start_uses_the_checkpoint_and_damage_costs_nothing_but_time(
    made: tuple[WarmStarts, BootPlan], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], torn: bool
) -> None:
    """A sandbox comes up as a copy; with one bit wrong, or half of the file, it comes up without, and the checkpoint is
    gone."""
    warm, plan = made
    assert started(warm, plan) == RESTORED
    found = warm.store.find(warm.key(base(plan).spec))
    assert found is not None
    pages = found.folder / "pages.img"
    data = bytearray(pages.read_bytes())
    data[len(data) // 2] ^= 1
    pages.write_bytes(data[: len(data) // 2] if torn else data)
    assert started(warm, plan) == FALLEN_BACK
    assert "is damaged" in capsys.readouterr().out + caplog.text
    assert os.listdir(warm.store.root) == []
    assert warm.take(base(plan), 60.0) is not None
    assert started(warm, plan) == RESTORED


@pytest.mark.full
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
    assert warm.take(base(plan), 60.0) is not None


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
    found = warm.store.find(warm.key(base(plan).spec))
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
    marked = base(replace(plan, spec=replace(plan.spec, env=(*plan.spec.env, ("MARK", CANARY)))))
    assert warm.key(marked.spec) != warm.key(base(plan).spec)
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
    assert (len(starts(large)), starts(on_card)) == (2, (base(on_card),))


def test_tenants_own_sandboxes_have_none(gvisor: GvisorRuntime, made: tuple[WarmStarts, BootPlan]) -> None:
    """Copies lie in memory alike; a sandbox of a single tenant is never one, and nobody makes one for it."""
    warm, _ = made
    _, own = make(warm.store.root.parent, gvisor, tenant="t")
    assert warm._find(own) is None
    warm.ask(own, 1.0)
    assert warm._wanted.empty()


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


@pytest.mark.full
def test_a_cold_start_after_deaths_drops_the_checkpoint(made: tuple[WarmStarts, BootPlan]) -> None:
    """So that the next one is made of what runs then."""
    warm, plan = made
    booted: Booted = warm.boot_cold(plan, threading.Event())
    end(booted)
    assert booted.start == COLD
    assert os.listdir(warm.store.root) == []
    assert warm.take(base(plan), 60.0) is not None


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short name: the path of a socket is bounded."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(os.path.realpath(folder))


@pytest.mark.full
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
