"""Starts every form of launch that serving can start, without weights, numbers or a GPU: what is compiled ahead.

A compiled kernel is one *form* of its source: types of its arguments, numbers that are fixed when it is compiled, and
which addresses and numbers are multiples of 16. The forms that serving needs follow from the model's shapes and from
the buckets of lanes and chunks, and from nothing that a request brings. A rehearsal takes the device backend's own code
through all of them with memory that has no contents (torch's ``meta`` device); whoever catches the launches knows the
forms. ``engine.device.configuration`` says by what they are known.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import torch

from engine.config import EngineConfig
from engine.device.build import make_device_runner
from engine.device.launches import buckets
from engine.device.operations import Operations
from engine.device.runner import DeviceRunner
from engine.load import check_config, layout_for, limits_for
from engine.model.config import ModelConfig
from engine.model.registry import build_model
from engine.scheduler.plan import Chunk

KV_BYTES = 1 << 34
"""Of the cache that is rehearsed with: room for a few blocks of any model. No form depends on it, and it takes no
memory."""


def rehearse(config: EngineConfig, description: ModelConfig, dtype: torch.dtype, operations: Operations) -> None:
    """Start every form of launch once.

    Args:
        config: of the engine that will serve.
        description: the model's.
        dtype: of weights and activations.
        operations: what launches.

    Raises:
        ConfigurationError: the device backend does not compute this model, or a number is out of range.
    """
    check_config(config)
    roomy = replace(config, kv_bytes=KV_BYTES)
    layout = layout_for(roomy, description, str(dtype).removeprefix("torch."))
    limits = limits_for(roomy, description, layout)
    model, _ = build_model(description, dtype, torch.device("meta"))
    _start_all(make_device_runner(roomy, model, layout, limits, operations))


def _start_all(runner: DeviceRunner) -> None:
    """Steps of all buckets, prompts in every room for chunks, blocks made zero. Penalties, masks and the wish for
    log-probabilities are numbers of rows that the same launches read, and scored prompts more logits.

    What the runner is made of is taken by itself: a plan needs tokens that come back, and none do."""
    loop, prefill, storage, host = runner._loop, runner._prefill, runner.storage, runner._rows
    rows = runner.limits.max_num_seqs
    host.known = [np.zeros(2, dtype=np.int64)] * rows
    with torch.inference_mode():
        for bucket in buckets(rows):
            loop.step(bucket)
        # Rooms for chunks are powers of two, and a step without a prompt that ends chooses no token.
        for count in sorted({rows, *(1 << place for place in range(rows.bit_length()))}):
            for last, scored in product((True, False), (0, 1)):
                # Of every chunk its second token is scored, or there is none; who asks for that, asks for reports here.
                host.asked.fill(scored - 1)
                prefill.run([Chunk(row, 0, 1 + scored, last, 1, scored) for row in range(count)])
        storage.zero(torch.zeros(1, dtype=torch.int64, device=storage.device))
