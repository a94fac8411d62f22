"""What adapters give, against PEFT: many in one batch, each rank and kind, and nothing for rows without one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.backends.native.library import open_libraries
from engine.core.engine import Engine
from engine.core.offline import Answer, generate
from isolation.ipc.engine import Submit
from tests.engine.model.adapters.samples import KINDS, VOCAB, engine_with, reference, save_adapter, save_base
from tests.engine.support import submit

TOLERANCE = 1e-4
"""Largest difference of a log-probability in float32."""


class Zoo:
    """A base model and an adapter of every kind on disk."""

    def __init__(self, folder: Path, **fields: object) -> None:
        """``fields``: of the engines' configuration."""
        self.fields = fields
        self.base, self.folder = folder / "base", folder / "adapters"
        save_base(self.base)
        self.digests: dict[str, str] = {}
        for seed, (name, fields) in enumerate(KINDS.items()):
            digest = save_adapter(self.base, folder / name, seed, **fields)
            self.folder.mkdir(exist_ok=True)
            (self.folder / digest).symlink_to(folder / name)
            self.digests[name] = digest

    def engine(self, **fields: object) -> Engine:
        """An engine with all of them."""
        engine = engine_with(self.base, self.folder, self.digests.values(), **(self.fields | fields))
        assert bool(engine.runner.forward.operand_bytes) == ("kernels" in self.fields), engine.runner.description
        assert engine.ready().adapters == len(KINDS), "one was left out"
        return engine


@pytest.fixture(scope="module", params=["plain", "kernels"])
def zoo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_dir: Callable[..., Path]
) -> Zoo:
    """One for all tests of the module, on plain operations and on compiled kernels."""
    kernels = kernel_dir("") if request.param == "kernels" else None
    form = {} if kernels is None else {"kernels": str(kernels), "threads": 2, "form": best_form(kernels)}
    return Zoo(tmp_path_factory.mktemp("zoo"), **form)


def best_form(kernels: Path) -> str:
    """The best kernels of a folder, so that no trial of a tiny model decides for plain operations."""
    return next(open_libraries(str(kernels))).variant


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    """Random prompts of different lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(draw.randrange(9, 23))] for _ in range(count)]


def scored(answer: Answer) -> list[float]:
    """Log-probabilities of the prompt's tokens from the second on."""
    return [value for part in answer.prompts for value in part.logprobs]


def mixed(zoo: Zoo) -> tuple[list[str], list[Submit]]:
    """Two requests with each adapter and two without one, in a random order: names and submissions."""
    names = [*KINDS, *KINDS, "", ""]
    random.Random(1).shuffle(names)
    digests = {"": b""} | {name: bytes.fromhex(digest) for name, digest in zoo.digests.items()}
    asked = zip(names, prompts(len(names)), strict=True)
    return names, [
        submit(number, ids, 4, adapter=digests[name], logprobs=0, prompt_logprobs=0)
        for number, (name, ids) in enumerate(asked, 1)
    ]


def test_many_adapters_in_one_batch_are_exact_against_peft(zoo: Zoo) -> None:
    """Prompts in chunks and answers with ten kinds of adapters, ranks 1 to 256 among them, and requests without one,
    all in the same steps: every log-probability is PEFT's to 1e-4; another adapter's are far away."""
    names, submits = mixed(zoo)
    answers = generate(zoo.engine(), submits)
    folders = {"": None} | {name: zoo.folder / digest for name, digest in zoo.digests.items()}
    for name in {*names}:
        own = [one for one, of in zip(submits, names, strict=True) if of == name]
        texts = [[*one.token_ids, *answers[one.request].token_ids] for one in own]
        for one, text, wanted in zip(own, texts, reference(zoo.base, folders[name], texts), strict=True):
            answer = answers[one.request]
            given = torch.tensor([*scored(answer), *(entry.logprob for entry in answer.logprobs)])
            exact = wanted[:-1].gather(1, torch.tensor(text[1:])[:, None]).flatten()
            assert len(answer.token_ids) == 4
            assert (given - exact).abs().max() < TOLERANCE, name
            other = reference(zoo.base, folders["r16" if name != "r16" else "r64"], [text])[0]
            far = other[:-1].gather(1, torch.tensor(text[1:])[:, None]).flatten()
            assert (given - far).abs().max() > 100 * TOLERANCE, "adapters that hardly differ show nothing"


def test_adapters_are_exact_against_merged_weights(zoo: Zoo) -> None:
    """An adapter merged into the weights by PEFT gives the same log-probabilities as the adapter beside them."""
    engine = zoo.engine()
    for name in ("r16", "embedding", "head"):
        ids = prompts(1, seed=len(name))[0]
        one = submit(1, ids, 1, adapter=bytes.fromhex(zoo.digests[name]), prompt_logprobs=0)
        given = torch.tensor(scored(generate(engine, [one])[1]))
        merged = reference(zoo.base, zoo.folder / zoo.digests[name], [ids], merged=True)[0]
        exact = merged[:-1].gather(1, torch.tensor(ids[1:])[:, None]).flatten()
        assert (given - exact).abs().max() < TOLERANCE, name


@pytest.mark.parametrize("rows", [2, 7, 16])
def test_rows_without_an_adapter_keep_their_bits(zoo: Zoo, rows: int) -> None:
    """In a step in which others have adapters, the logits of rows without one are the same bits as in the same step
    with no adapter anywhere; those of the others differ."""
    names, submits = mixed(zoo)
    names, submits = names[:rows], submits[:rows]
    names[0], submits[0] = "", replace(submits[0], adapter=b"")
    with_adapters = generate(zoo.engine(), submits)
    without = generate(zoo.engine(), [replace(one, adapter=b"") for one in submits])
    for name, one in zip(names, submits, strict=True):
        same = scored(with_adapters[one.request]) == scored(without[one.request])
        assert same == (name == ""), name


def test_the_adapters_code_is_not_entered_without_an_adapter(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in which no row has an adapter forms no groups of rows; one with an adapter does."""
    engine = zoo.engine()
    target = (engine.runner.forward._pieces, "fill") if zoo.fields else (engine.runner.model.bank, "step")
    monkeypatch.setattr(*target, lambda *_, **__: pytest.fail("entered"))
    generate(engine, [submit(1, [5, 6, 7], 3)])
    with pytest.raises(pytest.fail.Exception):
        generate(engine, [submit(2, [5, 6, 7], 3, adapter=bytes.fromhex(zoo.digests["r16"]))])


def test_deterministic_requests_with_adapters_keep_their_bits(zoo: Zoo) -> None:
    """A deterministic request with an adapter has the same log-probabilities, to the bit, alone and in a batch with
    requests of its own adapter, of others and of none, whose chunks cut it differently."""
    names, submits = mixed(zoo)
    submits = [replace(one, deterministic=True) for one in submits]
    crowd = generate(zoo.engine(), submits)
    for name, one in zip(names[:6], submits[:6], strict=True):
        alone = generate(zoo.engine(max_num_batched_tokens=16), [one])[one.request]
        assert scored(alone) == scored(crowd[one.request]), name
        assert alone.token_ids == crowd[one.request].token_ids


def test_blocks_are_found_under_their_own_adapter_alone(zoo: Zoo) -> None:
    """A prompt whose blocks are cached is found by the same tenant with the same adapter, and neither with another
    adapter, nor without one, nor by another tenant."""
    engine, ids = zoo.engine(), prompts(1)[0]
    first, other = (bytes.fromhex(zoo.digests[name]) for name in ("r16", "r64"))

    def cached(number: int, **fields: object) -> int:
        return generate(engine, [submit(number, ids, 2, **fields)])[number].cached_tokens

    assert cached(1, adapter=first) == 0
    assert cached(2, adapter=first) > 0
    assert cached(3, adapter=other) == 0
    assert cached(4) == 0
    assert cached(5) > 0
    assert cached(6, adapter=first, tenant=2) == 0
    assert cached(7, adapter=first, deterministic=True) == 0
