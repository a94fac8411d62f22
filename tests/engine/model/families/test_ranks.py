"""Models dealt to ranks: two processes give the logits of one, and stages of layers hand the stream on."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.backends.common.storage import KvStorage
from engine.backends.plain.paged_attention import AttentionBatch, PagedAttention
from engine.errors import ConfigurationError
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.registry import describe_model, load_model_config
from engine.model.checkpoint.weights import load_model
from engine.model.layers.parallel import Parallel
from tests.engine.model.families.harness import load_runner, random_tokens, run_mixed
from tests.engine.model.families.rank_main import LENGTHS, PROMPTS, flatten, unflatten
from tests.engine.model.families.table import EVERY_PARAM, FAMILIES, RANK_CASES, VOCAB, Case, as_params, save_reference
from tests.engine.support import model_config

pytestmark = pytest.mark.usefixtures("one_thread")

RANK_TOLERANCE = 1e-5
"""Of logits relative to their spread: sums over ranks are rounded in another order."""

STAGED = [case for case in RANK_CASES if any(word in case[1] for word in ("window", "tied", "chunk", "kimi"))]
"""Cases whose layers differ or whose head is the embedding."""

WHOLE = (
    "mlp.gate.weight",
    "mlp.router.weight",
    "feed_forward.router.weight",
    "block_sparse_moe.gate.weight",
    "shared_expert_gate.weight",
    "q_a_proj.weight",
    "kv_a_proj_with_mqa.weight",
)
"""Ends of names of matrices that every rank has whole: routers, and maps to latent vectors that all heads share."""

EVERY_RUN = (
    ("llama", "gqa 4"),
    ("gpt_oss", "odd experts, tight clamps"),
    ("deepseek", "kimi: one group"),
    ("llama4", "maverick: every second layer dense, no norms"),
)
"""Cases that every run deals to two processes: heads, windows with sinks, latent keys, chunks, and experts of three
kinds. That ranks take every number of every family is shown below for all; the full counts have them in processes."""

Logits = dict[str, Tensor]


def cases_of(request: pytest.FixtureRequest, test: str = "") -> set[Case]:
    """Cases of the selected tests of this file, or of one of them."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {item.callspec.params["case"] for item in here if test in item.name and "case" in item.callspec.params}


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """A checkpoint for every case that some selected test runs."""
    made = {}
    asked = cases_of(request)
    for family, case in [one for one in RANK_CASES if one in asked or one == RANK_CASES[0]]:
        made[family, case] = tmp_path_factory.mktemp("model")
        save_reference(made[family, case], family, **FAMILIES[family].cases[case])
    return made


@pytest.fixture(scope="module")
def two_ranks(
    request: pytest.FixtureRequest, folders: dict[Case, Path], root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, tuple[Logits, Logits]]:
    """Logits of both ranks, by case: one pair of processes runs all."""
    out = tmp_path_factory.mktemp("ranks")
    cases = [case for case in folders if case in cases_of(request, "test_two_ranks")]
    (out / "jobs.json").write_text(json.dumps([str(folders[case]) for case in cases]))
    command = [sys.executable, "-m", "tests.engine.model.families.rank_main"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(out / "store"), str(out / "jobs.json"), str(out)],
            cwd=root,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return {
        case: (load_file(out / f"{number}.0.safetensors"), load_file(out / f"{number}.1.safetensors"))
        for number, case in enumerate(cases)
    }


def one_rank(folder: Path) -> Logits:
    """The same schedule on one rank."""
    runner, recorder = load_runner(folder)
    run_mixed(runner.execute, random_tokens(PROMPTS, VOCAB), PROMPTS, 7, LENGTHS)
    return {f"{row}.{position}": value for (row, position), value in recorder.logits.items()}


@pytest.mark.parametrize("case", as_params(RANK_CASES, set(RANK_CASES) - set(EVERY_RUN)))
def test_two_ranks_give_the_ids_and_logits_of_one(
    case: Case, folders: dict[Case, Path], two_ranks: dict[Case, tuple[Logits, Logits]]
) -> None:
    """Heads, inner width and vocabulary are dealt to two processes: the same ids, logits within 1e-5 of their spread,
    and the same bits on both ranks."""
    first, second = two_ranks[case]
    expected = one_rank(folders[case])
    assert first.keys() == second.keys() == expected.keys()
    for place, logits in expected.items():
        assert torch.equal(first[place], second[place]), place
        assert (first[place] - logits).abs().max() < RANK_TOLERANCE * max(1.0, float(logits.std())), place
        assert int(first[place].argmax()) == int(logits.argmax()), place


class Chain:
    """Stages of one model, each with its own KV: takes the place of a model in a runner."""

    def __init__(self, folder: Path, cuts: list[int], like: KvStorage) -> None:
        description = load_model_config(str(folder))
        self.stages = []
        for start, stop in itertools.pairwise(cuts):
            parallel = Parallel(layers=(start, stop))
            model = load_model(str(folder), description, dtype="float32", device=torch.device("cpu"), parallel=parallel)
            layers = parallel.kv_layers(description.kv_layers)
            storage = KvStorage(
                replace(like.layout, layers=layers), max_context=128, dtype=like.dtype, device=like.device
            )
            self.stages.append((model, storage))
        self.reaches = like.layout.reaches

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: PagedAttention, wanted: Tensor, _adapters: Tensor
    ) -> Tensor:
        """Each stage in turn, with the metadata of the reaches that its layers have."""
        x = self.stages[0][0].embed(token_ids)
        for model, storage in self.stages:
            chosen = tuple(attention.batch.reaches[self.reaches.index(reach)] for reach in storage.layout.reaches)
            x = model.advance(x, positions, PagedAttention(storage, AttentionBatch(chosen)))
        return self.stages[-1][0].logits(x, wanted)


@pytest.mark.parametrize("case", as_params(STAGED))
def test_stages_of_a_pipeline_give_the_logits_of_the_whole(case: Case, folders: dict[Case, Path]) -> None:
    """Layers dealt to stages, which hand the residual stream on: the same bits."""
    folder = folders[case]
    runner, recorder = load_runner(folder)
    num_layers = len(runner.model.layers)
    runner.forward.model = Chain(folder, list(range(num_layers + 1)), runner.storage)
    run_mixed(runner.execute, random_tokens(PROMPTS, VOCAB), PROMPTS, 7, LENGTHS)
    expected = one_rank(folder)
    assert {f"{row}.{position}" for row, position in recorder.logits} == expected.keys()
    for (row, position), logits in recorder.logits.items():
        assert torch.equal(logits, expected[f"{row}.{position}"])


def covered(lists: list[Checklist]) -> dict[str, Tensor]:
    """How often each number of each published tensor is taken by some rank."""
    counts = {name: torch.zeros(piece.shape) for name, piece in lists[0].pieces.items()}
    for checklist in lists:
        for name, piece in checklist.pieces.items():
            for home in piece.homes:
                counts[name][tuple(slice(*span) for span in home.part)] += 1
    return counts


@pytest.mark.parametrize(("family", "case"), EVERY_PARAM)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_every_number_and_matrices_once(family: str, case: str, size: int, tmp_path: Path) -> None:
    """Together the ranks take every number of every tensor; of matrices nobody takes one twice but routers, maps to
    shared latent vectors, and key and value heads that are fewer than ranks."""
    save_reference(tmp_path, family, **FAMILIES[family].cases[case])
    config = load_model_config(str(tmp_path))
    ranks = [Parallel(rank=rank, size=size) for rank in range(size)]
    if config.num_heads % size:
        with pytest.raises(ConfigurationError, match="dealt evenly"):
            describe_model(config, ranks[0])
        return
    shared = max(1, size // config.num_kv_heads)
    for name, count in covered([describe_model(config, parallel) for parallel in ranks]).items():
        times = {int(one) for one in count.unique()}
        if name.endswith(WHOLE):
            assert times == {size}, name
        elif "qkv_proj" in name:
            assert times == {1, shared}, name
        elif count.dim() >= 2:
            assert times == {shared if "k_proj" in name or "v_proj" in name else 1}, name
        else:
            assert min(times) >= 1, name


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 3), (6, 3, 2), (6, 2, 3)])
def test_heads_that_cannot_be_dealt_are_refused(heads: int, kv_heads: int, size: int) -> None:
    """Heads that do not divide among the ranks are a typed error before anything is allocated."""
    config = model_config(num_heads=heads, num_kv_heads=kv_heads)
    with pytest.raises(ConfigurationError, match="dealt evenly"):
        describe_model(config, Parallel(rank=0, size=size))


@pytest.mark.parametrize("layers", [(0, 0), (1, 1), (2, 1), (-1, 1), (0, 3)])
def test_a_stage_that_does_not_fit_is_refused(layers: tuple[int, int]) -> None:
    """A stage must hold at least one layer of the model; control: the whole."""
    config = model_config()
    assert len(describe_model(config, Parallel(layers=(0, 2))).pieces) > 10
    with pytest.raises(ConfigurationError, match="does not fit"):
        describe_model(config, Parallel(layers=layers))


def test_a_plan_travels_flat(folders: dict[Case, Path]) -> None:
    """What a follower makes of the ints is the leader's plan."""
    plans = []
    runner, _ = load_runner(next(iter(folders.values())))

    def execute(plan: object) -> None:
        plans.append((plan, unflatten(flatten(plan))))
        runner.execute(plan)

    run_mixed(execute, random_tokens(PROMPTS, VOCAB), PROMPTS, 7, LENGTHS)
    assert len(plans) > 10
    assert all(left == right for left, right in plans)
