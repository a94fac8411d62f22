"""What a device's rows are told, what a step may do, and that a recording behaves as a graph of launches does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.backends.cuda.runtime.launches import buckets
from engine.backends.cuda.runtime.loop import FOREIGN, NOTHING, RING_STEPS, DeviceLoop
from engine.backends.cuda.runtime.replay import RecordedSteps, UnrecordableError
from engine.backends.cuda.runtime.rows import NUM_FIELDS, Deltas, Field, RowLayout, number_field
from engine.backends.cuda.runtime.sampling_state import ChoiceMemory
from engine.backends.cuda.runtime.simulated_ops import PlainOperations
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.backends.cuda.runtime.tables import Tables
from engine.core.kv.layout import FULL, KvGroup, KvLayout, LayerLayout
from engine.core.scheduler.plan import FAILED
from engine.errors import ConfigurationError
from isolation.ipc.sampling import Sampling
from tests.engine.backends.cuda.runtime.toy import BLOCK, CPU, VOCAB, ToyModel, expected

LAYOUT = RowLayout(3, 2, 2, 6)
PROMPT = [5, 9, 2]


def toy_loop() -> tuple[DeviceLoop, DeviceStorage, Tensor]:
    """A loop over the toy model, its memory and its stamps."""
    like = LayerLayout(heads=1, key_dim=1, value_dim=1)
    operations = PlainOperations()
    kv = KvLayout(layers=(like,), block_size=BLOCK, dtype="float32", num_blocks=8)
    storage = DeviceStorage(kv, 3, operations, torch.float64, CPU)
    stamps = torch.arange(storage.num_blocks) * 10
    tables = Tables((KvGroup(FULL, BLOCK),), (LAYOUT.width,), storage.stride)
    choices = ChoiceMemory(LAYOUT.lines, VOCAB, frozenset(), CPU)
    return DeviceLoop(LAYOUT, ToyModel(storage), operations, choices, stamps, tables), storage, stamps


def admitted(loop: DeviceLoop, storage: DeviceStorage, *, stamp: int = 30) -> None:
    """Row 1 in lane 0, its prompt's first tokens computed, one more than a block to come."""
    model = ToyModel(storage)
    for place, token in enumerate(PROMPT[:-1]):
        model._write(torch.tensor([token]), torch.tensor([place]), (torch.tensor([3 * BLOCK + place]),))
    deltas = Deltas(LAYOUT)
    deltas.admit(1, len(PROMPT) + 4, [])
    deltas.put(1, 0, (3, 4), (stamp, 40))
    deltas.resume(1, PROMPT[-1], len(PROMPT) - 1)
    deltas.lane(0, 1)
    loop.announce(deltas)


def test_rows_advance_alone_until_their_limit() -> None:
    """Six steps of one bucket give a row's four tokens and then nothing; the lane beside it gives nothing at all."""
    loop, storage, _ = toy_loop()
    admitted(loop, storage)
    for _ in range(6):
        loop.step(2)
    assert loop.ring[:6, 0].tolist() == [*expected(PROMPT, len(PROMPT) + 4, ()), NOTHING, NOTHING]
    assert loop.ring[:6, 1].tolist() == [NOTHING] * 6


def test_a_row_with_a_foreign_block_is_not_computed() -> None:
    """Its lane says so, nothing is written to the block, and it is done. Control: with the right stamp it is."""
    for stamp, wanted in ((31, [FOREIGN, NOTHING]), (30, expected(PROMPT, len(PROMPT) + 4, ())[:2])):
        loop, storage, _ = toy_loop()
        admitted(loop, storage, stamp=stamp)
        before = storage.memory[0][3].clone()
        loop.step(1)
        loop.step(1)
        assert loop.ring[:2, 0].tolist() == wanted
        assert torch.equal(storage.memory[0][3], before) == (stamp == 31)


def test_a_row_without_finite_logits_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lane says that it failed, then nothing; what its lane looks up from then on is an id that there is."""
    loop, storage, _ = toy_loop()
    admitted(loop, storage)
    decode = ToyModel.decode
    monkeypatch.setattr(ToyModel, "decode", lambda *args: decode(*args) * torch.nan)
    loop.step(1)
    loop.step(1)
    assert loop.ring[:2, 0].tolist() == [FAILED, NOTHING]
    assert loop._fields[Field.LAST].min() >= 0


def test_a_recording_gives_what_the_step_gives() -> None:
    """Computed, recorded and replayed: rings and rows are the same as with steps computed anew each time, and the
    loop's memory stays where it is."""
    loops = []
    for recorded in (False, True):
        loop, storage, _ = toy_loop()
        admitted(loop, storage)
        before = [one.data_ptr() for one in vars(loop).values() if isinstance(one, Tensor)]
        steps = RecordedSteps(loop.step)
        for _ in range(RING_STEPS + 3):
            steps.run(2) if recorded else loop.step(2)
        assert before == [one.data_ptr() for one in vars(loop).values() if isinstance(one, Tensor)]
        loops.append(loop)
    assert torch.equal(loops[0].ring, loops[1].ring)
    assert torch.equal(loops[0]._words, loops[1]._words)


def test_a_recording_keeps_the_host_s_numbers_as_a_graph_does() -> None:
    """Control of the simulator itself: a number of the host that changes between replays does not reach them."""
    out, numbers = torch.zeros(1), iter((1.0, 2.0, 3.0, 4.0))

    def step(_: int) -> Tensor:
        return out.add_(torch.ones(1) * next(numbers))

    steps = RecordedSteps(step)
    values = []
    for _ in range(4):
        steps.run(1)
        values.append(out.item())
    assert values == [1.0, 3.0, 5.0, 7.0]


@pytest.mark.parametrize("look", ["item", "nonzero", "shape"])
def test_what_cannot_be_recorded_is_refused(look: str) -> None:
    """A number brought to the host, and a shape by one, are defects that a test sees without a GPU."""
    value = torch.ones(3)
    looks = {"item": lambda: value[0].item(), "nonzero": lambda: value.nonzero(), "shape": lambda: value[value > 0]}

    def step(_: int) -> Tensor:
        looks[look]()
        return value

    steps = RecordedSteps(step)
    steps.run(1)
    with pytest.raises(UnrecordableError, match="brings a number to the host"):
        steps.run(1)


def test_changes_travel_in_one_copy() -> None:
    """Of two changes to one address the later counts, and each is said once."""
    layout = RowLayout(2, 2, 1, 3)
    deltas = Deltas(layout)
    deltas.admit(1, 20, [7], Sampling(temperature=0.5, seed=(1 << 64) - 1))
    for block, stamp in ((3, 70), (6, 71)):
        deltas.put(1, 0, (block,), (stamp,))
    deltas.resume(1, 5, 9)
    deltas.lane(0, 1)
    words, count = layout.fresh(), len(deltas)
    addresses, values = deltas.take()
    words[addresses] = values
    assert len(set(addresses.tolist())) == len(addresses) == count
    assert not len(deltas) and deltas.take().shape == (2, 0)
    fields = words[: layout.first_stop].reshape(NUM_FIELDS, layout.lines)
    kept = Field.LAST, Field.POSITION, Field.LIMIT, Field.DONE, number_field("seed")
    assert [int(fields[field, 1]) for field in kept] == [5, 9, 20, 0, -1]
    assert fields[number_field("temperature"), 1:2].view("float64")[0] == 0.5
    assert words[layout.first_stop : layout.first_block].tolist() == [-1, 7, -1]
    assert words[layout.first_block : layout.first_stamp].reshape(3, 3)[1].tolist() == [6, 0, 0]
    assert words[layout.first_stamp : layout.first_lane].reshape(3, 3)[1].tolist() == [71, 0, 0]
    assert words[layout.first_lane :].tolist() == [1, 2]


def test_what_does_not_fit_a_row_is_refused() -> None:
    """Too many stop ids, a block behind the table, or a layout without a row get an error that says so."""
    deltas = Deltas(RowLayout(2, 2, 1, 3))
    with pytest.raises(ConfigurationError, match="room for 1 stop ids"):
        deltas.admit(0, 9, [1, 2])
    with pytest.raises(ConfigurationError, match="room for 3 blocks"):
        deltas.put(0, 3, (1,), (0,))
    with pytest.raises(ConfigurationError, match="room for 3 blocks"):
        deltas.extend(0, 2, (1, 0), (2, 0))
    with pytest.raises(ConfigurationError, match="at least one row"):
        RowLayout(0, 1, 1, 1)


def test_buckets_waste_at_most_half() -> None:
    """Every number of rows has a bucket that is less than twice as large, from 8 on at most half as large again."""
    for lanes in (1, 5, 64, 200, 256):
        sizes = buckets(lanes)
        assert list(sizes) == sorted(set(sizes)) and sizes[-1] == lanes
        for rows in range(1, lanes + 1):
            bucket = next(size for size in sizes if size >= rows)
            assert bucket < 2 * rows or bucket == 1
            assert rows < 9 or bucket <= rows * 1.5
