"""Comparison program: ``python -m engine.convert.compare FOLDER OTHER TEXT TOKENS DTYPE THREADS FREE``.

Measures what a model folder (``OTHER``: quantised, converted, compressed) costs beside the one that it was made from,
on a text: perplexity of both, Kullback and Leibler's divergence, and how often both would choose the same token. One
model is in memory at a time; of the first the log-probabilities are kept. FREE is the memory in bytes that the weights
of a model may take.

The folders are untrusted: the program locks itself down before it reads the first byte. Loading a model opens files, so
it may open files for reading, unlike converters; it can write to its standard output, and can change, send or start
nothing. It reports as ``engine.convert`` does.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - nothing but files can be read later
import json
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.attention import AttentionRule, weigh
from engine.convert.calls import reader_calls
from engine.convert.program import CPU_SECONDS, EXIT_FILES, EXIT_REFUSED, EXIT_USAGE, end, limit_processor, say
from engine.core.kv.layout import Reach
from engine.errors import LockdownError, ModelLoadError, RequestRejectedError
from engine.model.checkpoint.registry import describe_model, load_model_config
from engine.model.checkpoint.weights import DTYPE_NAMES, load_model, weight_bytes
from engine.model.layers.decoder import Decoder
from engine.sandbox.lockdown import leave, lock_down
from engine.text.tokenizer import MAX_TOKENIZER_BYTES, MAX_VOCABULARY, Tokenizer

CPU = torch.device("cpu")

MIB = 1 << 20

WINDOW = 512
"""Tokens that are computed together, from the text's beginning on; a token sees those of its window before it."""

LEAST_TOKENS = 2
"""A window of one token has none to score."""

KEPT_BYTES = 2 << 30
"""Most bytes of the first model's log-probabilities, 4 for each token and word: a longer text is cut."""

CHARACTERS_A_TOKEN = 16
"""Characters of the text that are encoded for each token that is wanted; prose has four."""

MAX_CHARACTERS = 1 << 22
"""Most characters of a text that are encoded; a few seconds."""

ROWS = 32
"""Distributions that are compared together, in float64: 33 MiB for a vocabulary of 128,000."""


@dataclass(frozen=True, slots=True)
class WholeWindow:
    """Attention of one window to itself, in every layer."""

    reaches: tuple[Reach, ...]
    """How far back each layer looks, by its place."""
    value_dims: tuple[int, ...]
    masks: dict[Reach, Tensor]
    fixed_shapes: bool = False

    def __call__(self, place: int, qkv: tuple[Tensor, Tensor, Tensor | None], rule: AttentionRule, /) -> Tensor:
        """Attend in one layer; see ``Attention``."""
        q_nhd, k_nkd, v_nkv = qkv
        values = k_nkd[..., : self.value_dims[place]] if v_nkv is None else v_nkv
        q_htd, k_ksd, v_ksv = (part.transpose(0, 1) for part in (q_nhd, k_nkd, values))
        grouped = q_htd.reshape(1, k_ksd.shape[0], -1, *q_htd.shape[1:])
        out = weigh(grouped, k_ksd.unsqueeze(0), v_ksv.unsqueeze(0), self.masks[self.reaches[place]], rule)
        return out[0].flatten(0, 1).transpose(0, 1).flatten(1)


@dataclass(slots=True)
class TextSums:
    """What both models gave, summed over the scored tokens."""

    tokens: int = 0
    nats: float = 0.0
    """Surprise of the first model."""
    other_nats: float = 0.0
    same: int = 0
    """Tokens at which both have the same likeliest next one."""


def main(arguments: list[str]) -> int:
    """Compare; return the exit status."""
    numbers = [one for one in (*arguments[3:4], *arguments[5:]) if one.isascii() and one.isdecimal()]
    if len(arguments) != 7 or len(numbers) != 3 or arguments[4] not in DTYPE_NAMES:
        return EXIT_USAGE
    (folder, other, text), dtype = arguments[:3], arguments[4]
    tokens, threads, free = map(int, numbers)
    limit_processor(CPU_SECONDS)
    torch.set_num_threads(max(threads, 1))
    torch.ones(256, 256) @ torch.ones(256, 256)  # the pool's threads begin here
    try:
        lock_down(reader_calls(generates_code=dtype != "float32"))
    except LockdownError as error:
        return end(EXIT_FILES, str(error))
    try:
        summary = compare(Path(folder), Path(other), Path(text), tokens=tokens, dtype=dtype, free=free)
    except ModelLoadError as error:
        return end(EXIT_REFUSED, str(error))
    except (MemoryError, RuntimeError) as error:
        return end(EXIT_REFUSED, f"a model cannot be computed here: {str(error)[:200]}")
    except OSError as error:
        return end(EXIT_FILES, f"{Path(str(error.filename)).name}: {error.strerror}")
    say(f"done {json.dumps(summary)}")
    return 0


@torch.inference_mode()
def compare(folder: Path, other: Path, text: Path, *, tokens: int, dtype: str, free: int) -> dict[str, object]:
    """Compare two models on a text.

    Args:
        folder: of the model that the other one was made from.
        other: of that one.
        text: file in UTF-8.
        tokens: most tokens of it that are computed.
        dtype: in which both compute.
        free: most bytes that the weights of one may take.

    Returns:
        A summary for people.

    Raises:
        ModelLoadError: a model cannot be loaded or does not fit, or the two have other tokens.
        OSError: a file cannot be read.
    """
    ids = _token_ids(folder, other, text, tokens)
    model = _loaded(folder, dtype, free)
    vocabulary, window = model.config.vocab_size, min(WINDOW, model.config.max_positions)
    ids = ids[: max(KEPT_BYTES // (4 * vocabulary), LEAST_TOKENS)]
    if len(ids) < LEAST_TOKENS:
        raise ModelLoadError("the text has fewer than two tokens, so there is nothing to score")
    if int(ids.max()) >= vocabulary:
        raise ModelLoadError(f"{folder.name}: its tokenizer gives ids beyond the vocabulary of its weights")
    total, done = 2 * len(ids), 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        say(f"progress {done} {total}")

    kept = list(distributions(model, ids, window, tell))
    del model  # one is in memory at a time
    model = _loaded(other, dtype, free)
    if model.config.vocab_size != vocabulary or min(WINDOW, model.config.max_positions) != window:
        raise ModelLoadError("the models have vocabularies or contexts of different sizes, so they cannot be compared")
    sums, divergences = TextSums(), []
    found = distributions(model, ids, window, tell)
    for base, changed, part in zip(kept, found, torch.split(ids, window), strict=True):
        divergences.append(measure(base, changed, part, sums))
    every = torch.cat(divergences)
    return {
        "tokens": sums.tokens,
        "window": window,
        "perplexity": float(torch.tensor(sums.nats / sums.tokens, dtype=torch.float64).exp()),
        "other_perplexity": float(torch.tensor(sums.other_nats / sums.tokens, dtype=torch.float64).exp()),
        "divergence": float(every.mean()),
        "divergence_p99": float(every.quantile(0.99)),
        "agreement": sums.same / sums.tokens,
    }


def distributions(model: Decoder, ids: Tensor, window: int, done: Callable[[int], None]) -> Iterator[Tensor]:
    """Yield log-probabilities behind each token, float32 ``(tokens, vocabulary)`` for each window."""
    layers = model.config.kv_layers
    for part in torch.split(ids, window):
        places = torch.arange(len(part))
        masks = {reach: _mask(reach, len(part)) for reach in {layer.reach for layer in layers}}
        attend = WholeWindow(tuple(one.reach for one in layers), tuple(one.value_dim for one in layers), masks)
        yield model.forward(part, places, attend, places).float().log_softmax(1)
        done(len(part))


def measure(base: Tensor, changed: Tensor, ids: Tensor, sums: TextSums) -> Tensor:
    """Add one window to the sums; gives each scored token's divergence in nats, float64. The last distribution of a
    window is of a token that is not in it, and is left out."""
    found = []
    for begin in range(0, len(ids) - 1, ROWS):
        last = min(begin + ROWS, len(ids) - 1)
        one, other = base[begin:last].double(), changed[begin:last].double()
        behind = ids[begin + 1 : last + 1].unsqueeze(1)
        sums.tokens += last - begin
        sums.nats -= float(one.gather(1, behind).sum())
        sums.other_nats -= float(other.gather(1, behind).sum())
        sums.same += int((one.argmax(1) == other.argmax(1)).sum())
        # Tokens that the first model excludes add nothing, whatever the other one gives them.
        found.append(torch.where(one == -torch.inf, 0.0, one.exp() * (one - other)).sum(1).clamp_(min=0.0))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.float64)


def _mask(reach: Reach, tokens: int) -> Tensor:
    places = torch.arange(tokens)
    first = torch.tensor([reach.first_seen(place) for place in range(tokens)]).unsqueeze(1)
    return torch.where((places >= first) & (places <= places.unsqueeze(1)), 0.0, -torch.inf)


def _loaded(folder: Path, dtype: str, free: int) -> Decoder:
    try:
        config = load_model_config(str(folder)).within(WINDOW)
        needed = weight_bytes(describe_model(config), DTYPE_NAMES[dtype])
        if needed > free:
            raise ModelLoadError(
                f"its weights take {needed / MIB:,.1f} MiB in {dtype}, and {free / MIB:,.1f} MiB of memory are free"
            )
        return load_model(str(folder), config, dtype=dtype, device=CPU)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder.name}: {error}") from error


def _token_ids(folder: Path, other: Path, text: Path, tokens: int) -> Tensor:
    """The text's first ids, which must be the same in both models."""
    characters = min(tokens * CHARACTERS_A_TOKEN, MAX_CHARACTERS)
    try:
        with text.open(encoding="utf-8") as file:
            words = file.read(characters)
    except ValueError as error:
        raise ModelLoadError(f"{text.name} is not text in UTF-8") from error
    found = [_encoded(one, words) for one in (folder, other)]
    if found[0] != found[1]:
        raise ModelLoadError("the models divide the text into different tokens, so they cannot be compared")
    return torch.tensor(found[0][:tokens], dtype=torch.int64)


def _encoded(folder: Path, words: str) -> array[int]:
    with (folder / "tokenizer.json").open("rb") as file:
        data = file.read(MAX_TOKENIZER_BYTES + 1)
    try:
        return Tokenizer(data, "").encode_text(words, MAX_CHARACTERS + MAX_VOCABULARY)
    except RequestRejectedError as error:
        raise ModelLoadError(f"{folder.name}: the text cannot be encoded: {error}") from error


if __name__ == "__main__":
    # Not by an orderly end, in which torch would import what the list does not allow.
    leave(main(sys.argv[1:]))
