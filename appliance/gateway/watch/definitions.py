"""The definition of each number that status, top, console and metrics show, in one place. Pure.

``docs/observability.md`` has the list in words. Every surface takes its numbers from here, or from the values that are
made here, and computes none by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.common.status import ApplianceLoad, Counts, KvView, ModelView, Rates, SandboxStatus
from appliance.gateway.sandboxes.engine_link import EngineLink

RATE_WINDOW_S = 10.0
"""Seconds that rates are of, at least: short enough to follow a load, long enough that one request more or less does
not make it jump. While the gateway is younger, all its life."""


def running(engine: EngineLink | None) -> int:
    """Count the requests in the engine's last step, those that have ended since left out."""
    return min(engine.stats.running, len(engine.live)) if engine is not None else 0


def waiting(engine: EngineLink | None) -> int:
    """Count the requests that waited inside the engine at its last step, those that have ended since left out."""
    return min(engine.stats.waiting, len(engine.live) - running(engine)) if engine is not None else 0


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Blocks of one KV pool. Every block is either held by requests or free."""

    total: int
    free: int
    """Blocks that a request can have: empty, or cached and evictable."""
    cached: int
    """Part of the free blocks whose content a later request may find."""

    @property
    def held(self) -> int:
        """Blocks that requests hold."""
        return self.total - self.free


def kv_blocks(engine: EngineLink) -> KvBlocks:
    """Return the blocks of an engine's pool: free ones as its last step said, cached ones as its accounts last said,
    which is a moment later or earlier."""
    total = engine.ready.num_blocks
    free = min(engine.stats.free_blocks, total)
    cached = sum(max(0, use.resident - use.held) for use in engine.kv.uses)
    return KvBlocks(total, free, min(cached, free))


def held_share(models: Iterable[KvView | None]) -> float:
    """Return the share of all KV blocks that requests hold, 0 to 1; 0 where there is no pool."""
    pools = [one for one in models if one is not None]
    blocks = sum(one.blocks for one in pools)
    return (blocks - sum(one.free for one in pools)) / blocks if blocks else 0.0


def rates(before: Counts, after: Counts, seconds: float) -> Rates:
    """Return what was added in so many seconds, for each of them; zeros where no time has passed."""
    if seconds <= 0:
        return Rates()
    return Rates(
        over_s=seconds,
        requests=(after.requests - before.requests) / seconds,
        refused=(after.refused - before.refused) / seconds,
        input_tokens=(after.input_tokens - before.input_tokens) / seconds,
        output_tokens=(after.output_tokens - before.output_tokens) / seconds,
    )


def load(models: Iterable[ModelView], counts: Counts, found: Rates, *, in_flight: int, up_s: float) -> ApplianceLoad:
    """Return the sums over all models, tenants' own ones among them."""
    views = tuple(models)
    pools = [view.kv for view in views if view.kv is not None]
    boxes = [box for view in views for box in view.sandboxes]
    blocks, free = sum(pool.blocks for pool in pools), sum(pool.free for pool in pools)
    return ApplianceLoad(
        up_s=up_s,
        running=sum(view.running for view in views),
        waiting=sum(view.waiting for view in views),
        in_flight=in_flight,
        requests=counts.requests,
        counts=counts,
        rates=found,
        kv_blocks=blocks,
        kv_held=blocks - free,
        kv_free=free,
        kv_cached=sum(pool.cached for pool in pools),
        sandboxes=len(boxes),
        sandboxes_ready=sum(map(is_ready, boxes)),
        restarts=sum(box.restarts for box in boxes),
    )


def is_ready(box: SandboxStatus) -> bool:
    """Return whether a sandbox is there and does not hang; a frozen one answers once it is thawed."""
    return box.state == "ready"
