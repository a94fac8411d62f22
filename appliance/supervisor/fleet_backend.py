"""What the bits of an engine's KV depend on beside model and tokens, as one digest: hosts of one digest may share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from appliance.common.version import VERSION
from engine.config import EngineConfig
from isolation.gvisor.cpuid import processor

_PLACES = frozenset(
    {
        *("model_dir", "kernels", "gpu_kernels", "adapters", "form"),
        *("kv_bytes", "adapter_bytes", "max_context", "max_num_seqs", "max_num_batched_tokens", "max_waiting"),
        *("gpu_share", "prefix_caching", "spill", "step_us"),
    }
)
"""Fields of an engine's configuration that name places, sizes and queues: they change no bit of a block. All others,
a new one too, are in the digest. The form is there as the engine says it has chosen it."""


def backend_digest(configuration: bytes, ready: Mapping[str, int], card: str) -> bytes:
    """Return the digest for an engine.

    Args:
        configuration: what it was configured with.
        ready: numbers that it reported when it was ready; ``form`` is that of its kernels.
        card: description of its GPU; empty on the processor.
    """
    fields = asdict(EngineConfig.from_json(configuration))
    told = {name: value for name, value in sorted(fields.items()) if name not in _PLACES}
    parts = (VERSION, json.dumps(told, sort_keys=True), str(ready.get("form", 0)), card, processor())
    digest = hashlib.sha256(b"athanor fleet backend 1\x00")
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
