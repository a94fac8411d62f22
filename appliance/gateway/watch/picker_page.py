"""Gauges that an endpoint picker of the Gateway API inference extension reads, under the names of vLLM, which are its
defaults: queued and running requests, the share of KV that is held, adapters of requests. For the metrics listener.

A picker asks each host many times a second, so a page is made of some numbers without a rendering of all metrics. A
series has no label of a model: a picker takes one value of each family, and asks for one model by the page's path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from appliance.gateway.request.lifecycle import Lifecycle
from appliance.gateway.request.service import GatewayService
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.watch.definitions import kv_blocks

MAX_ADAPTERS = 128
"""Names of adapters in one label: as many as a model may have."""

QUEUED = "vllm:num_requests_waiting"
RUNNING = "vllm:num_requests_running"
KV_USAGE = "vllm:kv_cache_usage_perc"
CACHE = "vllm:cache_config_info"
ADAPTERS = "vllm:lora_requests_info"
"""Names of the families, as the picker's flags have them where none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerFigures:
    """Numbers of one page."""

    queued: int
    """Requests that have not begun in an engine: they wait for the policy, for a sandbox or inside an engine."""
    running: int
    """Requests that an engine computes."""
    kv_usage: float
    """Share of the KV blocks that requests hold, 0 to 1, in the pool where it is largest."""
    block_tokens: int
    """Tokens of a KV block; 0 where there is no pool, or pools differ."""
    blocks: int
    """KV blocks of all pools together."""
    max_adapters: int
    """Adapters in memory."""
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    at: float
    """Unix time of the figures."""


def figures(sandboxes: Iterable[ModelSandboxes], requests: Collection[Lifecycle], now: float) -> PickerFigures:
    """Return the numbers of these sandboxes and of the requests for their models."""
    engines = [one.engine for one in sandboxes if one.engine is not None]
    pools = [kv_blocks(engine) for engine in engines]
    sizes = {engine.ready.block_size for engine in engines}
    begun = [life for life in requests if life.outcome.started]
    ahead = [life for life in requests if not life.outcome.started]
    return PickerFigures(
        queued=len(ahead),
        running=len(begun),
        kv_usage=max((pool.held / pool.total for pool in pools if pool.total), default=0.0),
        block_tokens=sizes.pop() if len(sizes) == 1 else 0,
        blocks=sum(pool.total for pool in pools),
        max_adapters=sum(engine.ready.adapters for engine in engines),
        running_adapters=_adapters(begun),
        waiting_adapters=_adapters(ahead),
        at=now,
    )


def page(found: PickerFigures) -> str:
    """Return the page in Prometheus' text format."""
    return "".join(_families(found))


def picker_page(service: GatewayService, clock: Callable[[], float] = time.time) -> Callable[[str], str | None]:
    """Return what renders the page of a model, or of all together where the name is empty; None for no such model."""

    def render(model: str) -> str | None:
        if model and model not in service.model_sandboxes:
            return None
        every = (*service.model_sandboxes.values(), *service.tenant_sandboxes.resident)
        sandboxes = [one for one in every if not model or one.name == model]
        requests = [life for life in service.live if not model or life.call.model == model]
        return page(figures(sandboxes, requests, clock()))

    return render


def _adapters(requests: Iterable[Lifecycle]) -> tuple[str, ...]:
    return tuple(sorted({life.call.adapter for life in requests if life.call.adapter})[:MAX_ADAPTERS])


def _families(found: PickerFigures) -> Iterator[str]:
    yield _family(QUEUED, "Requests that wait.", "", found.queued)
    yield _family(RUNNING, "Requests that run.", "", found.running)
    yield _family(KV_USAGE, "Share of the KV blocks that requests hold, 0 to 1.", "", round(found.kv_usage, 6))
    if found.block_tokens:
        labels = f'{{block_size="{found.block_tokens}",num_gpu_blocks="{found.blocks}"}}'
        yield _family(CACHE, "Tokens of a KV block, and the number of blocks.", labels, 1)
    if found.max_adapters:
        running, waiting = (",".join(names) for names in (found.running_adapters, found.waiting_adapters))
        labels = (
            f'{{max_lora="{found.max_adapters}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"}}'
        )
        yield _family(ADAPTERS, "Adapters of requests; the value is the Unix time.", labels, round(found.at, 3))


def _family(name: str, meaning: str, labels: str, value: float) -> str:
    return f"# HELP {name} {meaning}\n# TYPE {name} gauge\n{name}{labels} {value}\n"
