"""The training loop: AdamW on answers, deterministic, on one core."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from recipe.corpus import Topic
from recipe.model import MiniLlama, ModelShape
from recipe.rows import Batch, Source

# One thread: sums are then always added in the same order, and a shared machine stays usable.
THREADS = 1
SEED = 20261121
_FINAL_STEPS = 100  # the recorded loss is the mean over this many last steps
_REPORT_EVERY = 50  # steps


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to train; the learning rate rises, stays, and falls to zero."""

    steps: int = 2400
    tokens: int = 2048
    peak_rate: float = 3e-3
    warm_up: int = 60
    fall_from: float = 0.3  # share of the steps after which the rate falls
    weight_decay: float = 0.05
    clip: float = 1.0

    def rate(self, step: int) -> float:
        """Learning rate of `step`, counted from 0."""
        rising = min(1.0, (step + 1) / self.warm_up)
        start = self.fall_from * self.steps
        falling = 1.0 if step < start else (self.steps - step) / (self.steps - start)
        return self.peak_rate * rising * falling


@dataclass(frozen=True, slots=True)
class Outcome:
    """A trained network, the loss of every step and how long it took."""

    network: MiniLlama
    losses: tuple[float, ...]
    seconds: float

    @property
    def final_loss(self) -> float:
        """Mean loss of the last steps."""
        last = self.losses[-_FINAL_STEPS:]
        return sum(last) / len(last)


def train(
    topics: Sequence[Topic], tokenizer: Tokenizer, schedule: Schedule, *, seed: int = SEED
) -> Outcome:
    """Train from scratch. Two runs on one machine give the same losses, bit for bit."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    network = MiniLlama(ModelShape(vocab_size=tokenizer.get_vocab_size()))
    optimizer = _optimizer(network, schedule)
    source = Source(topics, tokenizer, tokens=schedule.tokens, seed=seed)
    losses: list[float] = []
    start = time.monotonic()
    for step, batch in zip(range(schedule.steps), source.batches(), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        loss = weighted_loss(network, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), schedule.clip)
        optimizer.step()
        losses.append(float(loss.detach()))
        if (step + 1) % _REPORT_EVERY == 0:
            _report(losses, time.monotonic() - start)
    return Outcome(network, tuple(losses), time.monotonic() - start)


def weighted_loss(network: MiniLlama, batch: Batch) -> Tensor:
    """Weighted mean of the cross-entropy of the next tokens, in nats."""
    keep = batch.weights > 0
    logits = network(batch.ids, batch.positions, keep)
    each = F.cross_entropy(logits, batch.targets[keep], reduction="none")
    weights = batch.weights[keep]
    return (each * weights).sum() / weights.sum()


def _optimizer(network: MiniLlama, schedule: Schedule) -> torch.optim.AdamW:
    """AdamW; norms and the embedding are not decayed."""
    matrices, others = [], []
    for name, parameter in network.named_parameters():
        decayed = parameter.dim() == 2 and "embed_tokens" not in name
        (matrices if decayed else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": schedule.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=schedule.peak_rate, betas=(0.9, 0.98), eps=1e-9)


def _report(losses: Sequence[float], seconds: float) -> None:
    """One line of progress on standard error."""
    recent = losses[-_REPORT_EVERY:]
    mean = sum(recent) / len(recent)
    print(f"step {len(losses)} loss {mean:.4f} {seconds:.0f} s", file=sys.stderr, flush=True)
