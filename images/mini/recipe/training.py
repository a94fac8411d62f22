"""The training loop: deterministic, on one core.

Matrices are trained with Muon (Jordan 2024; scaled to AdamW's size of update as in arXiv
2502.16982), which needs about half the steps of AdamW here; embeddings and norms with AdamW.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from recipe.corpus import Topic
from recipe.model import MiniLlama, ModelShape
from recipe.rows import Batch, Source

# One thread: sums are then always added in the same order, and a shared machine stays usable.
THREADS = 1
SEED = 20261121
_FINAL_STEPS = 100  # the recorded loss is the mean over this many last steps
_REPORT_EVERY = 50  # steps
_KEEP_EVERY = 200  # steps


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to train; the learning rates rise, stay, and fall to zero."""

    steps: int = 5000
    tokens: int = 2048
    adamw_rate: float = 3e-3
    muon_rate: float = 7.5e-3
    warm_up: int = 60
    fall_from: float = 0.3  # share of the steps after which the rate falls
    weight_decay: float = 0.05
    clip: float = 1.0

    def share(self, step: int) -> float:
        """The learning rates at `step`, counted from 0, as a share of their peaks."""
        rising = min(1.0, (step + 1) / self.warm_up)
        start = self.fall_from * self.steps
        falling = 1.0 if step < start else (self.steps - step) / (self.steps - start)
        return rising * falling


@dataclass(frozen=True, slots=True)
class Outcome:
    """A trained network, the loss of every step, and the processor seconds it took."""

    network: MiniLlama
    losses: tuple[float, ...]
    seconds: float

    @property
    def final_loss(self) -> float:
        """Mean loss of the last steps."""
        last = self.losses[-_FINAL_STEPS:]
        return sum(last) / len(last)


def train(
    topics: Sequence[Topic],
    tokenizer: Tokenizer,
    schedule: Schedule,
    *,
    seed: int = SEED,
    start: Tensor | None = None,
    refused: Callable[[str], bool] | None = None,
    keep: Callable[[MiniLlama, int], bool] | None = None,
) -> Outcome:
    """Train from scratch. Two runs on one machine give the same losses, bit for bit.

    `start` are the embeddings to begin with; random ones when left out. Questions that are `refused` are never drawn.
    `keep` gets the network every 200 steps and says whether to go on.
    """
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    network = MiniLlama(ModelShape(vocab_size=tokenizer.get_vocab_size()))
    if start is not None:
        network.model.embed_tokens.weight.data.copy_(start)
    optimizers = _optimizers(network, schedule)
    source = Source(topics, tokenizer, tokens=schedule.tokens, seed=seed, refused=refused)
    losses: list[float] = []
    start = time.process_time()
    for step, batch in zip(range(schedule.steps), source.batches(), strict=False):
        loss = weighted_loss(network, batch)
        network.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), schedule.clip)
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak * schedule.share(step)
            optimizer.step()
        losses.append(float(loss.detach()))
        if (step + 1) % _REPORT_EVERY == 0:
            _report(losses, time.process_time() - start)
        if keep is not None and (step + 1) % _KEEP_EVERY == 0 and not keep(network, step + 1):
            break
    return Outcome(network, tuple(losses), time.process_time() - start)


def weighted_loss(network: MiniLlama, batch: Batch) -> Tensor:
    """Weighted mean of the cross-entropy of the next tokens, in nats."""
    keep = batch.weights > 0
    logits = network(batch.ids, batch.positions, keep)
    each = F.cross_entropy(logits, batch.targets[keep], reduction="none")
    weights = batch.weights[keep]
    return (each * weights).sum() / weights.sum()


def _optimizers(network: MiniLlama, schedule: Schedule) -> list[tuple[torch.optim.Optimizer, float]]:
    """Each optimizer with its peak rate; norms and the embedding are not decayed."""
    matrices, others = [], []
    for name, parameter in network.named_parameters():
        matrix = parameter.dim() == 2 and "embed_tokens" not in name
        (matrices if matrix else others).append(parameter)
    muon = torch.optim.Muon(matrices, weight_decay=schedule.weight_decay, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-9)
    return [(muon, schedule.muon_rate), (adamw, schedule.adamw_rate)]


def _report(losses: Sequence[float], seconds: float) -> None:
    """One line of progress on standard error."""
    recent = losses[-_REPORT_EVERY:]
    mean = sum(recent) / len(recent)
    print(f"step {len(losses)} loss {mean:.4f} {seconds:.0f} s", file=sys.stderr, flush=True)
