"""What a model needs of the machine's memory, by the sizes of its files: the host opens no model, so all of it is
about, or at least. Pure but for ``files_bytes`` and ``machine_memory``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.common.catalog import SAFETENSORS, NamedFiles
from appliance.common.config import ModelConfig
from appliance.common.figures import size
from appliance.common.model_shape import read_shape

ENGINE_BYTES = 320 << 20
"""Bytes of an engine without a model: interpreter and torch (measured 220 MiB), gVisor's own kernel."""

RANK_BYTES = 240 << 20
"""Bytes of each further process of an engine without its part of the model: interpreter and torch."""

CARD_ENGINE_BYTES = 2 << 30
"""Bytes of host memory of an engine on a GPU, its weights and KV being the card's: CUDA's libraries and its page-locked
memory. An estimate, which no card has confirmed."""

LEAST_WEIGHT_SHARE = 0.25
"""Least part of its files that a model's weights can take in memory: float32 rounded to 8 bits."""

MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Memory:
    """The machine's memory in bytes."""

    total: int
    available: int
    """What a new program can have without swapping, as the kernel estimates it."""


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """Memory of one model's engine, in bytes."""

    name: str
    weights: int
    """Weights as they are held."""
    stored: int
    """Weights as they are in their files."""
    kv: int
    adapters: int = 0
    """Most that its adapters may take."""
    engine: int = ENGINE_BYTES
    """The engine without a model."""

    @property
    def about(self) -> int:
        """All of it."""
        return self.engine + self.kv + self.weights + self.adapters

    @property
    def least(self) -> int:
        """What it takes in any form of the weights."""
        return self.kv + int(self.stored * LEAST_WEIGHT_SHARE)

    def words(self) -> str:
        """The sum with its parts, for people."""
        adapters = f"adapters {size(self.adapters)}, " if self.adapters else ""
        parts = f"weights {size(self.weights)}, KV {size(self.kv)}, {adapters}the engine itself {size(self.engine)}"
        return f"about {size(self.about)} ({parts})"


def model_need(model: ModelConfig, files: NamedFiles, *, on_card: bool = False) -> ModelNeed:
    """Need of a model with these files. With ``on_card`` weights and KV are in a card's memory, and pass through the
    host's in pieces."""
    if model.runner in ("null", "external"):
        return ModelNeed(model.name, 0, 0, 0)
    if on_card:
        return ModelNeed(model.name, 0, 0, 0, engine=CARD_ENGINE_BYTES)
    stored = files_bytes(files)
    held = stored // 2 if model.weights == "int8" else stored
    adapters = model.adapter_bytes if model.adapters else 0
    engine = ENGINE_BYTES + (model.ranks - 1) * RANK_BYTES
    if model.ranks > 1:
        held += again_bytes(model, stored)
    return ModelNeed(model.name, held, stored, model.kv_bytes, adapters, engine)


def again_bytes(model: ModelConfig, stored: int) -> int:
    """Bytes of weights that further ranks hold once more: all but experts where experts alone are dealt, and an
    embedding that is the head too where the layers are cut into stages. 0 where the shape cannot be read."""
    shape = read_shape(model.folder)
    if shape is None:
        return 0
    again, item = 0, shape.item("auto")
    if model.expert_parallel > 1 and model.tensor_parallel == 1:
        experts = shape.layers * shape.expert_count * 3 * shape.hidden * shape.expert_width * item
        again = (model.expert_parallel - 1) * max(0, stored - experts)
    if model.pipeline_parallel > 1 and shape.tied:
        # Ranks that share layers share the head; each of those that deal experts alone has all of it.
        heads = model.expert_parallel if model.tensor_parallel == 1 else 1
        again += heads * shape.vocabulary * shape.hidden * item
    return again


def files_bytes(files: NamedFiles) -> int:
    """Bytes of the weight files."""
    return sum(path.stat().st_size for name, path in files if name.endswith(SAFETENSORS))


def no_room(
    needs: Iterable[ModelNeed], limit: int, free: int, *, asleep: Collection[str] = (), most: int = 0
) -> dict[str, str]:
    """Why models cannot be added, by name; empty where all can.

    Args:
        needs: of the models.
        limit: bytes that one engine's sandbox may have.
        free: bytes that all together may take, but for those that begin asleep.
        asleep: names of those, which take nothing before they are woken.
        most: bytes that each of them can have then.
    """
    found, left = {}, free
    for need in needs:
        if need.least > limit:
            found[need.name] = (
                f"needs at least {size(need.least)}, and an engine's sandbox may have {size(limit)}; "
                f"a larger sandbox.memory_bytes, a smaller kv_bytes or weights: int8"
            )
        elif need.name in asleep:
            if need.about > most:
                found[need.name] = (
                    f"needs {need.words()} once it is woken, and {size(max(0, most))} can be had then; "
                    f"a smaller kv_bytes, weights: int8, or first stop another model"
                )
            continue
        elif need.about > left:
            found[need.name] = (
                f"needs {need.words()}, and {size(max(0, left))} of the machine's memory are free; "
                f"a smaller kv_bytes, weights: int8, or first stop another model"
            )
        left -= need.about
    return found


def read_meminfo(text: str) -> Memory:
    """Out of proc(5)'s /proc/meminfo."""
    found = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return Memory(found.get("MemTotal", 0), found.get("MemAvailable", 0))


def machine_memory() -> Memory:
    """Memory of this machine, now."""
    return read_meminfo(MEMINFO.read_text())
