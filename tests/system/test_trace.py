"""A slice of a real trace through the whole appliance: counts, not times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.operator.bench.client import Client
from appliance.operator.bench.metrics import Figures, figures
from appliance.operator.bench.run import play
from appliance.operator.bench.workload import Load, Planned, Shape, parse_load, plan
from appliance.operator.cli.bench_target import KV_BLOCK, own_appliance
from tests.appliance.operator.bench.prefix_bound import prefix_bound
from tests.system.conftest import as_demos

pytestmark = pytest.mark.runsc


async def _played(url: str, model: str, keys: tuple[str, ...], plans: list[Planned]) -> Figures:
    """The requests one after another, so that every prefix that can be known is known."""
    warm = [Planned(0, tenant, (9, 8, 9, 8), 1) for tenant in range(len(keys))]
    return figures(await play(Client(url, model, keys), parse_load("closed:1"), plans, warm))


@pytest.mark.full
@pytest.mark.parametrize("requests", [16, 40])
async def test_prefixes_are_reused_up_to_the_bound_and_never_across_tenants(
    shared_data: Path, runsc_path: Path, requests: int
) -> None:
    """Requests of the scaled Mooncake trace: none fails, and a tenant finds exactly what a cache of its own could
    know. The same hash ids dealt out to two tenants are the same tokens, and yet neither finds the other's: each finds
    its own bound, and a further request with the other's whole prompt finds nothing."""
    load: Load = parse_load(f"trace:{shared_data}/traces/mooncake_conv_scaled64_600.jsonl,requests={requests}")

    def adjust(_state: Path, config: dict[str, Any]) -> None:
        config["sandbox"] |= as_demos()

    with own_appliance(shared_data / "models" / "stories260K-hf", 64 << 20, "auto", adjust=adjust) as target:
        shared = plan(load, Shape(), tenants=2, seed=1)
        found = await _played(target.url, target.model, target.api_keys, shared)
        assert found.failures == {} and found.requests == requests
        assert found.output_tokens == sum(one.output_tokens for one in shared)
        bounds = {tenant: prefix_bound(shared, KV_BLOCK, keep=[tenant]) for tenant in (0, 1)}
        assert {tenant: row["cached_tokens"] for tenant, row in found.by_tenant.items()} == bounds
        alone = plan(load, Shape(), tenants=1, seed=2)
        assert prefix_bound(alone, KV_BLOCK) > sum(bounds.values())
        found = await _played(target.url, target.model, target.api_keys[:1], alone)
        assert (found.failures, found.cached_tokens) == ({}, prefix_bound(alone, KV_BLOCK))
        crossed = Planned(0, 1, alone[-1].prompt, 1)
        assert len(crossed.prompt) > KV_BLOCK
        for expected in (0, (len(crossed.prompt) - 1) // KV_BLOCK * KV_BLOCK):
            found = await _played(target.url, target.model, target.api_keys, [crossed])
            assert (found.failures, found.cached_tokens) == ({}, expected)
