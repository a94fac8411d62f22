"""Chooses the next token of every row of a step: the order and the formulas are in ``docs/sampling.md``.

Rows never touch each other: a row whose logits are not finite fails alone, and every number of a row is computed by
one order of roundings, whichever rows are beside it and however many threads compute. So equal logits give equal
tokens and equal log-probabilities in any batch. Three things would break that, and are not done here: a sum over a
whole row (torch splits it between threads when it is the only one), a sum over a width that a neighbour's ``top_k``
chose, and the ties of a ``topk`` whose number a neighbour chose.

A structured row's mask comes first of all (``engine.backends.common.masks``): what it forbids has a score of minus
infinity here, and log-probabilities are those of what is left. A request's biases come next
(``engine.backends.common.logit_bias``): they change what is chosen, and no log-probability.

Sorting a vocabulary costs 10 ms and more on a core; so top-k and top-p first look at the few hundred best
ids, which is exact whenever the kept set lies inside them, and at more only for rows where it does not.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.common.logit_bias import LogitBiases
from engine.backends.common.penalties import WIDEST as WIDEST_PENALTY
from engine.backends.common.penalties import Penalties
from engine.backends.common.rng import uniforms
from engine.core.backend import Samples
from engine.core.scheduler.plan import FAILED, Admission
from isolation.ipc.logprob import PromptLogprobs, TokenLogprobs
from isolation.ipc.messages import MAX_TOP_LOGPROBS
from isolation.ipc.sampling import PARAMETERS, Sampling, values_of

WIDEST = 1e30
"""Bound of the numbers that are computed with: the wire admits all of float64, the arithmetic is float32."""

LOWEST_LOGPROB = float(torch.finfo(torch.float32).min)
"""In place of minus infinity, which has no place in a frame."""

STRETCH = 512
"""Scores that are summed up before a draw looks inside them."""

JUST_BELOW_ONE = 1 - 2.0**-52
"""Keeps a point below a sum that was rounded."""

WIDEN = 16
"""Factor by which more scores are looked at when the best did not suffice."""

CANDIDATES = 256
"""Best ids looked at before a full sort; holds 0.9 of the mass of a language model's distribution nearly always."""


_DTYPES = {"d": np.float64, "I": np.int64, "Q": np.uint64}
"""Type of a number's column, by its code on the wire."""


def bounded(sampling: Sampling, vocab_size: int) -> Sampling:
    """The numbers that are computed with: a top-k as large as the vocabulary is none, and nothing is so large that
    float32 cannot carry it. Samplers of all backends take their numbers from here."""
    return replace(
        sampling,
        temperature=min(sampling.temperature, WIDEST),
        top_k=sampling.top_k if sampling.top_k < vocab_size else 0,
        repetition_penalty=min(max(sampling.repetition_penalty, 1 / WIDEST_PENALTY), WIDEST_PENALTY),
    )


class Sampler:
    """Keeps the sampling numbers of every row, and samples a whole step at once."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._numbers = {one.name: np.full(max_num_seqs, one.identity, _DTYPES[one.code]) for one in PARAMETERS}
        """Column of each number, by its name; ``_temperature`` and the next ones are columns that each step reads."""
        self._temperature = self._numbers["temperature"]
        self._top_k, self._top_p = self._numbers["top_k"], self._numbers["top_p"]
        self._min_p, self._typical_p = self._numbers["min_p"], self._numbers["typical_p"]
        self._seed = self._numbers["seed"]
        self._logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self._prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self._plain = np.ones(max_num_seqs, dtype=np.bool_)
        self._biases = LogitBiases()
        self._penalties = Penalties()

    def admit(self, admission: Admission) -> None:
        """Take over the numbers of a request that gets a row."""
        row = admission.row
        numbers = bounded(admission.sampling, self._vocab_size)
        for column, value in zip(self._numbers.values(), values_of(numbers), strict=True):
            column[row] = value
        self._logprobs[row] = admission.logprobs
        self._prompt_logprobs[row] = admission.prompt_logprobs
        changed = self._penalties.admit(admission) | self._biases.admit(admission)
        self._plain[row] = numbers.temperature == 0 and admission.logprobs < 0 and not changed

    def forget(self, rows: list[int]) -> None:
        """Overwrite the ids that are kept of these rows."""
        self._biases.forget(rows)
        self._penalties.forget(rows)

    def wants_maximum(self, rows: list[int]) -> bool:
        """Whether all these rows take the maximum of their logits as it is, and nothing is to be reported."""
        return bool(self._plain[rows].all())

    def sample(self, logits: Tensor, rows: list[int], positions: NDArray[np.int64]) -> Samples:
        """Choose a token for each row.

        Args:
            logits: ``(M, vocab_size)``, any float dtype; not changed.
            rows: the M rows.
            positions: for each the position that the new token will have.
        """
        index = np.array(rows, dtype=np.int64)
        if self._plain[index].all():
            return Samples(greedy(logits).tolist())
        raw = logits.float()
        scores = self._penalties.apply(self._biases.apply(raw, rows), rows)
        chosen = greedy(scores)
        self._draw(scores, chosen, index, positions)
        token_ids: list[int] = torch.where(raw.amax(-1).isfinite(), chosen, FAILED).tolist()
        self._penalties.count(rows, token_ids)
        return Samples(token_ids, self._report(raw, index, token_ids))

    def score(self, logits: Tensor, row: int, start: int, token_ids: NDArray[np.int64]) -> PromptLogprobs:
        """Log-probabilities of given tokens of a prompt, with as many alternatives as its request asked for.

        Args:
            logits: ``(M, vocab_size)``, any float dtype, of the positions before the tokens'; not changed.
            row: the request's.
            start: position of the first token.
            token_ids: the M tokens.
        """
        logprobs = log_probabilities(logits.float()).nan_to_num_(nan=LOWEST_LOGPROB)
        chosen = logprobs.gather(1, torch.from_numpy(token_ids).to(logits.device).unsqueeze(1))
        width = min(int(self._prompt_logprobs[row]), self._vocab_size)
        # Always so many, as for the output: which of two equal ids is found depends on the number asked for.
        values, ids = logprobs.topk(min(MAX_TOP_LOGPROBS if width else 1, self._vocab_size))
        return PromptLogprobs(
            request=0,
            start=start,
            logprobs=array("d", chosen.flatten().tolist()),
            top_ids=array("I", ids[:, :width].flatten().tolist()),
            top_logprobs=array("d", values[:, :width].flatten().tolist()),
        )

    def _draw(self, scores: Tensor, chosen: Tensor, index: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Overwrite the choices of rows with a temperature by a draw."""
        (places,) = np.nonzero(self._temperature[index] > 0)
        if not len(places):
            return
        drawn = index[places]
        device = scores.device
        where = torch.from_numpy(places).to(device)
        temperature = torch.from_numpy(self._temperature[drawn].astype(np.float32)).to(device).unsqueeze(1)
        some = scores if len(places) == len(index) else scores.index_select(0, where)
        scaled = (some - some.amax(-1, keepdim=True)).div_(temperature)
        weights = _weights(scaled, self._floors(scaled, drawn))
        typical_p = self._typical_p[drawn]
        (cut,) = np.nonzero(typical_p < 1)
        if len(cut):
            limited = torch.from_numpy(cut).to(device)
            shares = torch.from_numpy(typical_p[cut]).to(device)
            weights[limited] = _typical(scaled.index_select(0, limited), weights[limited], shares)
        points = torch.from_numpy(uniforms(self._seed[drawn], positions[places])).to(device)
        chosen[where] = _invert(weights, points).clamp_(max=self._vocab_size - 1)

    def _floors(self, scaled: Tensor, rows: NDArray[np.int64]) -> Tensor | None:
        """For each row the least score that is kept; None when all are. Scores have their maximum at 0."""
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        device = scaled.device
        floor = None
        if (min_p > 0).any():
            with np.errstate(divide="ignore"):
                floor = torch.from_numpy(np.log(min_p.astype(np.float32))).to(device)
        (cut,) = np.nonzero((top_k > 0) | (top_p < 1))
        if len(cut):
            if floor is None:
                floor = torch.full((len(rows),), -torch.inf, device=device)
            where = torch.from_numpy(cut).to(device)
            ks, ps = torch.from_numpy(top_k[cut]).to(device), torch.from_numpy(top_p[cut]).to(device)
            floor[where] = torch.maximum(floor[where], nucleus_floor(scaled.index_select(0, where), ks, ps))
        return floor

    def _report(self, raw: Tensor, index: NDArray[np.int64], token_ids: list[int]) -> list[TokenLogprobs]:
        """Log-probabilities under the model's own distribution, before any processing."""
        (places,) = np.nonzero(self._logprobs[index] >= 0)
        if not len(places):
            return []
        counts = self._logprobs[index[places]].tolist()
        some = raw.index_select(0, torch.from_numpy(places).to(raw.device))
        logprobs = log_probabilities(some)
        # Always so many: which of two equal ids is found depends on the number asked for.
        values, ids = logprobs.topk(min(MAX_TOP_LOGPROBS if max(counts) else 1, self._vocab_size))
        reports = []
        for line, place in enumerate(places.tolist()):
            token_id = token_ids[place]
            if token_id == FAILED:
                continue
            # What a mask forbids is no alternative.
            count = int((values[line, : counts[line]] > LOWEST_LOGPROB).sum())
            reports.append(
                TokenLogprobs(
                    index=place,
                    logprob=float(logprobs[line, token_id]),
                    top_ids=tuple(ids[line, :count].tolist()),
                    top_logprobs=tuple(values[line, :count].tolist()),
                )
            )
        return reports


def log_probabilities(raw: Tensor) -> Tensor:
    """Log-softmax of each row of float32 logits ``(R, V)``; a row of excluded ids has ``LOWEST_LOGPROB`` for them.

    The exponentials are summed in stretches, and the stretches one after another in float64.
    """
    shifted = raw - raw.amax(-1, keepdim=True)
    whole = _stretches(shifted).sum(-1).double().cumsum(-1)[:, -1:]
    return shifted.sub_(whole.log().float()).clamp_(min=LOWEST_LOGPROB)


def nucleus_floor(scaled: Tensor, top_k: Tensor, top_p: Tensor, *, width: int = CANDIDATES) -> Tensor:
    """The least score that top-k and then top-p keep, for each row.

    Args:
        scaled: scores ``(R, V)`` with maximum 0.
        top_k: int64 ``(R,)``, 0 for no limit, else below V.
        top_p: float64 ``(R,)`` in (0, 1].
        width: best scores to look at before sorting all.
    """
    size = scaled.shape[1]
    width = min(size, max(width, int(top_k.max()) + 1))
    best = scaled.topk(width).values
    last_kept = best.gather(1, (top_k - 1).clamp(min=0).unsqueeze(1))
    k_floor = torch.where(top_k.unsqueeze(1) > 0, last_kept, -torch.inf)
    masses = best.exp().double().masked_fill_(best < k_floor, 0.0).cumsum(-1)
    whole = torch.where(top_k > 0, masses[:, -1], _stretches(scaled).sum(-1).double().cumsum(-1)[:, -1])
    reached = masses >= (top_p * whole).unsqueeze(1)
    limited = top_p < 1
    p_floor = best.gather(1, reached.int().argmax(-1, keepdim=True))
    enough = reached.any(-1)
    p_floor = torch.where((limited & enough).unsqueeze(1), p_floor, -torch.inf)
    floor = torch.maximum(k_floor, p_floor).squeeze(1)
    if width < size:
        ties_beyond = (top_k > 0) & (best[:, -1:] >= k_floor).squeeze(1)
        unsure = limited & (ties_beyond | ~enough)
        if unsure.any():
            (where,) = unsure.nonzero(as_tuple=True)
            floor[where] = nucleus_floor(scaled[where], top_k[where], top_p[where], width=WIDEN * width)
    return floor


def _weights(scaled: Tensor, floor: Tensor | None) -> Tensor:
    """Unnormalised probabilities in stretches, with zeros for what is not kept."""
    stretches = _stretches(scaled)
    if floor is not None:
        stretches.flatten(1)[:, : scaled.shape[1]].masked_fill_(scaled < floor.unsqueeze(1), 0.0)
    return stretches


def _typical(scaled: Tensor, weights: Tensor, shares: Tensor) -> Tensor:
    """Weights of the locally typical set (Meister et al., arXiv 2202.00666), zeros for other ids.

    An id's information less the entropy is the mean score less the id's own: the sum of all weights cancels. So the
    nearest ids are kept, up to the first distance within which ``shares`` (float64 ``(R,)``) of the weight lies.

    Args:
        scaled: scores ``(R, V)``.
        weights: unnormalised probabilities of these scores in stretches, zeros for ids that are dropped already.
        shares: share of the whole weight that is kept, below 1.
    """
    flat = weights.flatten(1)[:, : scaled.shape[1]]
    moments = torch.zeros_like(weights)
    moments.flatten(1)[:, : scaled.shape[1]] = torch.where(flat > 0, flat * scaled, 0.0)
    whole, moment = (part.sum(-1).double().cumsum(-1)[:, -1] for part in (weights, moments))
    distance = (scaled - (moment / whole).float().unsqueeze(1)).abs_().masked_fill_(flat == 0, torch.inf)
    flat.masked_fill_(distance > _reach(distance, flat, shares * whole).unsqueeze(1), 0.0)
    return weights


def _reach(distance: Tensor, weights: Tensor, wanted: Tensor, *, width: int = CANDIDATES) -> Tensor:
    """The least distance within which so much weight (float64 ``(R,)``) lies, for each row; infinite where roundings
    leave less than that."""
    width = min(distance.shape[1], width)
    nearest = distance.topk(width, largest=False)
    reached = weights.gather(1, nearest.indices).double().cumsum(-1) >= wanted.unsqueeze(1)
    reach = nearest.values.gather(1, reached.int().argmax(-1, keepdim=True)).squeeze(1)
    short = ~reached.any(-1)
    if width == distance.shape[1]:
        return reach.masked_fill_(short, torch.inf)
    if short.any():
        (where,) = short.nonzero(as_tuple=True)
        reach[where] = _reach(distance[where], weights[where], wanted[where], width=WIDEN * width)
    return reach


def _stretches(scaled: Tensor) -> Tensor:
    """Exponentials of the scores ``(R, V)``, zeros behind them, shape ``(R, stretches, STRETCH)``."""
    rows, size = scaled.shape
    padded = torch.zeros(rows, -(-size // STRETCH) * STRETCH, device=scaled.device)
    torch.exp(scaled, out=padded[:, :size])
    return padded.view(rows, -1, STRETCH)


def _invert(weights: Tensor, points: Tensor) -> Tensor:
    """The first place where the cumulative distribution exceeds the point, for each row: int64 ``(R,)``.

    Two levels, so that the sums in float64 are over stretches and inside one of them only. What is found has a
    weight above 0: ``searchsorted`` stops where the sum has just grown.
    """
    outer = weights.sum(-1).double().cumsum(-1)
    target = (points * outer[:, -1]).unsqueeze(1)
    stretch = torch.searchsorted(outer, target, right=True).clamp_(max=weights.shape[1] - 1)
    before = torch.where(stretch > 0, outer.gather(1, (stretch - 1).clamp_(min=0)), 0.0)
    inside = weights.gather(1, stretch.unsqueeze(2).expand(-1, -1, STRETCH)).squeeze(1)
    inner = inside.double().cumsum(-1)
    rest = torch.minimum(target - before, inner[:, -1:] * JUST_BELOW_ONE)
    return (stretch * STRETCH + torch.searchsorted(inner, rest, right=True)).squeeze(1)


def greedy(scores: Tensor) -> Tensor:
    """The id of each row's maximum, ``FAILED`` where that is not finite (a maximum is NaN when any score is)."""
    values, ids = scores.max(-1)
    return torch.where(values.isfinite(), ids, FAILED)
