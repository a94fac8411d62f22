"""The Llama family against ``transformers``: logits of random tiny models, in chunks, in batches, and while decoding.

The same on plain operations and on compiled kernels. Every model is written by ``transformers`` and read by our own
loader, so configuration and weights take the real path.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as ReferenceModel

from engine.config import EngineConfig
from engine.kv.storage import KvStorage
from engine.load import layout_for, limits_for, make_runner
from engine.model.registry import load_model_config
from engine.model.weights import load_model
from engine.runner import Runner
from engine.sampler import Samples
from engine.scheduler.plan import Admission, Chunk, StepPlan
from isolation.ipc.messages import Sampling

VOCAB = 131
BLOCK = 4
TOLERANCE = 1e-4

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

CASES = {
    "gqa 2": {},
    "gqa 4": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4},
    "one layer, one head": {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 16},
    "narrow heads": {"head_dim": 4},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "both biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "large eps": {"rms_norm_eps": 0.1},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
    "llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 10_000.0}},
    "yarn": {"rope_parameters": {**YARN, "rope_theta": 10_000.0}},
    "yarn, attention factor": {"rope_parameters": {**YARN, "rope_theta": 10_000.0, "attention_factor": 1.7}},
    "yarn, mscale": {
        "rope_parameters": {**YARN, "rope_theta": 1_000.0, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8.0}
    },
    "yarn, not truncated": {"rope_parameters": {**YARN, "rope_theta": 10_000.0, "truncate": False}},
}


class Recorder:
    """Takes the sampler's place: keeps the logits and continues with given tokens."""

    def __init__(self, tokens: dict[int, list[int]]) -> None:
        self.tokens = tokens
        self.logits: dict[int, torch.Tensor] = {}
        """By row and position of the next token."""

    def wants_maximum(self, rows: list[int]) -> bool:
        """No: it looks at the logits."""
        return False

    def admit(self, admission: Admission) -> None:
        """Sampling numbers do not matter here."""

    def sample(self, logits: torch.Tensor, rows: list[int], positions: torch.Tensor) -> Samples:
        """Record, and continue as told."""
        for line, row in enumerate(rows):
            self.logits[row, int(positions[line])] = logits[line].float().clone()
        return Samples([self.tokens[row][int(positions[line])] for line, row in enumerate(rows)])


def save_reference(folder: Path, seed: int = 0, **changes: object) -> ReferenceModel:
    """A random model in every detail, norms and biases included, written to a folder."""
    torch.manual_seed(seed)
    model = ReferenceModel(LlamaConfig(**{**BASE, **changes}, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    return model


@pytest.fixture(params=["plain", "compiled"])
def kernels(request: pytest.FixtureRequest, kernel_dir: Callable[[str], Path]) -> str:
    """Where the kernels are; empty for the plain path."""
    return str(kernel_dir("native")) if request.param == "compiled" else ""


def load_runner(
    folder: Path, tokens: dict[int, list[int]], dtype: str = "auto", *, kernels: str = "", int8: bool = False
) -> tuple[Runner, Recorder]:
    """Our model from the folder, with a recorder for a sampler."""
    config = EngineConfig(
        model_dir=str(folder),
        model_digest="00",
        dtype=dtype,
        block_size=BLOCK,
        kv_bytes=1 << 22,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        threads=2 if kernels else 1,
        kernels=kernels,
        quantization="int8" if int8 else "none",
    )
    description = load_model_config(str(folder))
    model = load_model(str(folder), description, dtype=dtype, device=torch.device("cpu"), packed=False)
    layout = layout_for(config, description, str(model.dtype).removeprefix("torch."))
    limits = limits_for(config, description, layout)
    storage = KvStorage(layout, max_context=limits.max_context, dtype=model.dtype, device=model.device)
    runner = make_runner(config, model, storage, limits)
    assert (runner.program is not None) == bool(kernels)
    runner._sampler = Recorder(tokens)
    return runner, runner._sampler


def admission(row: int, tokens: list[int], num_prompt: int) -> Admission:
    """A row with blocks of its own, not in order, for all its tokens."""
    width = -(-len(tokens) // BLOCK)
    blocks = tuple(1 + row + 8 * ((index * 5) % 32) for index in range(width))
    return Admission(
        row=row,
        token_ids=array("I", tokens[:num_prompt]),
        num_prompt=num_prompt,
        sampling=Sampling(),
        logprobs=-1,
        blocks=blocks,
    )


def run_mixed(runner: Runner, tokens: dict[int, list[int]], prompts: dict[int, int], chunk: int) -> None:
    """Prefill each row in chunks while the rows before it decode, then decode all to their ends."""
    started: list[int] = []
    done = dict(prompts)

    def decodable() -> list[int]:
        return [row for row in started if done[row] <= len(tokens[row])]

    for row, num_prompt in prompts.items():
        for start in range(0, num_prompt, chunk):
            length = min(chunk, num_prompt - start)
            plan = StepPlan(decode_rows=decodable())
            if start == 0:
                plan.admissions.append(admission(row, tokens[row], num_prompt))
            plan.prefills.append(Chunk(row, start, length, start + length == num_prompt))
            runner.execute(plan)
            for decoded in plan.decode_rows:
                done[decoded] += 1
        started.append(row)
        done[row] += 1
    while rows := decodable():
        runner.execute(StepPlan(decode_rows=rows))
        for row in rows:
            done[row] += 1


def random_tokens(lengths: dict[int, int]) -> dict[int, list[int]]:
    """One token more than each length: the last is only looked at."""
    generator = torch.Generator().manual_seed(7)
    return {
        row: torch.randint(0, VOCAB, (length + 1,), generator=generator).tolist() for row, length in lengths.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_logits_agree_with_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    """Prefilled in chunks of 7 beside decoding rows, every sampled position's logits agree to 1e-4."""
    reference = save_reference(tmp_path, **CASES[name])
    lengths = {0: 30, 1: 9, 2: 100, 3: 41}
    tokens = random_tokens(lengths)
    runner, recorder = load_runner(tmp_path, {row: [*line, 0] for row, line in tokens.items()}, kernels=kernels)
    run_mixed(runner, {row: line[:-1] for row, line in tokens.items()}, {0: 5, 1: 1, 2: 64, 3: 30}, chunk=7)
    seen = 0
    for row, length in lengths.items():
        with torch.no_grad():
            expected = reference(torch.tensor([tokens[row][:length]])).logits[0]
        for position in range(length + 1):
            if (row, position) in recorder.logits:
                difference = (recorder.logits[row, position] - expected[position - 1]).abs().max()
                assert difference < TOLERANCE, (row, position)
                seen += 1
    assert seen == sum(lengths.values()) - (5 + 1 + 64 + 30) + 4
    assert expected.std() > 0.1


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
    kind: str, kernel_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """On compiled kernels a sequence's logits are the same bits alone, beside seven others, and chunked otherwise."""
    save_reference(tmp_path, num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    lengths = dict.fromkeys(range(8), 40) | {0: 60, 3: 25, 5: 90}
    tokens = random_tokens(lengths)
    lines = {row: [*line, 0] for row, line in tokens.items()}
    dtype = "float32" if kind == "int8" else kind
    given = {"kernels": str(kernel_dir("native")), "int8": kind == "int8"}
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
    backend: str, kernel_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """W8A8 scales activations by row: with a neighbour whose numbers are a thousand times larger, or broken, the
    others' logits are the same bits. Control: the neighbour's own are not."""
    reference = save_reference(tmp_path)
    tokens = random_tokens({0: 30, 1: 30, 2: 30})
    kernels = str(kernel_dir("native")) if backend == "compiled" else ""

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
    for factor in (1_000.0, torch.nan):
        wild = logits_with(factor)
        assert wild.keys() == calm.keys()
        for (row, position), expected in calm.items():
            same = torch.equal(wild[row, position][: VOCAB - 1], expected[: VOCAB - 1])
            assert same == (row != 1), (row, position)


@pytest.mark.parametrize("backend", ["plain", "compiled"])
def test_8_bit_logits_stay_near(backend: str, kernel_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """W8A8 of a random model: logits differ from float32 by a few hundredths of their spread, and do differ."""
    reference = save_reference(tmp_path)
    tokens = random_tokens({0: 40})
    kernels = str(kernel_dir("native")) if backend == "compiled" else ""
    runner, recorder = load_runner(tmp_path, {0: [*tokens[0], 0]}, kernels=kernels, int8=True)
    run_mixed(runner, {0: tokens[0][:-1]}, {0: 20}, chunk=9)
    with torch.no_grad():
        exact = reference(torch.tensor([tokens[0][:-1]])).logits[0, 19:]
    ours = torch.stack([recorder.logits[0, position] for position in range(20, 41)])
    error = (ours - exact).square().mean().sqrt() / exact.std()
    assert 1e-4 < error < 0.05
