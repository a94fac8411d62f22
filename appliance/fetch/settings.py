"""What the downloader takes from the machine's configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from appliance.common.config import ApplianceConfig
from appliance.common.errors import ModelCacheError
from appliance.common.paths import FETCH_SOCKET


class FetchSettings(BaseModel):
    """Cache, limits and sources of one downloader."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: Path
    max_bytes: int = 0
    """Most bytes of the cache; 0: the disk's."""
    max_rate: int = Field(default=0, ge=0)
    """Most bytes a second; 0: no limit."""
    sources: Path | None = None
    """File of endpoints and credentials."""
    kept: tuple[str, ...] = ()
    """Digests of models that the configuration names, which stay in the cache."""


def settings_of(config: ApplianceConfig) -> FetchSettings:
    """Settings in a configuration.

    Raises:
        ModelCacheError: it has no cache.
    """
    cache = config.model_cache
    if cache is None:
        raise ModelCacheError("the configuration has no section model_cache; add one with its directory")
    return FetchSettings(
        directory=cache.directory,
        max_bytes=cache.max_bytes,
        max_rate=cache.max_rate,
        sources=cache.sources,
        kept=tuple(sorted(served_digests(config))),
    )


def fetch_socket(config: ApplianceConfig) -> Path:
    """Socket of the downloader's service: the configuration's, else the one of the launcher's child."""
    named = None if config.model_cache is None else config.model_cache.socket
    return config.run_dir / FETCH_SOCKET if named is None else named


def served_digests(config: ApplianceConfig) -> frozenset[str]:
    """Digests of the models of the cache that a configuration names, by digest or by folder."""
    if config.model_cache is None:
        return frozenset()
    folder = config.model_cache.directory / "models"
    inside = {model.folder.name for model in config.models if model.folder.parent == folder}
    return frozenset(inside | {model.digest for model in config.models if model.digest})
