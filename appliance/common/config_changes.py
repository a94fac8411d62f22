"""Differences between the configuration that runs and the one in the file: what a reload applies, and what waits for a
restart. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.config_keys import default_words
from appliance.common.config_loader import values_of
from appliance.common.operator_config import RemoteOperatorsConfig
from policy.positions import dotted

ROLES = ("viewers", "operators", "security")
"""Keys of ``remote_operators`` that say who has which role."""

LIVE = (
    *("credentials", "pepper", "sandbox.freeze_after_s", "sandbox.step_timeout_s"),
    *(f"remote_operators.{name}" for name in ROLES),
)
"""Keys that the gateway looks up anew each time. Addresses and certificates are bound to sockets, and all else is the
supervisor's, which has made its sandboxes by it. Who has which role the operator's API reads by itself."""

MODELS = "models["
"""Beginning of the keys of models, which come and go without a restart (``appliance.common.served_models``)."""

GATEWAY_ONLY = ("listen.", "fleet.")
"""Beginnings of keys for which a restart of the gateway is enough."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a reload does about the configuration."""

    config: ApplianceConfig
    """The one that runs, with the new values of ``LIVE``."""
    applied: tuple[str, ...]
    """A line for each key that is in force with the reload: ``KEY (OLD -> NEW)``."""
    restart: tuple[str, ...]
    """A line for each key that is in force after a restart."""
    models: tuple[ModelConfig, ...]
    """Models that shall be served."""

    @property
    def command(self) -> str:
        """Command that puts the rest in force; empty where nothing is left."""
        if not self.restart:
            return ""
        alone = all(line.startswith(GATEWAY_ONLY) for line in self.restart)
        return f"systemctl restart {'athanor-gateway' if alone else 'athanor.target'}"


def changes(running: ApplianceConfig, wanted: ApplianceConfig) -> Changes:
    """Compare two configurations, key by key."""
    old, new = ({dotted(where): value for where, value in values_of(one)} for one in (running, wanted))
    every = [key for key in dict.fromkeys((*old, *new)) if not key.startswith(MODELS)]
    differing = [key for key in every if old.get(key) != new.get(key)]
    lines = {key: f"{key} ({default_words(old.get(key))} -> {default_words(new.get(key))})" for key in differing}
    both = running.remote_operators is not None and wanted.remote_operators is not None
    live = {key for key in differing if key in LIVE and (both or not key.startswith("remote_operators."))}
    sandbox = {name: getattr(wanted.sandbox, name) for name in ("freeze_after_s", "step_timeout_s")}
    config = running.model_copy(
        update={
            "credentials": wanted.credentials,
            "pepper": wanted.pepper,
            "sandbox": running.sandbox.model_copy(update=sandbox),
            "models": wanted.models,
            "remote_operators": _with_roles(running.remote_operators, wanted.remote_operators),
        }
    )
    return Changes(
        config=config,
        applied=tuple(line for key, line in lines.items() if key in live),
        restart=tuple(line for key, line in lines.items() if key not in live),
        models=wanted.models,
    )


def _with_roles(
    running: RemoteOperatorsConfig | None, wanted: RemoteOperatorsConfig | None
) -> RemoteOperatorsConfig | None:
    """Return the section that runs with the roles of another."""
    if running is None or wanted is None:
        return running
    return running.model_copy(update={name: getattr(wanted, name) for name in ROLES})
