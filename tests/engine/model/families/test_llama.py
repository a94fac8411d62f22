"""The Llama family in detail: chunks, 16 bits, 8 bits, garbage in free blocks, bits of compiled rows.

That its logits and ids agree with ``transformers`` is shown with those of all families in ``families``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.core.scheduler.plan import StepPlan
from tests.engine.model.families import harness
from tests.engine.model.families.harness import TOLERANCE, admission, load_runner
from tests.engine.model.families.table import VOCAB, save_reference

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["plain", "compiled"])
def kernels(request: pytest.FixtureRequest, kernel_dir: Callable[..., Path]) -> str:
    """Where the kernels are; empty for the plain path."""
    return str(kernel_dir()) if request.param == "compiled" else ""


def run_mixed(runner: object, tokens: dict[int, list[int]], prompts: dict[int, int], chunk: int) -> None:
    """All of the given tokens are computed, prompts in chunks."""
    lengths = {row: len(line) for row, line in tokens.items()}
    harness.run_mixed(runner.execute, tokens, prompts, chunk, lengths)


def random_tokens(lengths: dict[int, int]) -> dict[int, list[int]]:
    """One token more than each length: the last is only looked at."""
    return harness.random_tokens({row: length + 1 for row, length in lengths.items()}, VOCAB)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunking_does_not_matter(chunk: int, tmp_path: Path) -> None:
    """One token at a time, block by block, or all at once: the same logits."""
    reference = save_reference(tmp_path)
    tokens = random_tokens({0: 33})
    runner, recorder = load_runner(tmp_path, {0: [*tokens[0], 0]})
    run_mixed(runner, {0: tokens[0][:-1]}, {0: 29}, chunk=chunk)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens[0][:-1]])).logits[0]
    for position in range(29, 34):
        assert torch.allclose(recorder.logits[0, position], expected[position - 1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_models_follow_the_reference(dtype: str, kernels: str, tmp_path: Path) -> None:
    """In 16 bits logits are as near to the float32 reference as the reference in 16 bits is, give or take half."""
    reference = save_reference(tmp_path)
    tokens = random_tokens({0: 40})
    if kernels and dtype == "float16":
        pytest.skip("the kernels take bfloat16 and float32")
    runner, recorder = load_runner(tmp_path, {0: [*tokens[0], 0]}, dtype, kernels=kernels)
    run_mixed(runner, {0: tokens[0][:-1]}, {0: 20}, chunk=9)
    with torch.no_grad():
        line = torch.tensor([tokens[0][:-1]])
        exact = reference(line).logits[0, 19:]
        rounded = reference.to(getattr(torch, dtype))(line).logits[0, 19:].float()
    ours = torch.stack([recorder.logits[0, position] for position in range(20, 41)])
    assert (ours - exact).abs().mean() < 1.5 * (rounded - exact).abs().mean()
    assert (ours - exact).abs().mean() > 1e-4


def test_garbage_in_free_blocks_changes_nothing(kernels: str, tmp_path: Path) -> None:
    """NaN in every block that a row does not use reaches no logit; in a block that it does use, it does."""
    reference = save_reference(tmp_path)
    lengths = {0: 30, 1: 9, 2: 61}
    tokens = random_tokens(lengths)
    runner, recorder = load_runner(tmp_path, {row: [*line, 0] for row, line in tokens.items()}, kernels=kernels)
    used = {0}
    for row, line in tokens.items():
        used |= set(admission(row, line[:-1], 1).blocks)
    free = [block for block in range(runner.storage.layout.num_blocks + 1) if block not in used]
    for tensor in runner.storage.tensors:
        tensor[free] = torch.nan
    run_mixed(runner, {row: line[:-1] for row, line in tokens.items()}, {0: 5, 1: 1, 2: 50}, chunk=7)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens[2][:-1]])).logits[0, -1]
    assert torch.allclose(recorder.logits[2, 61], expected, atol=TOLERANCE, rtol=0)
    assert all(logits.isfinite().all() for logits in recorder.logits.values())
    for tensor in runner.storage.tensors[:2]:
        tensor[admission(2, tokens[2][:-1], 1).blocks[0]] = torch.nan
    runner.execute(StepPlan(decode_rows=[2], grown_rows=[2], grown_indices=[15], grown_blocks=[free[-1]]))
    assert recorder.logits[2, 62].isnan().all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_compiled_rows_are_bit_equal_alone_and_in_any_company(
    kind: str, kernel_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """On compiled kernels a sequence's logits are the same bits alone, beside seven others, and chunked otherwise."""
    save_reference(tmp_path, num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    lengths = dict.fromkeys(range(8), 40) | {0: 60, 3: 25, 5: 90}
    tokens = random_tokens(lengths)
    lines = {row: [*line, 0] for row, line in tokens.items()}
    dtype = "float32" if kind == "int8" else kind
    given = {"kernels": str(kernel_dir()), "int8": kind == "int8"}
    together, recorder = load_runner(tmp_path, lines, dtype, **given)
    run_mixed(together, {row: line[:-1] for row, line in tokens.items()}, dict.fromkeys(range(8), 20), chunk=7)
    for row in (0, 3):
        for chunk in (20, 3):
            alone, single = load_runner(tmp_path, lines, dtype, **given)
            run_mixed(alone, {row: tokens[row][:-1]}, {row: 20}, chunk=chunk)
            assert len(single.logits) == lengths[row] - 20 + 1
            for place, logits in single.logits.items():
                assert torch.equal(logits, recorder.logits[place]), place


@pytest.mark.parametrize("backend", ["plain", "compiled"])
def test_an_outlier_of_a_neighbour_moves_no_number_of_an_8_bit_model(
    backend: str, kernel_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """W8A8 scales activations by row: with a neighbour whose numbers are a thousand times larger, or too large to be
    squared, the others' logits are the same bits. Control: the neighbour's own are not."""
    reference = save_reference(tmp_path)
    tokens = random_tokens({0: 30, 1: 30, 2: 30})
    kernels = str(kernel_dir()) if backend == "compiled" else ""

    def logits_with(factor: float) -> dict[tuple[int, int], torch.Tensor]:
        with torch.no_grad():
            embedding = reference.get_input_embeddings().weight
            embedding[VOCAB - 1] = embedding[5] * factor
        reference.save_pretrained(tmp_path)
        lines = {row: [one % (VOCAB - 1) for one in line] for row, line in tokens.items()}
        lines[1] = [VOCAB - 1] * len(lines[1])
        expected = {row: [*line, 0] for row, line in lines.items()}
        runner, recorder = load_runner(tmp_path, expected, kernels=kernels, int8=True)
        run_mixed(runner, {row: line[:-1] for row, line in lines.items()}, {0: 5, 1: 5, 2: 5}, chunk=7)
        return recorder.logits

    calm = logits_with(1.0)
    for factor in (1_000.0, 1e38):
        wild = logits_with(factor)
        assert wild.keys() == calm.keys()
        for (row, position), expected in calm.items():
            same = torch.equal(wild[row, position][: VOCAB - 1], expected[: VOCAB - 1])
            assert same == (row != 1), (row, position)


@pytest.mark.parametrize("backend", ["plain", "compiled"])
def test_8_bit_logits_stay_near(backend: str, kernel_dir: Callable[..., Path], tmp_path: Path) -> None:
    """W8A8 of a random model: logits differ from float32 by a few hundredths of their spread, and do differ."""
    reference = save_reference(tmp_path)
    tokens = random_tokens({0: 40})
    kernels = str(kernel_dir()) if backend == "compiled" else ""
    runner, recorder = load_runner(tmp_path, {0: [*tokens[0], 0]}, kernels=kernels, int8=True)
    run_mixed(runner, {0: tokens[0][:-1]}, {0: 20}, chunk=9)
    with torch.no_grad():
        exact = reference(torch.tensor([tokens[0][:-1]])).logits[0, 19:]
    ours = torch.stack([recorder.logits[0, position] for position in range(20, 41)])
    error = (ours - exact).square().mean().sqrt() / exact.std()
    assert 1e-4 < error < 0.05
