"""Bound of what any prefix cache can find in planned requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from appliance.operator.bench.workload import Planned


def prefix_bound(plans: Iterable[Planned], block: int, keep: Sequence[int] | None = None) -> int:
    """Prompt tokens that a cache of unlimited size, split by tenant, would have found: the bound of any server.

    The cache knows whole blocks of ``block`` tokens, of prompts in the order given, and never a whole prompt, since
    the last token has to be computed. ``keep`` limits the count to these tenants.
    """
    known: dict[int, set[int]] = {}
    found = 0
    for one in plans:
        blocks = known.setdefault(one.tenant, set())
        chain, hit, matching = 0, 0, True
        for end in range(block, len(one.prompt) + 1, block):
            chain = hash((chain, one.prompt[end - block : end]))
            matching = matching and chain in blocks
            if matching and end < len(one.prompt):
                hit = end
            blocks.add(chain)
        if keep is None or one.tenant in keep:
            found += hit
    return found
