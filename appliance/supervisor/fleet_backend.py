"""What the bits of an engine's KV depend on beside model and tokens, as one digest: hosts of one digest may share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from appliance.common.version import VERSION
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


def backend_digest(configuration: bytes, ready: Mapping[str, int]) -> bytes:
    """Return the digest for an engine on the processor; nothing tells yet what the bits of one on a GPU depend on.

    Args:
        configuration: what it was configured with (``engine.config.EngineConfig``).
        ready: numbers that it reported when it was ready; ``form`` is that of its kernels.
    """
    fields = json.loads(configuration)
    told = {name: value for name, value in fields.items() if name not in _PLACES}
    parts = (VERSION, json.dumps(told, sort_keys=True), str(ready.get("form", 0)), processor())
    digest = hashlib.sha256(b"athanor fleet backend 1\x00")
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
