"""Compiles a model's GPU kernels ahead of serving, without a GPU: a program of its own.

    python -m engine.startup.enumerate_kernels '{"root": ..., "model_dir": ..., "architecture": "sm_90", ...}'

``athanor kernels gpu`` runs it where the compilers are, never beside a serving engine. One line for each kernel goes to
standard output, then one line of JSON.

A compiled kernel is one *form* of its source: types of its arguments, numbers that are fixed when it is compiled, and
which addresses and numbers are multiples of 16. The forms that serving needs follow from the model's shapes and from
the buckets of lanes and chunks, and from nothing that a request brings. ``rehearse`` takes the device backend's own
code through all of them with memory that has no contents (torch's ``meta`` device), and
``engine.backends.cuda.kernels.ahead`` compiles each launch. ``engine.backends.cuda.runtime.launch_digest`` names the
result.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields, replace
from itertools import product

import numpy as np
import torch

from engine.backends.common.loading import layout_for, limits_for
from engine.backends.cuda.kernels.ahead import CompileRequest, build
from engine.backends.cuda.load import make_device_runner
from engine.backends.cuda.runtime.launches import buckets
from engine.backends.cuda.runtime.operations import Operations
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.config import EngineConfig
from engine.core.scheduler.plan import Chunk
from engine.errors import ConfigurationError, EngineError
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import build_model
from engine.startup.load import check_config

EXIT_REFUSED = 3
"""The request cannot be compiled; the reason is on standard error."""

KV_BYTES = 1 << 34
"""Bytes of the cache that is rehearsed with: room for a few blocks of any model. No form depends on it, and it takes no
memory."""

MANY_TOKENS = 64
"""Tokens of a step that no kernel for few rows computes."""

MOST_TOKENS = 65_536
"""Tokens of the largest step that can be asked for: from some number on experts are multiplied in another way."""


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
    model, _ = build_model(description, dtype, torch.device("meta"), scaled=config.quantization == "fp8")
    # Whether an engine has palettes is no part of a folder's name.
    operations.launch_palettes(model)
    _start_all(make_device_runner(roomy, model, layout, limits, operations))


def _start_all(runner: DeviceRunner) -> None:
    """Steps of all buckets, prompts in every room for chunks, blocks made zero. Penalties, masks and the wish for
    log-probabilities are numbers of rows that the same launches read, and scored prompts more logits.

    What the runner is made of is taken by itself: a plan needs tokens that come back, and none do."""
    loop, prefill, storage, host = runner._loop, runner._prefill, runner.storage, runner._rows
    rows = runner.limits.max_num_seqs
    host.known[:] = [np.zeros(MOST_TOKENS, dtype=np.int64)] * rows
    with torch.inference_mode():
        for bucket in buckets(rows):
            loop.step(bucket)
        # Rooms for chunks are powers of two, and a step without a prompt that ends chooses no token.
        for count in sorted({rows, *(1 << place for place in range(rows.bit_length()))}):
            for last, scored in product((True, False), (0, 1)):
                # Of every chunk its second token is scored, or there is none; who asks for that, asks for reports here.
                host.asked.fill(scored - 1)
                prefill.run([Chunk(row, 0, 1 + scored, last, 1, scored) for row in range(count)])
        # Few tokens, many and very many are computed by different kernels.
        host.asked.fill(-1)
        for count in (MANY_TOKENS, MOST_TOKENS):
            prefill.run([Chunk(0, 0, count, True, 1, 0)])
        storage.zero(torch.zeros(1, dtype=torch.int64, device=storage.device))


def _read(said: str) -> CompileRequest:
    kinds = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(CompileRequest)}
    try:
        values = json.loads(said)
    except ValueError as error:
        raise ConfigurationError("the request is not JSON") from error
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise ConfigurationError("the request has unknown or missing keys")
    if any(type(values[name]) is not kind for name, kind in kinds.items()):
        raise ConfigurationError("the request has values of another type")
    return CompileRequest(**values)


def main(argv: list[str]) -> int:
    """Compile what the one argument asks for; gives the exit status."""
    try:
        done = build(_read(argv[0]), rehearse)
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_REFUSED
    print(json.dumps(asdict(done)))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
