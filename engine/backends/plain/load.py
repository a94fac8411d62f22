"""Loaders of the plain path: models that give tokens, vectors, or a number for each label."""

from __future__ import annotations

from dataclasses import replace

from engine.backends.common.loading import Loaded, LoadSource, load_on_host, sizes, weight_form
from engine.backends.common.storage import KvStorage
from engine.backends.plain.embedding import EmbeddingRunner
from engine.backends.plain.forward import PlainForward
from engine.config import EngineConfig
from engine.model.layers.decoder import Decoder
from engine.model.layers.pooling import Pooling, PoolingMode, read_pooling


def load(source: LoadSource) -> Loaded:
    """Pack the weights and build the backend around them."""
    return load_on_host(source, lambda storage, _: make_forward(source.config, source.model, storage, source.refused))


def load_embedding(source: LoadSource) -> Loaded:
    """Build the backend that gives vectors, without prefix caching: cached tokens would be missing from a mean."""
    return _load_pooled(source, read_pooling(source.config.pooling, source.config.model_dir))


def load_classifier(source: LoadSource) -> Loaded:
    """Build the backend that gives a number for each label of a classifier."""
    return _load_pooled(source, Pooling(PoolingMode.LAST, False), labelled=True)


def _load_pooled(source: LoadSource, pooling: Pooling, *, labelled: bool = False) -> Loaded:
    config, model = source.config, source.model
    layout, limits = sizes(config, model)
    room = layout.capacity(config.max_num_batched_tokens) - 1
    # A text is followed by one token of no meaning, which takes no KV.
    context = min(config.max_context, model.config.max_positions, room) + 1
    limits = replace(limits, max_context=context, eos_ids=frozenset(), prefix_caching=False)
    storage = KvStorage(layout, max_context=limits.max_context, dtype=model.dtype, device=model.device)
    if not model.packed:
        model.pack(int8=config.quantization == "int8")
    runner = EmbeddingRunner(model, storage, limits, pooling, model.labels if labelled else None)
    weights = weight_form(model.dtype, int8=config.quantization == "int8")
    return Loaded(backend=runner, vectors=runner, weights=weights)


def make_forward(
    config: EngineConfig, model: Decoder, storage: KvStorage, refused: str = "none were tried"
) -> PlainForward:
    """The forward pass over a storage; packs the model if that has not been done.

    ``refused``: why compiled kernels do not compute it.
    """
    if not model.packed:
        model.pack(int8=config.quantization == "int8")
    return PlainForward(model, storage, f"plain operations; no compiled kernels: {refused}")
