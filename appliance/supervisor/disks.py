"""Looks at the disks that the supervisor writes to."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.common.config import ApplianceConfig


def watched(config: ApplianceConfig) -> dict[str, Path]:
    """Folders by place (``appliance.common.disk_space.PLACES``), of those that the configuration names."""
    sandbox = config.sandbox
    caches = [path.parent for path in (config.digest_cache, sandbox.form_cache) if path is not None]
    found = {
        "audit": None if config.audit is None else config.audit.directory,
        "spill": None if sandbox.spill is None else sandbox.spill.directory,
        "checkpoints": sandbox.checkpoints,
        "cache": caches[0] if caches else None,
        "keyring": None if config.keys is None else config.keys.keyring,
        "batches": None if config.batches is None else config.batches.directory,
        "models": None if config.model_cache is None else config.model_cache.directory,
        "run": config.run_dir,
    }
    return {place: path for place, path in found.items() if path is not None}


def space(folders: dict[str, Path]) -> dict[str, list[int]]:
    """Free and total bytes by place; a folder that cannot be looked at is left out. Blocks as long as its disk does."""
    found = {}
    for place, folder in folders.items():
        try:
            seen = os.statvfs(folder)
        except OSError:
            continue
        found[place] = [seen.f_bavail * seen.f_frsize, seen.f_blocks * seen.f_frsize]
    return found
