"""What the host tells a sandbox about its work; stdlib only, since the host writes it and the guest reads it.

Both configurations travel as one JSON object in ``Configure``. Unknown keys, missing keys and wrong types are refused,
so that host and guest of different versions cannot half-understand each other.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from engine.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine sandbox needs to know besides the weights."""

    model_dir: str
    """Directory inside the sandbox with config.json, generation_config.json (if any) and the safetensors files."""
    model_digest: str
    """Hex digest of the model's files, computed by the host; root of every block hash."""
    dtype: str = "auto"
    """``auto`` (the checkpoint's own), ``float32``, ``bfloat16`` or ``float16``."""
    threads: int = 1
    """Compute threads: one fewer than the cores the sandbox has, at least one."""
    block_size: int = 16
    """Tokens in one KV block."""
    kv_bytes: int = 256 << 20
    """Bytes for the KV cache."""
    max_context: int = 32_768
    """Tokens of prompt and output; the model's own limit holds when it is lower."""
    max_num_seqs: int = 128
    """Sequences in one step."""
    max_num_batched_tokens: int = 512
    """Tokens in one step, prefill and decode together."""
    max_waiting: int = 1_024
    """Requests that may wait; one more fails at once as ``OVERLOADED``."""
    prefix_caching: bool = True
    runner: str = "model"
    """``model``; ``embed`` for one that gives vectors (``engine.backends.plain.embedding``); ``classify`` for one with
    a classification head, which gives a number for each label; or ``null``: no weights are read and ids are given by
    rule (``engine.backends.null``), for benchmarks."""
    step_us: int = 0
    """Microseconds that a step of the null runner takes at least."""
    kernels: str = ""
    """Directory inside the sandbox with kernels that were compiled for this architecture; empty for none."""
    form: str = ""
    """Form (``engine.backends.native.manifest.FORMS``) that an engine with the same model and kernels chose on this
    machine before; empty: the engine tries its forms. One that cannot be had is tried anew as well."""
    pooling: str = "auto"
    """How the embed runner makes one vector of a text: ``auto`` as the model's files say, ``last``, ``mean`` or
    ``cls``; these with ``+normalise`` for unit length."""
    quantization: str = "none"
    """``none``, or ``int8``: weights with a scale an output, activations with a scale a row. ``fp8``: the same in 8-bit
    floating point numbers (``engine.model.layers.scaled``), on the device backend alone."""
    backend: str = "auto"
    """``auto``: the device backend (``engine.backends.cuda.runtime``) where there is a GPU, else the plain loop;
    ``device``: that backend in any case; ``plain``: the plain loop on the CPU in any case."""
    gpu_kernels: str = ""
    """Directory inside the sandbox with kernels that were compiled for GPUs; empty: Triton compiles what it needs."""
    gpu_share: int = 0
    """Percent of a GPU's memory that an engine on one may hold: KV takes what weights and a reserve leave of it,
    whatever ``kv_bytes`` says. 0: ``kv_bytes`` holds there too."""
    palette: bool = False
    """Whether a GPU holds matrices of gated MLPs a second time, in three quarters of their bytes, and takes products of
    few rows from these where that is measured to be faster (``engine.backends.cuda.kernels.palette_choice``)."""
    tensor_parallel: int = 1
    """Processes of the engine that share each layer (``engine.ranks``); the program is started with ``ranks`` of
    them."""
    pipeline_parallel: int = 1
    """Stages into which the layers are cut, each of processes of its own."""
    expert_parallel: int = 1
    """Processes among which the experts of a layer are dealt, where they are others than those that share each layer; 1
    or ``tensor_parallel``: the same."""
    adapters: str = ""
    """JSON object from the digest of each adapter, in hex, to its folder inside the sandbox; empty for none."""
    adapter_bytes: int = 256 << 20
    """Bytes for adapters; one that does not fit in beside those before it is left out."""
    spill: bool = False
    """Whether the host takes blocks of KV that find no place: the engine then connects a second time, for those."""

    @property
    def ranks(self) -> int:
        """Processes of the engine."""
        return self.pipeline_parallel * max(self.tensor_parallel, self.expert_parallel)

    @property
    def headless(self) -> bool:
        """Whether the model's vocabulary projection is not needed."""
        return self.runner in ("embed", "classify")

    @property
    def adapter_folders(self) -> dict[bytes, str]:
        """Folder of each adapter's files, by digest.

        Raises:
            ConfigurationError: ``adapters`` is no such object.
        """
        try:
            values = json.loads(self.adapters) if self.adapters else {}
            return {bytes.fromhex(digest): str(folder) for digest, folder in values.items()}
        except (ValueError, AttributeError) as error:
            raise ConfigurationError("adapters is no object of digests and folders") from error

    def to_json(self) -> bytes:
        """The configuration as it travels."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> EngineConfig:
        """Read what ``to_json`` wrote.

        Raises:
            ConfigurationError: not a JSON object with exactly the known keys and types.
        """
        return cls(**_checked(cls, data))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Everything the text sandbox needs to know besides the tokenizer files."""

    model_dir: str
    """Directory inside the sandbox with tokenizer.json, tokenizer_config.json and, if any, chat_template.jinja."""
    render_limit_bytes: int = 8 << 20
    """Bytes a chat template may give."""
    wipe_memory: bool = False
    """Whether freed memory is to be overwritten (``isolation.ipc.sweeping``); needs the environment for that."""
    memory_bytes: int = 0
    """The sandbox's limit, where its own ``/proc/meminfo`` says what of it is used; else 0, and nobody looks."""

    def to_json(self) -> bytes:
        """The configuration as it travels."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TextConfig:
        """Read what ``to_json`` wrote.

        Raises:
            ConfigurationError: not a JSON object with exactly the known keys and types.
        """
        return cls(**_checked(cls, data))


def _checked(cls: type, data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except ValueError as error:
        raise ConfigurationError(f"configuration is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError("configuration is not a JSON object")
    kinds = {"str": str, "int": int, "bool": bool}
    known = {field.name: kinds[str(field.type)] for field in fields(cls)}
    if values.keys() != known.keys():
        odd = sorted(values.keys() ^ known.keys())
        raise ConfigurationError(f"configuration has unknown or missing keys: {', '.join(odd)}")
    for name, kind in known.items():
        if type(values[name]) is not kind:
            raise ConfigurationError(f"configuration key {name} is not {kind.__name__}")
    return values
