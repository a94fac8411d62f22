"""An engine on a device is made while its weights are read: steps recorded before them, and everything that goes wrong
meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.cuda import load
from engine.backends.cuda.runtime.launches import Launcher, buckets
from engine.backends.cuda.runtime.model import DeviceModel
from engine.backends.cuda.runtime.preparation import MovedWeightsError, WeightMemory, memory_of, reading
from engine.backends.cuda.runtime.replay import UnrecordableError
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.backends.cuda.runtime.sampling_state import ChoiceMemory
from engine.backends.cuda.runtime.simulated_ops import PlainOperations
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.offline import generate
from engine.errors import ConfigurationError, ModelLoadError
from engine.model.checkpoint import weights
from engine.model.checkpoint.weights import SINGLE_FILE, UnreadModel, load_model, unread_model
from engine.model.layers import layers
from engine.model.layers.decoder import Decoder
from engine.startup.load import build_engine, load_engine
from engine.startup.warmup import warm_up
from isolation.ipc.engine import Submit
from isolation.ipc.messages import WeightForm
from tests.engine.backends.cuda.runtime.held import LOOK_S, logits_of, recorded_first
from tests.engine.model.families.table import FAMILIES, save_reference
from tests.engine.support import make_engine, model_config, random_model, save_model, submit

WAIT_S = 30.0
ROWS = 4
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(folder: Path, **fields: object) -> EngineConfig:
    """An engine of few rows on the device backend."""
    values: dict[str, Any] = {
        "model_dir": str(folder),
        "model_digest": "00",
        "kv_bytes": 1 << 20,
        "block_size": 4,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": 16,
        "max_context": 96,
        "backend": "device",
        **fields,
    }
    return EngineConfig(**values)


def work(count: int = 6) -> list[Submit]:
    """Greedy requests of several lengths."""
    draw = random.Random(3)
    prompts = [[draw.randrange(97) for _ in range(draw.randint(1, 20))] for _ in range(count)]
    return [submit(number, prompt, 12) for number, prompt in enumerate(prompts, 1)]


def tokens(engine: Engine) -> list[list[int]]:
    """What the engine answers."""
    answers = generate(engine, work())
    return [answers[one.request].token_ids for one in work()]


def state(engine: Engine) -> dict[str, Any]:
    """All that an engine on a device keeps of rows, blocks and steps."""
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    launcher, loop, rows = runner._launcher, runner._loop, runner._rows
    held: dict[str, Any] = {f"memory {place}": memory for place, memory in enumerate(runner.storage.memory)}
    held |= {"stamps": runner._stamps, "counts": runner._choices.counts, "masks": runner._choices.masks}
    held |= {"words": loop._words, "ring": loop.ring, "reports": loop.reports, "turn": loop._turn}
    held |= {"lanes": torch.from_numpy(launcher._lanes), "ahead": torch.from_numpy(rows.ahead)}
    numbers = launcher._turn, runner.num_ahead, len(runner._deltas), len(runner._ahead.pending), runner._ahead.steady
    return held | {"numbers": torch.tensor(numbers)}


def differing(one: Engine, other: Engine) -> list[str]:
    """What two engines keep that is not the same."""
    kept = state(other)
    return [name for name, tensor in state(one).items() if not torch.equal(tensor, kept[name])]


def test_steps_that_were_recorded_before_the_weights_give_the_eager_loop_s_tokens(tmp_path: Path) -> None:
    """Every bucket is recorded on memory that holds zeros; filled, it gives the tokens of an engine that computes each
    step anew; a warm-up, which comes after the weights, leaves the recordings as they are."""
    save_model(tmp_path, model_config())
    zeros = []
    with recorded_first(lambda unread: zeros.append(_largest(unread))):
        engine = load_engine(config_of(tmp_path), warm=False)
    assert zeros == [0.0]
    runner = engine.runner
    assert isinstance(runner, DeviceRunner) and runner.recorded == buckets(ROWS)
    tapes = dict(runner._launcher._replayer._recordings)
    wanted = tokens(load_engine(config_of(tmp_path, backend="plain"), warm=False))
    warm_up(engine)
    assert tokens(engine) == wanted and len({token for answer in wanted for token in answer}) > 9
    assert runner._launcher._replayer._recordings == tapes


def test_nothing_of_the_recordings_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV, stamps, counts, masks, rows, rings and counters are those of an engine that has never run a step,
    whether there were weights or not. Control: without the cleaning they are not."""
    save_model(tmp_path, model_config())
    config = config_of(tmp_path)
    model = load_model(config.model_dir, model_config(), dtype="auto", device=CPU, packed=False)
    untouched = build_engine(config, model)
    with recorded_first():
        engine = load_engine(config, warm=False)
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    assert differing(engine, untouched) == []
    # Once more, with weights: on zeros a step leaves zeros.
    runner._launcher._replayer._recordings.clear()
    runner.record(lambda: False)
    assert differing(engine, untouched) == []
    for owner, name in ((Launcher, "reset"), (DeviceStorage, "clean"), (ChoiceMemory, "clean")):
        monkeypatch.setattr(owner, name, lambda _: None)
    runner._launcher._replayer._recordings.clear()
    runner.record(lambda: False)
    left = differing(engine, untouched)
    assert {"memory 0", "memory 1", "counts", "reports", "turn", "numbers"} == set(left)


def test_recording_ends_when_the_weights_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that is being recorded when the last weight comes is finished, and no other is begun; warm-up records
    the rest, and the tokens are the same."""
    save_model(tmp_path, model_config())
    asked: list[Callable[[], bool]] = []
    decode, record, fill = DeviceModel.decode, DeviceRunner.record, UnreadModel.fill
    begun = threading.Event()

    def held(unread: UnreadModel, *given: Callable[[], bool]) -> None:
        assert begun.wait(WAIT_S)
        fill(unread, *given)

    def late(*given: Any) -> torch.Tensor:
        begun.set()
        while not asked[0]():
            threading.Event().wait(LOOK_S)
        return decode(*given)

    def told(runner: DeviceRunner, enough: Callable[[], bool]) -> None:
        asked.append(enough)
        record(runner, enough)

    monkeypatch.setattr(UnreadModel, "fill", held)
    monkeypatch.setattr(DeviceModel, "decode", late)
    monkeypatch.setattr(DeviceRunner, "record", told)
    engine = load_engine(config_of(tmp_path), warm=False)
    assert isinstance(engine.runner, DeviceRunner)
    assert engine.runner.recorded == (ROWS,)
    engine.runner.prove()
    assert engine.runner.recorded == buckets(ROWS)
    engine.runner.touch()
    assert tokens(engine) == tokens(load_engine(config_of(tmp_path, backend="plain"), warm=False))


def test_weights_that_are_replaced_after_recording_are_noticed(tmp_path: Path) -> None:
    """A vector that is put in another one's place, and matrices that are packed, each leave recordings that read what
    nobody fills any more: replays show it, and the check names it. Control: as loaded it finds nothing."""
    save_model(tmp_path, model_config())
    with recorded_first() as models:
        engine = load_engine(config_of(tmp_path), warm=False)
    runner, model = engine.runner, models[0].model
    assert isinstance(runner, DeviceRunner)
    memory = WeightMemory(runner.model, models[0])
    memory.check()
    sound, replaced = tokens(engine), model.norm.weight
    model.norm.weight = -replaced
    with pytest.raises(MovedWeightsError, match="of the pieces were replaced"):
        memory.check()
    with torch.inference_mode():
        runner._launcher._replayer.run(2)
        assert not torch.equal(logits_of(runner, 2), runner._loop.step(2))
    model.norm.weight = replaced
    memory.check()
    runner._launcher.reset()
    assert tokens(engine) == sound
    model.pack()
    with pytest.raises(MovedWeightsError, match="were replaced since"):
        memory.check()


def test_weights_that_a_copy_is_made_of_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' maps that do not lie in one piece would be computed with as a copy of what is still zero: the start
    ends with the tensor's name, and the reading with it. Control: in one piece they are read where they lie."""
    save_reference(tmp_path, "mixtral", **FAMILIES["mixtral"].cases["thirteen experts"])
    with recorded_first():
        load_engine(config_of(tmp_path), warm=False)
    monkeypatch.setattr(
        layers.Memory, "several", lambda memory, count, *shape: [memory.empty(*shape) for _ in range(count)]
    )
    before = threading.active_count()
    with recorded_first(), pytest.raises(MovedWeightsError, match=r"experts.* is filled in memory that no step reads"):
        load_engine(config_of(tmp_path), warm=False)
    assert threading.active_count() == before


def test_memory_is_found_in_whatever_holds_it() -> None:
    """Containers, closures, methods and our own objects are looked into, others are not, and circles end."""
    some = [torch.ones(1) for _ in range(4)]
    model = random_model(model_config())
    model.loop = model  # type: ignore[attr-defined]
    model.held = {"a": (some[0], [some[1]])}  # type: ignore[attr-defined]
    model.call = lambda: some[2]  # type: ignore[attr-defined]
    model.other = threading.local()  # type: ignore[attr-defined]
    model.other.tensor = some[3]
    found = memory_of(model)
    assert {one.data_ptr() for one in some[:3]} <= found
    assert model.norm.weight.data_ptr() in found and model.embedding.weight.data_ptr() in found


@pytest.mark.parametrize("fault", ["cut off", "not a number"])
def test_a_reading_that_fails_ends_the_start(fault: str, tmp_path: Path) -> None:
    """A file that is cut off while steps are recorded, and one that holds NaN, end the start with the reader's own
    error; no thread is left. Control: the sound file starts."""
    save_model(tmp_path, model_config())
    file = tmp_path / SINGLE_FILE
    sound = file.read_bytes()
    if fault == "not a number":
        loaded = load_file(file)
        loaded["model.norm.weight"][3] = torch.nan
        save_file(loaded, file)

    def cut(_: UnreadModel) -> None:
        if fault == "cut off":
            with file.open("r+b") as stream:
                stream.truncate(len(sound) - 999)

    before = threading.active_count()
    with recorded_first(cut), pytest.raises(ModelLoadError, match=r"ends early|holds a number that is not finite"):
        load_engine(config_of(tmp_path))
    assert threading.active_count() == before
    file.write_bytes(sound)
    load_engine(config_of(tmp_path), warm=False)


def test_a_recording_that_fails_stops_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error comes out, no further tensor is read, and no thread is left."""
    save_model(tmp_path, model_config())
    read: list[object] = []
    fill = UnreadModel.fill

    def step(*_: object) -> torch.Tensor:
        raise UnrecordableError("a step brings a number to the host")

    def waiting(unread: UnreadModel, stopped: Callable[[], bool]) -> None:
        while not stopped():
            threading.Event().wait(LOOK_S)
        fill(unread, stopped)

    monkeypatch.setattr(DeviceModel, "decode", step)
    monkeypatch.setattr(UnreadModel, "fill", waiting)
    monkeypatch.setattr("engine.model.checkpoint.weights._read", lambda *given: read.append(given))
    before = threading.active_count()
    with pytest.raises(UnrecordableError, match="brings a number"):
        load_engine(config_of(tmp_path))
    assert not read and threading.active_count() == before


def test_room_is_asked_for_before_any_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is what the weights take; where there is not so much, no memory is taken."""
    save_model(tmp_path, model_config())
    asked: list[int] = []
    given = {"dtype": "bfloat16", "device": CPU}
    with unread_model(str(tmp_path), model_config(), room=asked.append, **given) as unread:
        pieces = unread.checklist.pieces.values()
        assert asked == [sum(home.target.nbytes for piece in pieces for home in piece.homes)]

    def refuse(_: int) -> None:
        raise ConfigurationError("the GPU has no room")

    build = weights.build_model
    monkeypatch.setattr(weights, "build_model", lambda *some, **more: pytest.fail("taken") if more else build(*some))
    with (
        pytest.raises(ConfigurationError, match="no room"),
        unread_model(str(tmp_path), model_config(), room=refuse, **given),
    ):
        pytest.fail("it went on")


def test_what_a_device_does_not_compute_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """int8 and float16 are named at once: the reading, held back here for ever, is stopped."""
    save_model(tmp_path, model_config())
    for fields, said in (({"quantization": "int8"}, "multiplies no int8"), ({"dtype": "float16"}, "not float16")):
        with recorded_first(lambda _: pytest.fail("weights were read")), pytest.raises(ConfigurationError, match=said):
            load_engine(config_of(tmp_path, **fields))


def test_errors_of_files_go_first() -> None:
    """Where both sides fail the error of the files comes out, with the other one behind it; of other errors that of
    what is inside; and a lone error of the reading when the inside is over."""
    failed = threading.Event()

    def fill(error: Exception) -> Callable[[Callable[[], bool]], None]:
        def run(_: Callable[[], bool]) -> None:
            failed.set()
            raise error

        return run

    with pytest.raises(ModelLoadError, match="short") as caught, reading(fill(ModelLoadError("a file is short"))):
        assert failed.wait(WAIT_S)
        raise UnrecordableError("inside")
    assert isinstance(caught.value.__cause__, UnrecordableError)
    with pytest.raises(UnrecordableError, match="inside"), reading(fill(RuntimeError("no memory"))):
        raise UnrecordableError("inside")
    done = []
    with pytest.raises(RuntimeError, match="no memory"), reading(fill(RuntimeError("no memory"))) as under_way:
        failed.wait(WAIT_S)
        done.append(under_way)
    assert done[0].over()


def test_the_plain_loop_reads_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor nothing is put beside the reading, and no thread is started for it."""
    save_model(tmp_path, model_config())
    monkeypatch.setattr(load, "reading", lambda _: pytest.fail("a thread was started"))
    load_engine(config_of(tmp_path, backend="plain"), warm=False)


def test_the_largest_step_is_recorded_first() -> None:
    """Warm-up computes and records buckets from the largest down, each twice; control: requests then take what they
    need, in any order, without another recording."""
    engine = make_engine(random_model(model_config(), packed=False), backend="device", num_blocks=64)
    replayer = engine.runner._launcher._replayer
    seen: list[int] = []
    run = replayer.run

    def watched(bucket: int) -> torch.Tensor:
        seen.append(bucket)
        return run(bucket)

    replayer.run = watched
    engine.runner.prove()
    assert seen == [16, 16, 12, 12, 8, 8, 4, 4, 2, 2, 1, 1]
    tapes = dict(replayer._recordings)
    assert all(tape is not None for tape in tapes.values())
    warm_up(engine)
    assert replayer._recordings == tapes


def _largest(unread: UnreadModel) -> float:
    """The largest number in a model's memory."""
    pieces = unread.checklist.pieces.values()
    return max(home.target.abs().max().item() for piece in pieces for home in piece.homes)


def test_an_engine_with_palettes_reads_its_weights_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Palettes are made of filled weights, before the cache takes what is left: when they are asked for, the largest
    weight is not zero. The answers are those without them, and the engine's line says what was chosen."""
    save_model(tmp_path, model_config())
    seen = []

    def take(_operations: PlainOperations, model: Decoder) -> str:
        seen.append(float(model.layers[0].sublayers[1].block.down.linear.loaded.abs().max()))
        return "palettes: as told"

    monkeypatch.setattr(PlainOperations, "take_palettes", take)
    monkeypatch.setattr(PlainOperations, "has_palettes", True)
    plain, other = (load_engine(config_of(tmp_path, palette=palette), warm=False) for palette in (False, True))
    assert len(seen) == 1
    assert seen[0] > 0
    assert tokens(other) == tokens(plain)
    assert other.runner.description.endswith("; palettes: as told")
    assert "palettes" not in plain.runner.description
    assert (plain.ready().weights, other.ready().weights) == (WeightForm.FLOAT32, WeightForm.PALETTE)
