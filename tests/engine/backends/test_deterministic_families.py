"""The deterministic class in every family and with every kind of attention: exact, and the same bits in any batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.backends.attention import AttentionRule, weigh
from engine.backends.common.storage import KvStorage
from engine.backends.plain.tile_attention import STRETCH, TILE, Tile, TileAttention, TileReach
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.kv.layout import FULL, KvLayout, LayerLayout, Reach
from engine.core.offline import Answer, generate
from engine.startup.load import load_engine
from tests.engine.model.families.table import EVERY_CASE, FAMILIES, VOCAB, save_reference
from tests.engine.support import submit

TOLERANCE = 1e-4
SOME = [("llama", "yarn"), ("qwen2", "windows from layer 1")]


def load(folder: Path, **fields: object) -> Engine:
    """A plain engine around the model of a folder."""
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "prefix_caching": False, **fields}
    config = EngineConfig(model_dir=str(folder), model_digest="00", block_size=4, kv_bytes=1 << 21, **values)
    return load_engine(config)


def content(answer: Answer) -> tuple[object, ...]:
    """Tokens and all log-probabilities, as they are."""
    assert answer.failure is None
    return (
        answer.token_ids,
        [replace(one, index=0) for one in answer.logprobs],
        [value for part in answer.prompts for value in part.logprobs],
    )


@pytest.mark.parametrize(
    ("family", "case"), [*SOME, *(pytest.param(*one, marks=pytest.mark.full) for one in EVERY_CASE if one not in SOME)]
)
def test_a_family_is_exact_and_blind_to_its_batch(tmp_path: Path, family: str, case: str) -> None:
    """Prompt log-probabilities agree with ``transformers``, and are the same bits alone and in small chunks beside
    others, outputs included; an engine that cannot promise it says so."""
    reference = save_reference(tmp_path, family, **FAMILIES[family].cases[case])
    generator = np.random.default_rng(1)
    prompts = [generator.integers(3, VOCAB, length).tolist() for length in (1, 5, 17, 40, 70)]
    wanted = [
        submit(number, prompt, 12, prompt_logprobs=0, logprobs=3, deterministic=True)
        for number, prompt in enumerate(prompts)
    ]
    alone = load(tmp_path)
    if not alone.ready().deterministic:
        pytest.skip("this model is refused the class")
    together = generate(load(tmp_path, max_num_batched_tokens=19), wanted)
    for one, prompt in zip(wanted, prompts, strict=True):
        answer = generate(alone, [one])[one.request]
        assert content(together[one.request]) == content(answer)
        with torch.no_grad():
            exact = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for place, logprob in enumerate(content(answer)[2]):
            assert abs(logprob - float(exact[place, prompt[place + 1]])) < TOLERANCE


RULES = {
    "plain": AttentionRule(0.3),
    "cap": AttentionRule(0.3, cap=5.0),
    "sinks": AttentionRule(0.3, sinks=torch.linspace(-2, 2, 4)),
    "cap and sinks": AttentionRule(0.3, cap=2.0, sinks=torch.linspace(3, -3, 4)),
}


@pytest.mark.parametrize(
    "positions", [(6, 520), pytest.param((0, 511, 512, 1_030), marks=pytest.mark.full)], ids=["few", "many"]
)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("reach", [FULL, Reach("window", 7), Reach("window", 600)], ids=str)
@pytest.mark.parametrize("latent", [False, True])
def test_attention_of_a_tile(rule: AttentionRule, reach: Reach, latent: bool, positions: tuple[int, ...]) -> None:
    """Every rule and reach: what a row attends to gives the same bits at each place, in longer paddings and in both
    kinds of tiles, and agrees with attention by definition."""
    layer = LayerLayout(heads=1 if latent else 2, key_dim=9, value_dim=6 if latent else 9, latent=latent, reach=reach)
    layout = KvLayout(layers=(layer,), block_size=8, dtype="float32", num_blocks=16 * 256)
    storage = KvStorage(layout, max_context=2_048, dtype=torch.float32, device=torch.device("cpu"))
    noise = torch.Generator().manual_seed(1)
    for tensor in storage.tensors:
        tensor[1:].normal_(generator=noise)
    tables = torch.arange(1, 1 + TILE * 256).view(TILE, 256)
    for position in positions:
        q = torch.randn(TILE, 4, 9, generator=noise)
        k = torch.randn(TILE, layer.heads, 9, generator=noise)
        v = None if latent else torch.randn(TILE, layer.heads, 9, generator=noise)
        seen = set()
        for place in (0, TILE - 1):
            for extra in (0, 1):
                for shared in (False, True):
                    length = (position // STRETCH + 1 + extra) * STRETCH
                    last = torch.full((TILE, 1), length - 1)
                    last[place] = position
                    first = 0 if reach.kind == "full" else last - reach.size + 1
                    hidden = (torch.arange(length) > last) | (torch.arange(length) < first)
                    mask = torch.zeros(TILE, length).masked_fill_(hidden, -torch.inf)[:, None, None, :]
                    rolled = tables.roll(place, 0)
                    blocks = (rolled[place : place + 1] if shared else rolled)[:, : length // 8].contiguous()
                    tile = Tile(0, length, (TileReach(torch.zeros(0, dtype=torch.int64), blocks, mask),))
                    moved = [None if part is None else part.roll(place, 0) for part in (q, k, v)]
                    seen.add(TileAttention(storage, tile)(0, tuple(moved), rule)[place].numpy().tobytes())
        assert len(seen) == 1
        keys, values = storage.gather(0, tables[0, : length // 8], 1)
        defined = weigh(q[:1].view(1, layer.heads, -1, 1, 9), keys, values, mask[place : place + 1, 0], rule)
        found = torch.frombuffer(bytearray(seen.pop()), dtype=torch.float32)
        assert torch.allclose(found, defined.flatten(), atol=1e-5)
