"""G1 in the tiers outside of the engine sees what it looks for."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.selftest.g1_reuse import KINDS
from appliance.selftest.g1_spill import FORGED, Tier, attach
from engine.core.kv import prefix_cache

PAIRS = 10 * (len(KINDS) + len(FORGED))


class Anybody(dict[bytes, str]):
    """Takes every namespace key for one tenant's."""

    def get(self, key: bytes, default: object = None) -> str:  # type: ignore[override]
        """Whose key this is."""
        return "one"


def attached(folder: Path, owners: dict[bytes, str], *, disk: bool) -> int:
    """Attaches in some pairs, with a supervisor that looks owners up there."""
    tier = Tier(folder, owners, disk=disk, seed=5)
    try:
        return attach(tier, PAIRS)[0]
    finally:
        tier.close()


def without_namespace(real: Callable[..., bytes]) -> Callable[..., bytes]:
    """A hash of the tokens alone."""

    def block_id(_namespace: bytes, parent: bytes, token_ids: array[int]) -> bytes:
        return real(bytes(32), parent, token_ids)

    return block_id


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_each_wall_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, disk: bool) -> None:
    """A supervisor that does not know whose a key is serves engines that were taken over, which is counted; ids
    without their namespace end the engine that meets one."""
    assert attached(tmp_path / "right", {}, disk=disk) == 0
    assert attached(tmp_path / "anybody", Anybody(), disk=disk) >= 10
    monkeypatch.setattr(prefix_cache, "block_id", without_namespace(prefix_cache.block_id))
    with pytest.raises(AssertionError, match="a block id met in two namespaces"):
        attached(tmp_path / "unkeyed", {}, disk=disk)
