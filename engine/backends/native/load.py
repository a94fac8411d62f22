"""Loader of the compiled kernels."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch

from engine.backends.common.loading import Loaded, LoadSource, load_on_host, sizes
from engine.backends.common.storage import KvStorage
from engine.backends.native.library import UnusableKernelsError, open_libraries
from engine.backends.native.manifest import COMPRESSED, PLAIN
from engine.backends.native.plain_form import check_supported
from engine.backends.native.program import NativeModel
from engine.backends.native.trial import Candidate, Heads, try_forms
from engine.config import EngineConfig
from engine.core.scheduler.limits import SchedulerLimits
from engine.model.layers.decoder import Decoder

KEPT = "the fastest when this machine tried its forms"
"""Reason for a form that was not tried at this start."""


def supports(config: EngineConfig, model: Decoder) -> str:
    """Why the kernels do not compute a model; empty when they do."""
    layout, limits = sizes(config, model)
    try:
        check_supported(model, limits.max_context)
    except UnusableKernelsError as error:
        return str(error)
    if model.bank is not None and model.bank.numbers and config.quantization == "int8":
        return "they compute no adapters beside int8"
    if len(layout.tables) > 1:
        return "they read one block table; this model has one for each reach"
    return ""


def load(source: LoadSource) -> Loaded:
    """Open the kernels and build the backend around the weights.

    Raises:
        UnusableKernelsError: none were given, they are of another build or processor, they refuse this model, or plain
            operations are faster.
    """
    config = source.config
    if not config.kernels:
        raise UnusableKernelsError("none were given")
    model = source.model
    if model.device.type != "cpu":
        raise UnusableKernelsError(f"they compute on the processor, and the weights are on {model.device.type}")
    reason = supports(config, model)
    if reason:
        raise UnusableKernelsError(reason)
    # Only sampling is left to tensor operations; a second pool of threads would slow the kernels' own down.
    torch.set_num_threads(1)
    try:
        choice = choose(config, model, sizes(config, model)[1])
        source.form = choice.form.name
        return load_on_host(source, partial(make_forward, config, model, choice))
    except UnusableKernelsError:
        torch.set_num_threads(config.threads)
        raise


@dataclass(frozen=True, slots=True)
class Choice:
    """The form in which a model is computed, and why, for people."""

    form: Candidate
    reason: str


def choose(config: EngineConfig, model: Decoder, limits: SchedulerLimits) -> Choice:
    """The form that was chosen before on this machine if it can be had, else the fastest in a trial.

    Raises:
        UnusableKernelsError: no library can be opened.
    """
    kept = _kept_form(config)
    if kept is not None:
        return Choice(kept, KEPT)
    layer = check_supported(model, limits.max_context)[0]
    trial = try_forms(
        # Only the best library: two engines without a remembered form must not differ in their last bits by noise.
        islice(open_libraries(config.kernels), 1),
        (layer.qkv, layer.out, layer.gate_up, layer.down),
        Heads(model.config.num_heads, model.config.num_kv_heads, model.config.head_dim),
        most_rows=limits.max_num_seqs,
        int8=config.quantization == "int8",
    )
    return Choice(trial.best, str(trial))


def make_forward(
    config: EngineConfig, model: Decoder, choice: Choice, storage: KvStorage, limits: SchedulerLimits
) -> NativeModel:
    """The program over a storage, in the chosen form; takes the model's matrices over.

    Raises:
        UnusableKernelsError: plain operations were chosen, or the threads cannot be had.
    """
    form = choice.form
    if form.library is None:
        raise UnusableKernelsError(f"they are slower here: {choice.reason}")
    library, int8 = form.library.started(config.threads), config.quantization == "int8"
    return NativeModel(library, model, storage, limits, int8=int8, compressed=form.compressed, reason=choice.reason)


def _kept_form(config: EngineConfig) -> Candidate | None:
    if config.form == PLAIN:
        return Candidate(PLAIN, None)
    variant = config.form.removesuffix(COMPRESSED)
    if variant:
        with suppress(UnusableKernelsError):
            return Candidate(config.form, next(open_libraries(config.kernels, variant)), variant != config.form)
    return None
