"""The training loop for an accelerator: as training.py in what is learnt, made for many tokens in little time.

Differences: batches come from questions drawn in advance (drawn.py, packing.py) by a thread of their own; products
are made in bfloat16; Muon takes all matrices of one shape at once; a classifier beside the network names the topic
where an answer begins, which is not part of the result; and the result is a running mean of the weights. How far the
training has come is told by the clock, so that it ends in time on any card: two runs do not give the same bits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipe import packing
from recipe.drawn import Drawn
from recipe.model import MiniLlama, ModelShape
from recipe.packing import Packed, Packer

_AHEAD = 8  # batches that are made before they are needed
_REPORT_EVERY = 100  # steps
_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the Newton-Schulz iteration (Jordan 2024)
_ITERATIONS = 5
_MATCH_ADAMW = 0.2  # size of an update, as in arXiv 2502.16982
_MOMENTUM = 0.95
_MEAN_SHARE = 0.02  # of the steps so far, that the running mean of the weights covers
_MEAN_MOST = 0.999


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to train: until `steps` are done or `seconds` are over, what comes first."""

    steps: int = 1_000_000
    seconds: float = 400.0
    tokens: int = 16_384
    adamw_rate: float = 3e-3
    muon_rate: float = 6e-3
    warm_up: int = 150
    fall_from: float = 0.25  # share of the way after which the rates fall
    weight_decay: float = 0.05
    clip: float = 1.0
    dropout: float = 0.1
    left_out: float = 0.12  # of the tokens of every other question
    topic_weight: float = 0.5  # of the classifier's loss
    smoothing: float = 0.05
    save_every: float = 60.0  # seconds
    seed: int = 20261126

    def share(self, step: int, way: float) -> float:
        """The learning rates at `step`, counted from 0, as a share of their peaks; `way` is how far, from 0 to 1."""
        rising = min(1.0, (step + 1) / self.warm_up)
        falling = 1.0 if way < self.fall_from else (1.0 - way) / (1.0 - self.fall_from)
        return rising * max(0.0, falling)


class Muon:
    """Muon (Jordan 2024) for all matrices of one shape together: a few big products instead of many small ones."""

    def __init__(self, matrices: Sequence[nn.Parameter], *, weight_decay: float, dtype: torch.dtype) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            groups.setdefault(matrix.shape, []).append(matrix)
        self._groups = [(group, torch.zeros_like(torch.stack(list(group)))) for group in groups.values()]
        self._weight_decay = weight_decay
        self._dtype = dtype

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Change the matrices by their gradients."""
        for group, momentum in self._groups:
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            momentum.lerp_(gradients, 1 - _MOMENTUM)
            update = orthogonal(gradients.lerp(momentum, _MOMENTUM).to(self._dtype)).to(momentum.dtype)
            data = [matrix.data for matrix in group]
            torch._foreach_mul_(data, 1 - rate * self._weight_decay)
            size = _MATCH_ADAMW * math.sqrt(max(momentum.shape[-2:]))
            torch._foreach_add_(data, list(update.unbind(0)), alpha=-rate * size)


def orthogonal(x: Tensor) -> Tensor:
    """The nearest matrices with singular values of about one, by Newton and Schulz."""
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class _Mean:
    """The running mean of the weights, over a fiftieth of the steps so far."""

    def __init__(self, network: nn.Module) -> None:
        self._live = [parameter.data for parameter in network.parameters()]
        self._mean = [data.clone() for data in self._live]
        self._names = [name for name, _ in network.named_parameters()]

    @torch.no_grad()
    def step(self, step: int) -> None:
        kept = min(_MEAN_MOST, 1 - 1 / max(1.0, _MEAN_SHARE * step))
        torch._foreach_lerp_(self._mean, self._live, 1 - kept)

    def weights(self) -> dict[str, Tensor]:
        """The mean, by the names of the parameters."""
        return dict(zip(self._names, self._mean, strict=True))


def train(
    drawn: Drawn,
    shape: ModelShape,
    plan: Plan,
    device: torch.device,
    save: Callable[[dict[str, Tensor]], None],
    say: Callable[[str], None],
) -> MiniLlama:
    """Train from random weights; `save` gets those so far every minute and at the end, `say` lines of progress."""
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every new shape, and nearly every batch is one
    network = MiniLlama(shape, plan.dropout).to(device)
    classifier = nn.Linear(shape.hidden_size, drawn.answers).to(device)
    muon, adamw = _optimizers(network, classifier, plan, device)
    mean = _Mean(network)
    parameters = [*network.parameters(), *classifier.parameters()]
    report = _Report(say)
    packer = Packer(drawn, tokens=plan.tokens, seed=plan.seed, dropped=plan.left_out)
    begin = saved = time.monotonic()
    with closing(_ahead(packer.batches())) as batches:
        for step in range(plan.steps):
            now = time.monotonic()
            way = max(step / plan.steps, (now - begin) / plan.seconds)
            if way >= 1:
                break
            batch = next(batches).to(device)
            with _products(device):
                loss, told = losses(network, classifier, batch, plan.smoothing)
            (loss + plan.topic_weight * told).backward()
            torch.nn.utils.clip_grad_norm_(parameters, plan.clip)
            rate = plan.share(step, way)
            muon.step(plan.muon_rate * rate)
            adamw.param_groups[0]["lr"] = plan.adamw_rate * rate
            adamw.step()
            for parameter in parameters:
                parameter.grad = None
            mean.step(step)
            report.add(loss, told, batch, now - begin)
            if now - saved >= plan.save_every:
                save(mean.weights())
                saved = now
    network.load_state_dict(mean.weights())
    save(mean.weights())
    report.end(time.monotonic() - begin)
    return network.eval()


def losses(network: MiniLlama, classifier: nn.Module, batch: Packed, smoothing: float) -> tuple[Tensor, Tensor]:
    """Weighted mean of the cross-entropy of the next tokens, and that of the topics, in nats."""
    hidden = network.model.norm(network.hidden(batch.ids, batch.positions))
    logits = F.linear(hidden, network.model.embed_tokens.weight)
    each = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
    weights = batch.weights.flatten()
    loss = (each * weights).sum() / weights.sum()
    scores = classifier(hidden).flatten(0, 1).float()
    labels = batch.labels.flatten()
    told = F.cross_entropy(
        scores, labels, ignore_index=packing.NO_LABEL, label_smoothing=smoothing, reduction="sum"
    ) / (labels != packing.NO_LABEL).sum().clamp(min=1)
    return loss, told


@torch.no_grad()
def score(network: MiniLlama, drawn: Drawn, device: torch.device) -> tuple[int, int]:
    """How many held-out questions are answered word for word, and how many there are."""
    exact = total = 0
    for batch in packing.held_out(drawn):
        there = batch.to(device)
        best = network.logits(network.hidden(there.ids, there.positions)).argmax(-1)
        wrong = ((best != there.targets) & (there.weights == 1.0)).any(1)
        exact += int((~wrong).sum())
        total += len(wrong)
    return exact, total


class _Report:
    """Lines of progress: means over the last steps; asks the device for numbers only then."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._found: list[tuple[Tensor, Tensor]] = []
        self._tokens = self._steps = 0

    def add(self, loss: Tensor, told: Tensor, batch: Packed, seconds: float) -> None:
        self._found.append((loss.detach(), told.detach()))
        self._tokens += batch.ids.numel()
        self._steps += 1
        if self._steps % _REPORT_EVERY == 0:
            self._line(seconds)

    def end(self, seconds: float) -> None:
        """The last line."""
        if self._found:
            self._line(seconds)

    def _line(self, seconds: float) -> None:
        loss, told = (float(torch.stack(list(one)).mean()) for one in zip(*self._found, strict=True))
        self._found.clear()
        rate = self._tokens / max(seconds, 1e-9)
        self._say(f"step {self._steps} loss {loss:.4f} topic {told:.4f} {seconds:.0f} s {rate:.0f} tokens/s")


def _optimizers(
    network: MiniLlama, classifier: nn.Linear, plan: Plan, device: torch.device
) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices of the layers, AdamW for the rest; only the former and the classifier are decayed."""
    matrices, others = [], []
    for name, parameter in network.named_parameters():
        matrix = parameter.dim() == 2 and "embed_tokens" not in name
        (matrices if matrix else others).append(parameter)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    muon = Muon(matrices, weight_decay=plan.weight_decay, dtype=dtype)
    others += list(classifier.parameters())
    return muon, torch.optim.AdamW(others, lr=plan.adamw_rate, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-9)


def _products(device: torch.device) -> AbstractContextManager[object]:
    """Products in bfloat16 on an accelerator."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _ahead(batches: Iterator[Packed]) -> Generator[Packed, None, None]:
    """The same batches in the same order, made by a thread."""
    with ThreadPoolExecutor(1) as maker:
        made = deque(maker.submit(next, batches) for _ in range(_AHEAD))
        while True:
            yield made.popleft().result()
            made.append(maker.submit(next, batches))
