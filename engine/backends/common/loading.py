"""What a backend is loaded from, what its loader gives, and the sizes that configuration, model and memory allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from engine.backends.common.host_runner import Forward, HostRunner
from engine.backends.common.spill_content import BlockContent
from engine.backends.common.storage import KvStorage
from engine.config import EngineConfig
from engine.core.backend import Backend, VectorSource
from engine.core.kv.groups import divide
from engine.core.kv.layout import MIN_BLOCKS, KvLayout, fit_layout
from engine.core.kv.leaving import Contents
from engine.core.scheduler.limits import SchedulerLimits
from engine.errors import ConfigurationError
from engine.model.adapters.bank import AdapterBank, AdapterSource
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.safetensors import OpenCodec
from engine.model.checkpoint.weights import load_model
from engine.model.coded.codec import open_numpy_codec
from engine.model.layers.decoder import Decoder
from engine.model.layers.parallel import ALONE, Parallel, Span
from isolation.ipc.messages import WeightForm


@dataclass(kw_only=True)
class LoadSource:
    """Configuration, description and weights of the model that an engine is loaded for."""

    config: EngineConfig
    description: ModelConfig
    device: str = ""
    """Where the weights go, as torch names it; empty: the loader decides."""
    parallel: Parallel = ALONE
    """Which part of the model this rank holds."""
    given: Decoder | None = None
    """The model when it is in memory already, not yet packed; None: it is on disk."""
    refused: str = ""
    """Why the loader that was tried before this one refused; empty when there was none."""
    open_codec: OpenCodec = open_numpy_codec
    """Gives what decodes coded tensors."""
    form: str = ""
    """Form that a loader chose among several (``engine.backends.native.manifest.FORMS``); empty: none had to choose."""

    @cached_property
    def model(self) -> Decoder:
        """The whole model, read into host memory and not packed.

        Raises:
            ModelLoadError: the files cannot be used.
        """
        if self.given is not None:
            return self.given
        model = load_model(
            self.config.model_dir,
            self.description,
            dtype=self.config.dtype,
            device=torch.device(self.device or "cpu"),
            packed=False,
            headless=self.config.headless,
            parallel=self.parallel,
            open_codec=self.open_codec,
        )
        if self.config.adapters and self.parallel.ranks == 1 and self.config.runner == "model":
            load_adapters(model, self.config)
        return model


def load_adapters(model: Decoder, config: EngineConfig) -> None:
    """Read the adapters that a configuration names; the model's bank says which were refused. To be called before the
    model is packed."""
    sources = [AdapterSource(Path(folder), digest) for digest, folder in config.adapter_folders.items()]
    model.bank = AdapterBank(model.sites)
    model.bank.load(sources, dtype=model.dtype, most_bytes=config.adapter_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Numeric form in which a host backend computes a model: what its memory depends on."""

    dtype: torch.dtype
    int8: bool = False
    operand_bytes: int = 0
    """Bytes of a number that kernels' products are fed; 0: plain operations compute."""
    compresses: bool = False
    """Whether the kernels compress bfloat16; the estimate assumes usual weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A loaded backend, and the parts of it that other stages of an engine use."""

    backend: Backend
    content: Contents | None = None
    """Reads and writes whole blocks, where ``Capabilities.spill`` holds."""
    vectors: VectorSource | None = None
    """Where vectors are left, where ``Capabilities.embed`` holds."""
    bank: AdapterBank | None = None
    """Adapters, where ``Capabilities.adapters`` holds."""
    form: Form | None = None
    """What ``engine.startup.memory_estimate`` needs; None where it makes no estimate."""
    weights: WeightForm = WeightForm.UNKNOWN
    """Form in which the backend holds the weights."""


@dataclass(frozen=True, slots=True)
class Loader:
    """How one backend is loaded: a row of ``engine.startup.backends_table``."""

    load: Callable[[LoadSource], Loaded]
    """Reads the weights and builds the backend around them. Raises ``UnsupportedError`` where another backend may run
    the model, ``ConfigurationError`` and ``ModelLoadError`` where none is tried after it."""
    supports: Callable[[EngineConfig, Decoder], str] = lambda _config, _model: ""
    """Why this backend does not compute a model; empty when it does."""


MakeForward = Callable[[KvStorage, SchedulerLimits], Forward]


def load_on_host(source: LoadSource, make: MakeForward) -> Loaded:
    """A backend with its KV memory in host memory; ``make`` makes the forward pass over a storage."""
    config, model = source.config, source.model
    layout, limits = sizes(config, model)
    storage = KvStorage(layout, max_context=limits.max_context, dtype=model.dtype, device=model.device)
    runner = HostRunner(make(storage, limits), storage, limits)
    form = form_of(config, runner)
    weights = weight_form(form.dtype, int8=form.int8, compresses=form.compresses)
    return Loaded(backend=runner, content=BlockContent(storage), bank=model.bank, form=form, weights=weights)


def form_of(config: EngineConfig, runner: HostRunner) -> Form:
    """Numeric form of a host backend."""
    return Form(
        dtype=runner.model.dtype,
        int8=config.quantization == "int8",
        operand_bytes=runner.forward.operand_bytes,
        compresses=runner.forward.compresses,
    )


_OF_DTYPE = {torch.float32: WeightForm.FLOAT32, torch.bfloat16: WeightForm.BF16, torch.float16: WeightForm.FP16}


def weight_form(
    dtype: torch.dtype, *, int8: bool = False, fp8: bool = False, palettes: bool = False, compresses: bool = False
) -> WeightForm:
    """Form of the weights of a backend.

    Args:
        dtype: in which the model computes.
        int8: whether they are rounded to 8-bit integers.
        fp8: whether they are rounded to 8-bit floating point.
        palettes: whether products are taken from palettes.
        compresses: whether kernels compress bfloat16.
    """
    if int8 or fp8:
        return WeightForm.INT8 if int8 else WeightForm.FP8
    if palettes:
        return WeightForm.PALETTE
    return WeightForm.COMPRESSED if compresses and dtype == torch.bfloat16 else _OF_DTYPE[dtype]


def sizes(config: EngineConfig, model: Decoder) -> tuple[KvLayout, SchedulerLimits]:
    """KV layout and bounds of a loaded model."""
    layout = layout_for(config, model.config, dtype_name(model.dtype), model.parallel)
    limits = limits_for(config, model.config, layout)
    return layout, limits if model.bank is None else replace(limits, adapters=model.bank.numbers)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in configurations and layouts."""
    return str(dtype).removeprefix("torch.")


def layout_for(config: EngineConfig, model: ModelConfig, dtype: str, parallel: Parallel = ALONE) -> KvLayout:
    """KV layout of a model, or of this rank's part of it, under a configuration."""
    groups = divide(model.kv_layers, config.block_size, min(config.max_context, model.max_positions))
    one = partial(KvLayout, block_size=config.block_size, dtype=dtype, num_blocks=1, groups=groups)

    def block_bytes(layers: Span | None) -> int:
        return one(layers=replace(parallel, layers=layers).kv_layers(model.kv_layers)).block_bytes

    kv_bytes = config.kv_bytes
    if parallel.ranks > 1:
        # Of all ranks together: each has the same number of blocks, with its own heads and layers.
        everywhere = parallel.width * sum(map(block_bytes, parallel.stages or (parallel.layers,)))
        if kv_bytes < (MIN_BLOCKS + 1) * everywhere:
            raise ConfigurationError(
                f"kv_bytes is {kv_bytes}: too small for {MIN_BLOCKS} blocks of this model on {parallel.ranks} ranks; "
                f"give at least {(MIN_BLOCKS + 1) * everywhere}"
            )
        kv_bytes = kv_bytes // everywhere * block_bytes(parallel.layers)
    return fit_layout(
        kv_bytes=kv_bytes,
        layers=parallel.kv_layers(model.kv_layers),
        block_size=config.block_size,
        dtype=dtype,
        groups=groups,
    )


def limits_for(config: EngineConfig, model: ModelConfig, layout: KvLayout) -> SchedulerLimits:
    """Bounds of the configuration, cut to what model and memory allow."""
    return SchedulerLimits(
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        max_context=min(config.max_context, model.max_positions, layout.capacity(config.max_num_batched_tokens)),
        block_size=config.block_size,
        vocab_size=model.vocab_size,
        eos_ids=model.stop_ids,
        prefix_caching=config.prefix_caching,
        groups=layout.groups,
    )
