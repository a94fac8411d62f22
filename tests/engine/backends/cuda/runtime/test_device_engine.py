"""Whole engines on the device backend: the answers of the plain loop, for every form of model and request."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.backends.cuda.load import device_for, uses_device
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.kv.layout import LayerLayout, Reach
from engine.core.offline import Answer, collect, generate
from engine.core.scheduler.plan import RowMask
from engine.errors import ConfigurationError
from engine.startup.load import check_config, spill_obstacle
from engine.startup.warmup import warm_up
from isolation.ipc.engine import Submit
from isolation.ipc.messages import FailureCode
from isolation.ipc.sampling import Sampling
from tests.engine.support import make_engine, model_config, random_model, submit

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, SPARES = 97, 17
CLOSE = 1e-4
"""Between log-probabilities of two ways to compute in float32."""

FORMS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "attention_bias": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
    "mistral": {"architecture": "MistralForCausalLM", "num_kv_heads": 4},
}
EVERY_RUN = ("tied", "qwen3")
"""Qwen3 has Llama's form and norms of heads; eight families more run in ``test_device_families``."""


def engines(**fields: object) -> tuple[Engine, Engine]:
    """The plain loop and the device's around the same weights, with as many blocks for each."""
    made = []
    for backend, blocks in (("plain", 48), ("device", 48 + SPARES)):
        model = random_model(model_config(**fields), packed=False)
        made.append(make_engine(model, num_blocks=blocks, backend=backend))
    assert made[0].runner.storage.layout.num_blocks == made[1].runner.storage.layout.num_blocks
    assert isinstance(made[1].runner, DeviceRunner)
    return made[0], made[1]


def requests(seed: int, **fields: object) -> list[Submit]:
    """Requests of all lengths, greedy and drawn."""
    draw = random.Random(seed)
    made = []
    for number in range(1, 9):
        sampling = Sampling(
            temperature=draw.choice((0.0, 0.7, 1.3)),
            top_k=draw.choice((0, 5)),
            top_p=draw.choice((1.0, 0.8)),
            min_p=draw.choice((0.0, 0.05)),
            typical_p=draw.choice((1.0, 0.9)),
            seed=draw.getrandbits(64),
        )
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))]
        made.append(submit(number, prompt, draw.randint(1, 24), **{"sampling": sampling, **fields}))
    return made


def same(plain: dict[int, Answer], device: dict[int, Answer]) -> bool:
    """Tokens, ends and failures are equal; log-probabilities are close."""
    for number, one in plain.items():
        other = device[number]
        if (one.token_ids, one.finish, one.failure) != (other.token_ids, other.finish, other.failure):
            return False
        pairs = list(zip(one.logprobs, other.logprobs, strict=True))
        assert all(a.top_ids == b.top_ids and abs(a.logprob - b.logprob) < CLOSE for a, b in pairs)
        assert [part.start for part in one.prompts] == [part.start for part in other.prompts]
        for a, b in zip(one.prompts, other.prompts, strict=True):
            assert all(abs(x - y) < CLOSE for x, y in zip(a.logprobs, b.logprobs, strict=True))
    return True


@pytest.mark.parametrize(
    "form", [pytest.param(one, marks=() if one in EVERY_RUN else pytest.mark.full) for one in FORMS]
)
def test_answers_are_those_of_the_plain_loop(form: str) -> None:
    """Greedy and drawn tokens of each form of model, with prompts in chunks and rows that come and go; the device ran
    ahead for most of them."""
    plain, device = engines(**FORMS[form])
    wanted = generate(plain, requests(1))
    assert same(wanted, generate(device, requests(1)))
    assert device.runner.num_ahead > sum(len(one.token_ids) for one in wanted.values()) / 2


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 3},
        {"prompt_logprobs": 2},
        {"sampling": Sampling(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, seed=5)},
        {"sampling": Sampling(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.4), "logprobs": 20},
    ],
    ids=["logprobs", "prompt", "penalties", "both"],
)
def test_what_some_ask_for_is_the_same(fields: dict[str, object]) -> None:
    """Log-probabilities, of prompts too, and penalties, in a batch where every other request asks for nothing; the
    device runs ahead for all of them."""
    plain, device = engines()
    mixed = [one if number % 2 else two for number, (one, two) in enumerate(zip(requests(2), requests(2, **fields)))]
    wanted = generate(plain, mixed)
    assert same(wanted, generate(device, mixed))
    assert device.runner.num_ahead > sum(len(one.token_ids) for one in wanted.values()) / 2


def test_masked_rows_choose_what_they_may() -> None:
    """A structured request beside others: its tokens are allowed ones, and the same as on the plain loop."""
    allowed = [3, 8, 50]
    words = sum(1 << token for token in allowed).to_bytes(16, "little")
    answers = []
    for engine in engines():
        found: dict[int, Answer] = {}
        engine.add(submit(1, [4, 5, 6], 6, structured=True))
        engine.add(submit(2, [9, 9], 12))
        for step in range(40):
            if step < 6:
                engine.scheduler.set_mask(1, step, RowMask(words, accepting=False))
            if engine.has_work:
                collect(engine, found)
        answers.append(found)
    assert same(*answers)
    assert len(answers[1][1].token_ids) == 6 and set(answers[1][1].token_ids) <= set(allowed)


def other_block(engine: Engine) -> None:
    """Request 1's table on the device names a block of request 2."""
    tables = engine.runner._loop.state.entries
    rows = {number: engine.scheduler._live.by_id[number].row for number in (1, 2)}
    tables[rows[1], 0] = tables[rows[2], 0]


def no_block(engine: Engine) -> None:
    """Request 1's table names a block that does not exist."""
    row = engine.scheduler._live.by_id[1].row
    engine.runner._loop.state.entries[row, 1] = 1 << 40


def other_spare(engine: Engine) -> None:
    """Request 1's table names request 2's spare block."""
    rows = {number: engine.scheduler._live.by_id[number].row for number in (1, 2)}
    engine.runner._loop.state.entries[rows[1], 0] = engine.runner.storage.spare(rows[2])


@pytest.mark.parametrize("fault", [other_block, no_block, other_spare])
def test_a_table_on_the_device_that_names_a_foreign_block(fault: Callable[[Engine], None]) -> None:
    """The request fails as broken, the one whose block it was goes on to its own tokens, and nothing of the foreign
    block reaches anybody."""
    wanted = generate(engines()[1], [submit(2, range(30, 50), 14, tenant=2)])[2].token_ids
    _, engine = engines()
    answers: dict[int, Answer] = {}
    engine.add(submit(1, range(5, 20), 14, tenant=1))
    engine.add(submit(2, range(30, 50), 14, tenant=2))
    for _ in range(4):
        collect(engine, answers)
    before = len(answers[1].token_ids)
    fault(engine)
    while engine.has_work:
        collect(engine, answers)
    assert answers[1].failure is FailureCode.INTEGRITY
    # What was run ahead of the fault is still delivered.
    assert len(answers[1].token_ids) <= before + 4
    assert answers[2].failure is None and answers[2].token_ids == wanted


@pytest.mark.parametrize(("behind", "failure"), [(False, FailureCode.INTEGRITY), (True, None)])
def test_a_foreign_block_in_the_table_of_a_window(behind: bool, failure: FailureCode | None) -> None:
    """One that the window sees breaks the request. Control: one behind the window, which may be anybody's by then, is
    not looked at, and the answer is as ever."""
    full = LayerLayout(heads=2, key_dim=8, value_dim=8)
    layers = full, replace(full, reach=Reach("window", 6))
    asked = [submit(1, range(5, 20), 14, tenant=1), submit(2, range(30, 50), 14, tenant=2)]
    plain, engine = (
        make_engine(random_model(model_config(layers=layers), packed=False), backend=backend, num_blocks=200)
        for backend in ("plain", "device")
    )
    wanted = generate(plain, asked)
    answers: dict[int, Answer] = {}
    for one in asked:
        engine.add(one)
    for _ in range(4):
        collect(engine, answers)
    loop = engine.runner._loop
    row, other = (engine.scheduler._live.by_id[number].row for number in (1, 2))
    at = loop.tables.place(1, 0 if behind else 4)
    loop.state.entries[row, at] = loop.state.entries[other, loop.tables.place(1, 5)]
    while engine.has_work:
        collect(engine, answers)
    assert answers[1].failure is failure
    assert answers[2].failure is None and answers[2].token_ids == wanted[2].token_ids
    assert behind == (answers[1].token_ids == wanted[1].token_ids)


def test_a_foreign_block_under_a_prompt() -> None:
    """A chunk whose table names somebody else's block is not computed, and its request fails; its neighbour's does
    not. Control: without the fault both answer."""
    for broken in (False, True):
        _, engine = engines()
        prepare = engine.runner._prepare

        def breaking(plan, prepare=prepare, engine=engine, broken=broken):
            prepare(plan)
            engine.runner._loop.announce(engine.runner._deltas)
            if broken and any(chunk.start for chunk in plan.prefills):
                chunk = next(chunk for chunk in plan.prefills if chunk.start)
                engine.runner._loop.state.entries[chunk.row, 0] += 1

        engine.runner._prepare = breaking
        answers = generate(engine, [submit(1, range(60), 4), submit(2, [7, 8], 4)])
        assert (answers[1].failure is FailureCode.INTEGRITY) == broken
        assert answers[2].failure is None and len(answers[2].token_ids) == 4


def test_blocks_are_zero_for_their_next_holder() -> None:
    """Another tenant's request finds no number of the one before in its blocks or in its row's spare one: behind its
    own tokens everything is zero. Control: the first tenant's blocks are not zero while it has them."""
    _, engine = engines()
    memory = engine.runner.storage.memory[0]
    generate(engine, [submit(number, range(40), 20, tenant=1) for number in range(1, 9)])
    assert memory[1 : engine.runner.storage.layout.num_blocks + 1].any()
    assert memory[engine.runner.storage.spare(0) :].any(), "nothing was run ahead into a spare block"
    answers: dict[int, Answer] = {}
    engine.add(submit(20, [1, 2, 3, 4, 5], 9, tenant=2))
    collect(engine, answers)
    request = engine.scheduler._live.by_id[20]
    size = engine.runner.storage.layout.block_size
    tokens = memory[request.kv.blocks].view(len(request.kv.blocks), -1, size, *memory.shape[2:])
    assert tokens[0].all(dim=-1).any() and not tokens[1, :, 2:].any()
    assert not memory[engine.runner.storage.spare(request.row)].any()


def test_warm_up_leaves_nothing_behind() -> None:
    """After the largest steps were run and all buckets recorded, memory is zero and answers are as without it."""
    plain, device = engines()
    warm_up(device)
    assert not any(memory.any() for memory in device.runner.storage.memory)
    assert same(generate(plain, requests(3)), generate(device, requests(3)))


def test_what_it_does_not_compute_is_named() -> None:
    """Layers that keep different shapes, another dtype, an int8 engine, too little memory for spare blocks and an
    unknown backend get an error that says what to do."""
    like = LayerLayout(heads=2, key_dim=8, value_dim=8)
    with pytest.raises(ConfigurationError, match=r"different shapes; set backend to plain"):
        make_engine(random_model(model_config(layers=(like, replace(like, heads=1))), packed=False), backend="device")
    with pytest.raises(ConfigurationError, match=r"not float16; set backend to plain"):
        make_engine(random_model(model_config(), dtype=torch.float16, packed=False), backend="device")
    with pytest.raises(ConfigurationError, match="multiplies no int8"):
        make_engine(random_model(model_config(), packed=False), backend="device", quantization="int8")
    with pytest.raises(ConfigurationError, match="spare block"):
        make_engine(random_model(model_config(), packed=False), backend="device", num_blocks=12)
    with pytest.raises(ConfigurationError, match="must be one of: auto, device, plain"):
        check_config(EngineConfig(model_dir="x", model_digest="00", backend="quick"))


def test_which_backend_runs_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU the automatic choice is the device backend on it, for models that give tokens; without one it is the
    plain loop. Blocks of the device backend stay in its engine."""
    found = {}
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        for backend in ("auto", "device", "plain"):
            config = EngineConfig(model_dir="x", model_digest="00", backend=backend)
            found[gpu, backend] = uses_device(config), device_for(config)
            assert not uses_device(replace(config, runner="embed"))
    assert found == {
        (False, "auto"): (False, "cpu"),
        (False, "device"): (True, "cpu"),
        (False, "plain"): (False, "cpu"),
        (True, "auto"): (True, "cuda"),
        (True, "device"): (True, "cuda"),
        (True, "plain"): (False, "cpu"),
    }
    monkeypatch.undo()
    config = EngineConfig(model_dir="x", model_digest="00", backend="device")
    plain, device = engines()
    assert "loaded without spill" in spill_obstacle(config, device.runner)
    assert not spill_obstacle(config, plain.runner)


def test_a_row_s_stop_ids_beyond_the_device_s_are_the_scheduler_s() -> None:
    """Of forty stop ids the device compares some; the request ends at the first of any, as on the plain loop."""
    answers = [
        generate(engine, [submit(1, [3, 1, 4], 60, stop_ids=tuple(range(20, 60))), submit(2, [2, 7], 30)])
        for engine in engines()
    ]
    assert same(*answers) and len(answers[0][1].token_ids) < 60
