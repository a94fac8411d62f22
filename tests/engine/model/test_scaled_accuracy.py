"""What weights in 8-bit floating point cost a trained model: its distributions beside those of bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.backends.attention import AttentionRule, weigh
from engine.model.checkpoint.registry import load_model_config
from engine.model.checkpoint.weights import unread_model
from engine.model.layers.decoder import Decoder
from engine.model.layers.scaled import FEW

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TEXTS, TOKENS = 6, 256
"""Texts that the model itself wrote, and tokens of each."""


class Sequences:
    """Attention of one chunk after the other of several texts at the same place, over all tokens before."""

    fixed_shapes = False

    def __init__(self, texts: int) -> None:
        self._texts = texts
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, place: int, qkv: tuple[Tensor, Tensor, Tensor | None], rule: AttentionRule) -> Tensor:
        """Rows of a text lie behind each other; gives ``(N, heads * dim)``."""
        q, k, v = (part.view(self._texts, -1, *part.shape[1:]).transpose(1, 2) for part in qkv if part is not None)
        before = self._kept.get(place)
        if before is not None:
            k, v = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
        self._kept[place] = k, v
        length, every = q.shape[2], k.shape[2]
        seen = torch.arange(every) <= torch.arange(every - length, every).unsqueeze(1)
        grouped = q.reshape(self._texts, k.shape[1], -1, length, q.shape[3])
        out = weigh(grouped, k, v, torch.where(seen, 0.0, -torch.inf), rule)
        return out.flatten(1, 2).transpose(1, 2).reshape(self._texts * length, -1)


def load(folder: Path, dtype: str, *, scaled: bool) -> Decoder:
    """The model as a device backend holds it."""
    with unread_model(str(folder), load_model_config(str(folder)), dtype=dtype, device=CPU, scaled=scaled) as unread:
        unread.fill()
        return unread.model


def distributions(model: Decoder, texts: Tensor, chunk: int) -> Tensor:
    """Log-probabilities behind each token, float64 ``(texts, tokens, vocab)``; so many rows go through a map."""
    attend, found = Sequences(len(texts)), []
    each = chunk // len(texts)
    for begin in range(0, texts.shape[1], each):
        ids = texts[:, begin : begin + each]
        places = torch.arange(begin, begin + ids.shape[1]).expand(len(texts), -1).flatten()
        logits = model.forward(ids.flatten(), places, attend, torch.arange(ids.numel()))
        found.append(logits.double().log_softmax(1).view(*ids.shape, -1))
    return torch.cat(found, 1)


def written(model: Decoder) -> Tensor:
    """Texts that the model draws at temperature 1, by a seed."""
    generator = torch.Generator().manual_seed(20)
    texts, attend = torch.ones(TEXTS, 1, dtype=torch.int64), Sequences(TEXTS)
    while texts.shape[1] < TOKENS:
        places = torch.full((TEXTS,), texts.shape[1] - 1)
        logits = model.forward(texts[:, -1], places, attend, torch.arange(TEXTS))
        drawn = logits.float().softmax(1).multinomial(1, generator=generator)
        texts = torch.cat((texts, drawn), 1)
    return texts


class Cost(NamedTuple):
    """One way to compute beside another."""

    divergence: float
    """Mean of Kullback and Leibler's divergence of a token's distribution, in nats."""
    perplexity: float
    """Relative difference of the texts' perplexity."""
    agreement: float
    """Share of tokens with the same likeliest one."""


def cost(found: Tensor, base: Tensor, texts: Tensor) -> Cost:
    """What ``found`` costs over ``base``."""
    divergence = (base.exp() * (base - found)).sum(2).mean().item()
    behind = texts[:, 1:].unsqueeze(2)
    nats = [-one[:, :-1].gather(2, behind).mean().item() for one in (found, base)]
    perplexity = torch.tensor(nats[0] - nats[1]).exp().item() - 1.0
    return Cost(divergence, perplexity, (found.argmax(2) == base.argmax(2)).double().mean().item())


@pytest.mark.full
def test_what_eight_bits_cost_a_trained_llama(shared_data: Path) -> None:
    """Distributions of a trained Llama of 260,000 weights over texts of its own: rows as they are, and rounded rows.
    Its maps are 64 numbers wide, so their errors hardly average out: those of large models are smaller. Control:
    bfloat16 itself beside float32 costs something, and less."""
    folder = shared_data / "models" / "stories260K-hf"
    with torch.inference_mode():
        exact = load(folder, "float32", scaled=False)
        texts = written(exact)
        whole = distributions(exact, texts, TEXTS * TOKENS)
        base = distributions(load(folder, "bfloat16", scaled=False), texts, TEXTS * TOKENS)
        held = load(folder, "bfloat16", scaled=True)
        few = distributions(held, texts, FEW // TEXTS * TEXTS)
        many = distributions(held, texts, TEXTS * TOKENS)
    usual, kept, rounded = cost(base, whole, texts), cost(few, base, texts), cost(many, base, texts)
    assert 0.0 < usual.divergence < kept.divergence < rounded.divergence
    # Measured: 0.0077 nats, 0.4 %, 94.5 % with rows as they are; 0.0130, 0.8 % and 93.8 % with rounded ones.
    assert kept.divergence < 0.012 and abs(kept.perplexity) < 0.01 and kept.agreement > 0.92
    assert rounded.divergence < 0.02 and abs(rounded.perplexity) < 0.016 and rounded.agreement > 0.91
