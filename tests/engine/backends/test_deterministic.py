"""The deterministic class: tokens and log-probabilities are the same bits alone and in any batch, chunks and order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.engine import Engine
from engine.core.kv.layout import FULL, Reach, uniform_layers
from engine.core.offline import Answer, collect, generate
from engine.core.scheduler.forecast import Forecast
from engine.model.layers.decoder import Decoder
from engine.startup.warmup import warm_up
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling
from tests.engine.support import make_engine, model_config, random_model, submit

KINDS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_k=20, top_p=0.9),
    Sampling(temperature=1.2, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3),
)
SMALL_BATCHES = 60
ALL_BATCHES = 2_000


@dataclass(frozen=True)
class Setting:
    """One model on one backend, with the number of threads that compute."""

    name: str
    dtype: torch.dtype = torch.float32
    compiled: str | None = None
    """The variant of the kernels, empty for the best; None for plain operations."""
    quantization: str = "none"
    threads: int = 1
    """All compiled ones have the same: a process's kernels keep their threads."""
    shape: tuple[tuple[str, object], ...] = ()

    def engine(self, kernel_dir: Callable[..., Path], **fields: object) -> Engine:
        """A fresh engine, as after a restart: weights drawn again from the same seed."""
        kernels = {"kernels": str(kernel_dir(self.compiled))} if self.compiled is not None else {}
        model = random_model(model_config(**dict(self.shape)), dtype=self.dtype, packed=False)
        engine = make_engine(model, threads=self.threads, quantization=self.quantization, **kernels, **fields)
        torch.set_num_threads(self.threads)
        assert engine.runner.forward.checks_owners or self.compiled is None, engine.runner.description
        return engine


ODD = (("num_heads", 3), ("num_kv_heads", 1), ("head_dim", 10), ("hidden_size", 37), ("intermediate_size", 45))
REACHES = (FULL, *(Reach("window", 9),) * 3, Reach("chunk", 7))
WINDOWS = (
    ("num_layers", len(REACHES)),
    ("layers", tuple(layer for reach in REACHES for layer in uniform_layers(1, 2, 8, reach))),
)
WIDE = (("num_heads", 8), ("num_kv_heads", 2), ("head_dim", 16), ("hidden_size", 128), ("intermediate_size", 288))
ALONE = (("num_heads", 2), ("num_kv_heads", 2), ("head_dim", 16))
"""A head of its own for each query: torch's threads then have buffers of an odd length."""
SETTINGS = [
    Setting("plain"),
    Setting("plain odd two threads", threads=2, shape=ODD),
    Setting("plain alone two threads", threads=2, shape=ALONE),
    Setting("plain bf16", dtype=torch.bfloat16, shape=WIDE),
    Setting("plain int8", quantization="int8"),
    Setting("plain windows", shape=WINDOWS),
    Setting("kernels", compiled="", threads=2),
    Setting("kernels bf16", dtype=torch.bfloat16, compiled="", threads=2, shape=WIDE),
    Setting("kernels bf16 x86-64-v3", dtype=torch.bfloat16, compiled="x86-64-v3", threads=2, shape=WIDE),
    Setting("kernels int8 odd", quantization="int8", compiled="", threads=2, shape=ODD),
]


@pytest.fixture(autouse=True)
def threads() -> object:
    """Whatever a setting makes of the number of threads is undone."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def victims(generator: np.random.Generator, *, deterministic: bool) -> list[Submit]:
    """Requests of all kinds, two of them with a common beginning."""
    common = generator.integers(0, 97, 24).tolist()
    found = []
    for number in range(6):
        tail = generator.integers(0, 97, int(generator.integers(1, 40))).tolist()
        tokens = common + tail if number < 2 else tail
        sampling = replace(KINDS[number % len(KINDS)], seed=number)
        found.append(
            submit(number, tokens, 10, sampling=sampling, logprobs=(0, 3, 20)[number % 3], deterministic=deterministic)
        )
    return found


def noise(generator: np.random.Generator, count: int) -> list[Submit]:
    """Other tenants' requests: ordinary and deterministic ones of any length."""
    found = []
    for number in range(count):
        tokens = generator.integers(0, 97, int(generator.integers(1, 70))).tolist()
        kind = replace(KINDS[number % len(KINDS)], seed=number)
        tenant, logprobs = int(generator.integers(1, 4)), number % 4 - 1
        sort = {"deterministic": bool(generator.integers(2)), "retain": bool(generator.integers(2))}
        found.append(
            submit(
                100 + number,
                tokens,
                int(generator.integers(1, 14)),
                tenant=tenant,
                sampling=kind,
                logprobs=logprobs,
                **sort,
            )
        )
    return found


def run_beside(engine: Engine, wanted: list[Submit], others: list[Submit], generator: np.random.Generator) -> tuple:
    """Answers to the wanted requests, all put in at random steps and in random order; steps that computed."""
    waiting = [*wanted, *others]
    generator.shuffle(waiting)
    answers: dict[int, Answer] = {}
    steps = 0
    while waiting or engine.has_work:
        for _ in range(int(generator.integers(0, 4))):
            if waiting:
                engine.add(waiting.pop())
        if others and not generator.integers(6):
            engine.abort(others[int(generator.integers(len(others)))].request)
        collect(engine, answers)
        steps += 1
    return {one.request: content(answers[one.request]) for one in wanted}, steps


def content(answer: Answer) -> tuple[object, ...]:
    """What must be the same bits: floats compare by value, and none is NaN."""
    assert answer.failure is None
    return answer.token_ids, answer.finish, [replace(one, index=0) for one in answer.logprobs]


def count_mismatches(
    setting: Setting, kernel_dir: Callable[..., Path], batches: int, *, deterministic: bool = True
) -> tuple[int, int, int]:
    """Mismatching answers, batches run, preemptions, over fuzzed loads on engines of many shapes."""
    generator = np.random.default_rng(11)
    mismatches = run = preempted = 0
    # A form of model that holds little may preempt nobody in so few.
    while run < batches or (not preempted and run < 20 * batches):
        wanted = victims(generator, deterministic=deterministic)
        big = setting.engine(kernel_dir, num_blocks=400, max_num_batched_tokens=256, prefix_caching=False)
        alone = {one.request: content(generate(big, [one])[one.request]) for one in wanted}
        for round_number in range(3):
            limits = {
                "num_blocks": int(generator.choice([34, 60, 300])),
                "block_size": 4,
                "max_num_batched_tokens": int(generator.choice([20, 33, 64, 200])),
                "max_num_seqs": int(generator.choice([5, 16, 20])),
                "max_context": 90,
            }
            engine = setting.engine(kernel_dir, **limits)
            others = noise(generator, int(generator.integers(0, 24)))
            beside, steps = run_beside(engine, wanted, others, generator)
            mismatches += sum(beside[number] != alone[number] for number in alone)
            run += steps
            preempted += engine.scheduler.num_preempted
    return mismatches, run, preempted


EVERY_RUN = ("plain", "plain int8", "plain windows", "kernels", "kernels bf16", "kernels int8 odd")
"""Settings that every run has; the others differ from one of these in a shape, in threads or in instructions."""


@pytest.mark.parametrize(
    "setting",
    [pytest.param(one, id=one.name, marks=() if one.name in EVERY_RUN else pytest.mark.full) for one in SETTINGS],
)
@pytest.mark.parametrize(
    "batches", [SMALL_BATCHES, pytest.param(ALL_BATCHES, marks=[pytest.mark.full, pytest.mark.timeout(1_200)])]
)
def test_nothing_that_happens_beside_a_request_moves_a_bit(
    setting: Setting, batches: int, kernel_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fuzzed batches: other requests, chunk sizes, cached prefixes, preemptions, rows, block sizes and fresh engines
    change neither token nor log-probability."""
    monkeypatch.setattr(Forecast, "fits", lambda *_args, **_named: True)
    mismatches, run, preempted = count_mismatches(setting, kernel_dir, batches)
    assert mismatches == 0
    assert run >= batches
    assert preempted


def test_ordinary_rows_of_the_plain_path_do_differ(
    kernel_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the same loads without the class show other bits."""
    monkeypatch.setattr(Forecast, "fits", lambda *_args, **_named: True)
    mismatches, _, _ = count_mismatches(SETTINGS[0], kernel_dir, SMALL_BATCHES, deterministic=False)
    assert mismatches > 0


@pytest.mark.parametrize(
    "setting",
    [SETTINGS[0], *(pytest.param(SETTINGS[one], marks=pytest.mark.full) for one in (4, 5))],
    ids=lambda one: one.name,
)
def test_long_contexts_are_the_same_in_any_chunks(setting: Setting, kernel_dir: Callable[..., Path]) -> None:
    """Contexts that end just before, at and behind the stretches that attention takes at a time: alone in large chunks,
    together in small ones, after a cached prefix, and computed again."""
    long = replace(setting, shape=(*setting.shape, ("max_positions", 2_048)))
    generator = np.random.default_rng(3)
    prompts = [generator.integers(0, 97, length).tolist() for length in (505, 511, 512, 513, 1_020)]
    wanted = [submit(number, prompt, 12, logprobs=2, deterministic=True) for number, prompt in enumerate(prompts)]
    alone = {}
    for one in wanted:
        engine = long.engine(kernel_dir, num_blocks=600, max_context=1_200, max_num_batched_tokens=700)
        alone[one.request] = content(generate(engine, [one])[one.request])
        again = replace(one, request=9, token_ids=one.token_ids[:])
        cached = generate(engine, [again])[9]
        assert cached.cached_tokens >= 500
        assert content(cached) == alone[one.request]
    small = long.engine(kernel_dir, num_blocks=700, max_context=1_200, max_num_batched_tokens=23)
    answers = generate(small, wanted)
    assert {number: content(answer) for number, answer in answers.items()} == alone


def test_a_tile_computes_what_the_ordinary_path_does() -> None:
    """Deterministic and ordinary log-probabilities agree to rounding, whichever rows are beside them."""
    model = random_model(model_config())
    prompts = [list(range(number, number + 5 * number + 1)) for number in range(12)]
    plain = [submit(number, prompt, 9, logprobs=1) for number, prompt in enumerate(prompts)]
    exact = [replace(one, deterministic=bool(one.request % 2)) for one in plain]
    ordinary = generate(make_engine(model, prefix_caching=False), plain)
    mixed = generate(make_engine(model, prefix_caching=False), exact)
    for number, answer in ordinary.items():
        assert mixed[number].token_ids == answer.token_ids
        pairs = zip(mixed[number].logprobs, answer.logprobs, strict=True)
        assert all(abs(one.logprob - other.logprob) < 1e-4 for one, other in pairs)


def test_deterministic_blocks_serve_deterministic_requests_only() -> None:
    """Blocks that were computed in the ordinary order are not found by a deterministic request, nor the reverse; its
    own kind finds them."""
    engine = make_engine(random_model(model_config()))
    prompt = list(range(21))
    hits = []
    for number, deterministic in enumerate((False, True, False, True)):
        answer = generate(engine, [submit(number, prompt, 2, deterministic=deterministic)])[number]
        hits.append(answer.cached_tokens)
    assert hits == [0, 0, 20, 20]


def test_an_engine_whose_rows_depend_on_their_place_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up tries it: a sound model is announced as deterministic, one whose last row is rounded otherwise is not."""
    engine = make_engine(random_model(model_config()))
    warm_up(engine)
    assert engine.ready().deterministic
    forward = Decoder.forward

    def uneven(*inputs: object, **options: bool) -> torch.Tensor:
        logits = forward(*inputs, **options)
        if len(logits) > 1:
            logits[-1] *= 1 + 2**-20
        return logits

    monkeypatch.setattr(Decoder, "forward", uneven)
    engine = make_engine(random_model(model_config()))
    warm_up(engine)
    assert not engine.ready().deterministic
