"""Adapters of a model: their files, found and hashed, and which of them sandboxes of a single tenant get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import structlog

from appliance.common.adapter_files import AdapterFiles, read_adapter
from appliance.common.catalog import ModelFiles
from appliance.common.config import ModelConfig
from appliance.common.errors import ConfigError, ModelDigestError
from appliance.common.model_digests import DigestCache
from policy.model import PolicySet

log = structlog.get_logger()

Refuse = Callable[[str, ConfigError], None]
"""Takes the whole name of an adapter that cannot be served, and why."""


def leave_out(name: str, error: ConfigError) -> None:
    """Tell that an adapter is not served: at a start, where it is one tenant's, and all else is served."""
    log.error("an adapter is left out", adapter=name, problem=error.message)


def refuse(name: str, error: ConfigError) -> None:
    """Refuse an adapter: before a change, where the operator can mend it first.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(f"adapter {name}: {error.message.removeprefix(f'adapter {name}: ')}") from error


def with_adapters(files: ModelFiles, model: ModelConfig, cache: DigestCache, unusable: Refuse) -> ModelFiles:
    """Add a model's adapters to its files; ``unusable`` is called for each that is not as the configuration pins it.
    Blocks."""
    found: list[AdapterFiles] = []
    for one in model.adapters:
        name = f"{model.name}:{one.name}"
        try:
            adapter = read_adapter(name, one.path, cache)
            if adapter.digest != one.digest:
                raise ModelDigestError(
                    f"its files have the digest {adapter.digest}, the configuration pins {one.digest}"
                )
            found.append(adapter)
        except ConfigError as error:
            unusable(name, error)
        except OSError as error:
            unusable(name, ConfigError(f"cannot read {error.filename}: {error.strerror}"))
    return replace(files, adapters=tuple(found))


def of_tenant(files: ModelFiles, policy: PolicySet, tenant: str) -> ModelFiles:
    """Files for sandboxes of a single tenant: of all adapters those alone that it may use."""
    known = policy.tenants.get(tenant)
    usable = frozenset(known.adapters if known is not None else ())
    return replace(files, adapters=tuple(one for one in files.adapters if one.name in usable))
