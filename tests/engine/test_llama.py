"""The Llama family against ``transformers``: logits of random tiny models, in chunks, in batches, and while decoding.

Every model is written by ``transformers`` and read by our own loader, so configuration and weights take the real path.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as ReferenceModel

from engine.config import EngineConfig
from engine.kv.storage import KvStorage
from engine.load import layout_for, limits_for
from engine.model.config import load_model_config
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


def load_runner(folder: Path, tokens: dict[int, list[int]], dtype: str = "auto") -> tuple[Runner, Recorder]:
    """Our model from the folder, with a recorder for a sampler."""
    config = EngineConfig(
        model_dir=str(folder),
        model_digest="00",
        dtype=dtype,
        block_size=BLOCK,
        kv_bytes=1 << 22,
        max_num_seqs=8,
        max_num_batched_tokens=256,
    )
    description = load_model_config(str(folder))
    model = load_model(str(folder), description, dtype=dtype, device=torch.device("cpu"))
    layout = layout_for(config, description, str(model.dtype).removeprefix("torch."))
    limits = limits_for(config, description, layout)
    storage = KvStorage(layout, max_context=limits.max_context, dtype=model.dtype, device=model.device)
    runner = Runner(model, storage, limits)
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
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    """Prefilled in chunks of 7 beside decoding rows, every sampled position's logits agree to 1e-4."""
    reference = save_reference(tmp_path, **CASES[name])
    lengths = {0: 30, 1: 9, 2: 100, 3: 41}
    tokens = random_tokens(lengths)
    runner, recorder = load_runner(tmp_path, {row: [*line, 0] for row, line in tokens.items()})
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
def test_16_bit_models_follow_the_reference(dtype: str, tmp_path: Path) -> None:
    """In 16 bits logits are as near to the float32 reference as the reference in 16 bits is, give or take half."""
    reference = save_reference(tmp_path)
    tokens = random_tokens({0: 40})
    runner, recorder = load_runner(tmp_path, {0: [*tokens[0], 0]}, dtype)
    run_mixed(runner, {0: tokens[0][:-1]}, {0: 20}, chunk=9)
    with torch.no_grad():
        line = torch.tensor([tokens[0][:-1]])
        exact = reference(line).logits[0, 19:]
        rounded = reference.to(getattr(torch, dtype))(line).logits[0, 19:].float()
    ours = torch.stack([recorder.logits[0, position] for position in range(20, 41)])
    assert (ours - exact).abs().mean() < 1.5 * (rounded - exact).abs().mean()
    assert (ours - exact).abs().mean() > 1e-4


def test_garbage_in_free_blocks_changes_nothing(tmp_path: Path) -> None:
    """NaN in every block that a row does not use reaches no logit; in a block that it does use, it does."""
    reference = save_reference(tmp_path)
    lengths = {0: 30, 1: 9, 2: 61}
    tokens = random_tokens(lengths)
    runner, recorder = load_runner(tmp_path, {row: [*line, 0] for row, line in tokens.items()})
    used = {0}
    for row, line in tokens.items():
        used |= set(admission(row, line[:-1], 1).blocks)
    free = [block for block in range(runner.storage.layout.num_blocks + 1) if block not in used]
    for layer in runner.storage.layers:
        layer[:, free] = torch.nan
    run_mixed(runner, {row: line[:-1] for row, line in tokens.items()}, {0: 5, 1: 1, 2: 50}, chunk=7)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens[2][:-1]])).logits[0, -1]
    assert torch.allclose(recorder.logits[2, 61], expected, atol=TOLERANCE, rtol=0)
    assert all(logits.isfinite().all() for logits in recorder.logits.values())
    runner.storage.layers[0][:, admission(2, tokens[2][:-1], 1).blocks[0]] = torch.nan
    runner.execute(StepPlan(decode_rows=[2], grown_rows=[2], grown_indices=[15], grown_blocks=[free[-1]]))
    assert recorder.logits[2, 62].isnan().all()
