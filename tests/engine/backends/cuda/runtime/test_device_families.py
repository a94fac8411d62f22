"""Every family on the device backend: the answers of the plain loop, whose own are those of ``transformers``."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine.backends.cuda.runtime.launches import buckets
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.offline import Answer, generate
from engine.errors import ConfigurationError
from engine.model.layers import experts
from engine.startup.load import load_engine
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling
from tests.engine.backends.cuda.runtime.held import read_by, recorded_first, targets_of
from tests.engine.model.families.table import EVERY_CASE, FAMILIES, VOCAB, save_reference
from tests.engine.support import submit

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = {
    "llama": "yarn, mscale",
    "mistral": "window 8",
    "qwen2": "windows from layer 1",
    "qwen3": "biases",
    "gemma2": "window 8",
    "gemma3": "five to one",
    "gemma3 text part": "window 8",
    "granite": "all",
    "olmo2": "gqa 2",
    "phi3": "long lists, partial, mqa",
    "mixtral": "window 9, wide heads",
    "qwen3_moe": "odd experts, biases",
    "qwen2_moe": "odd experts, a dense layer",
    "gpt_oss": "odd experts, tight clamps",
    "deepseek": "odd widths, two shared",
    "llama4": "chunks of 7, every second layer without positions",
}
"""The variant of each family with most of what only the family has."""

EVERY_RUN = ("llama", "gemma2", "gpt_oss", "deepseek", "llama4")
"""Families that every run has: between them caps, windows, chunks, tables, experts and latent keys that the device
backend knows. The full counts have each family in each variant."""


def load(folder: Path, backend: str) -> Engine:
    """An engine around the model of a folder: few rows, small steps."""
    config = EngineConfig(
        model_dir=str(folder),
        model_digest="00",
        block_size=4,
        kv_bytes=1 << 20,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_context=96,
        backend=backend,
    )
    return load_engine(config, warm=False)


def asked(number_of: int) -> list[Submit]:
    """Requests of all lengths, some with a prefix in common, every third one drawn."""
    draw = random.Random(7)
    prefix = [draw.randrange(3, VOCAB) for _ in range(24)]
    made = []
    for number in range(1, number_of + 1):
        prompt = prefix[: draw.choice((0, 16, 24))] + [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 30))]
        sampling = Sampling(temperature=0.0 if number % 3 else 0.8, top_k=9, seed=draw.getrandbits(64))
        made.append(submit(number, prompt, draw.randint(2, 24), sampling=sampling))
    return made


def outcome(answers: dict[int, Answer]) -> dict[int, tuple[object, ...]]:
    """Tokens, end and failure of every request."""
    return {number: (one.token_ids, one.finish, one.failure) for number, one in answers.items()}


def test_every_family_is_in_this_test() -> None:
    """A family that is added is compared here, too."""
    assert set(SOME) == set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(*one, marks=() if one[0] in EVERY_RUN and SOME[one[0]] == one[1] else pytest.mark.full)
        for one in EVERY_CASE
    ],
)
def test_a_family_s_answers_are_those_of_the_plain_loop(family: str, case: str, tmp_path: Path) -> None:
    """Prompts in chunks, prefixes in common, rows that come and go, contexts beyond every window: steps that were
    recorded before the first weight was read, and run ahead, give the tokens of the plain loop. They read every weight
    where it was filled."""
    save_reference(tmp_path, family, **FAMILIES[family].cases[case])
    requests = asked(7)
    wanted = outcome(generate(load(tmp_path, "plain"), requests))
    with recorded_first() as models:
        engine = load(tmp_path, "device")
    assert engine.runner.recorded == buckets(4)
    read = read_by(engine.runner, 2)
    assert all(places <= read for places in targets_of(models[0]).values())
    found = outcome(generate(engine, requests))
    assert found == wanted
    assert all(failure is None for _, _, failure in found.values())
    assert isinstance(engine.runner, DeviceRunner)
    assert engine.runner.num_ahead > sum(len(tokens) for tokens, _, _ in found.values()) / 3
    engine.scheduler.check_integrity()


def test_windows_give_blocks_back_on_the_device(tmp_path: Path) -> None:
    """A model whose layers all look back a window runs a context of three times its memory's tokens."""
    save_reference(tmp_path, "mistral", **FAMILIES["mistral"].cases["window 8"])
    answers, held = [], 0
    for backend in ("plain", "device"):
        config = EngineConfig(
            model_dir=str(tmp_path),
            model_digest="00",
            block_size=4,
            kv_bytes=12 << 10,
            max_num_seqs=1,
            max_num_batched_tokens=8,
            backend=backend,
        )
        engine = load_engine(config, warm=False)
        answers.append(outcome(generate(engine, [submit(1, range(3, 60), 60)])))
        # Of the device's the last; a block of the spare ones is nobody's.
        held = engine.runner.storage.layout.num_blocks * 4
    assert answers[0] == answers[1]
    assert len(answers[0][1][0]) == 60 and 3 * held < 57 + 60


def test_a_way_to_route_that_no_operation_knows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that routes in a way of its own is refused with that way's name, and runs on the plain loop."""

    class Loudest:
        """Some other way."""

        def __init__(self, inner: object) -> None:
            self.choose = inner

        def __call__(self, logits: object) -> object:
            return self.choose(logits)

    make = experts.Router
    monkeypatch.setattr(experts, "Router", lambda linear, route: replace(make(linear, route), route=Loudest(route)))
    save_reference(tmp_path, "mixtral", **FAMILIES["mixtral"].cases["thirteen experts"])
    with pytest.raises(ConfigurationError, match=r"do not route to experts by Loudest; set backend to plain"):
        load(tmp_path, "device")
    assert generate(load(tmp_path, "plain"), [submit(1, [4, 5], 2)])[1].failure is None
