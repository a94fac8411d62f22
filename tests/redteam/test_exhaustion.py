"""Sandboxes that take all they can get: the host starts programs beside them, keeps its size, and nothing is left."""

from __future__ import annotations

import pytest

from appliance.selftest import exhaustion
from isolation.gvisor.gvisor_runtime import GvisorRuntime

pytestmark = pytest.mark.runsc


QUICK = ("forks", "memory", "descriptors", "output")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.full]) for kind in exhaustion.KINDS]
)
def test_the_host_does_not_notice(gvisor: GvisorRuntime, kind: str) -> None:
    """Forks, threads, memory, descriptors, scratch files, output, processor: each takes something and is stopped."""
    if kind == "memory" and "memory" not in gvisor.cgroups.enforced:
        pytest.skip(gvisor.cgroups.describe())
    taken = exhaustion.take(kind, gvisor)
    assert taken.harmless, taken
    assert taken.said != "took 0", "the control: it does take"
