"""G1 in the tiers outside of the engine sees what it looks for."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.selftest.g1_reuse import KINDS
from appliance.selftest.g1_spill import FORGED, TIERS, Tier, attach
from engine.core.kv import prefix_cache

PAIRS = 10 * (len(KINDS) + len(FORGED))


class Anybody(dict[bytes, str]):
    """Takes every namespace key for one tenant's."""

    def get(self, key: bytes, default: object = None) -> str:  # type: ignore[override]
        """Whose key this is."""
        return "one"


def attached(folder: Path, owners: dict[bytes, str], tier_name: str) -> tuple[int, int]:
    """Attaches in some pairs, with a supervisor that looks owners up there, and objects of which the store outside was
    asked while another looked for them."""
    tier = Tier(folder, owners, tier=tier_name, seed=5)
    try:
        found = attach(tier, PAIRS)
        return found.attached, found.asked
    finally:
        tier.close()


def without_namespace(real: Callable[..., bytes]) -> Callable[..., bytes]:
    """A hash of the tokens alone."""

    def block_id(_namespace: bytes, parent: bytes, token_ids: array[int]) -> bytes:
        return real(bytes(32), parent, token_ids)

    return block_id


@pytest.mark.parametrize("tier", TIERS)
def test_each_wall_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    """A supervisor that does not know whose a key is serves engines that were taken over, which is counted, and so is
    that it asks the store outside for them; ids without their namespace end the engine that meets one."""
    assert attached(tmp_path / "right", {}, tier) == (0, 0)
    attaches, asked = attached(tmp_path / "anybody", Anybody(), tier)
    assert attaches >= 10 and (asked >= 10) == (tier == "store")
    monkeypatch.setattr(prefix_cache, "block_id", without_namespace(prefix_cache.block_id))
    with pytest.raises(AssertionError, match="a block id met in two namespaces"):
        attached(tmp_path / "unkeyed", {}, tier)
