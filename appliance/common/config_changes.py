"""Differences between the configuration that runs and the one in the file: what a reload applies, and what waits for a
restart. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.config_keys import default_words
from appliance.common.config_loader import values_of
from appliance.common.operator_config import TOKEN, RemoteOperatorsConfig
from appliance.common.token_config import TokenIssuerConfig
from policy.positions import dotted

ROLES = ("viewers", "operators", "security")
"""Keys of ``remote_operators`` that say who has which role."""

LIVE = (
    *("credentials", "pepper", "sandbox.freeze_after_s", "sandbox.step_timeout_s"),
    *(f"remote_operators.{name}" for name in ROLES),
)
"""Keys that the gateway looks up anew each time. Addresses and certificates are bound to sockets, and all else is the
supervisor's, which has made its sandboxes by it. Who has which role the operator's API reads by itself. What is taken
away counts at once: roles, a whole section of them, issuers of tokens."""

MODELS = "models["
"""Beginning of the keys of models, which come and go without a restart (``appliance.common.served_models``)."""

GATEWAY_ONLY = ("listen.", "fleet.", "split.")
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
    tokens: tuple[TokenIssuerConfig, ...] = ()
    """Issuers of tenants' tokens that the file names. One that runs and is not among them, exactly as it runs, counts
    no more; a new one counts after a restart."""

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
    served = running.remote_operators is not None
    live = {key for key in differing if key in LIVE and (served or not key.startswith("remote_operators."))}
    sandbox = {name: getattr(wanted.sandbox, name) for name in ("freeze_after_s", "step_timeout_s")}
    config = running.model_copy(
        update={
            "credentials": wanted.credentials,
            "pepper": wanted.pepper,
            "sandbox": running.sandbox.model_copy(update=sandbox),
            "models": wanted.models,
            "remote_operators": roles_in_force(running.remote_operators, wanted.remote_operators),
        }
    )
    return Changes(
        config=config,
        applied=(*(line for key, line in lines.items() if key in live), *_withdrawn(running, wanted)),
        restart=tuple(line for key, line in lines.items() if key not in live),
        models=wanted.models,
        tokens=wanted.tokens,
    )


def roles_in_force(
    running: RemoteOperatorsConfig | None, wanted: RemoteOperatorsConfig | None
) -> RemoteOperatorsConfig | None:
    """Return the section that runs with the roles that the wanted one leaves: none where that is gone, and none for a
    credential whose issuer or authority is another one now. Listeners keep the old ones until a restart, and who is
    proved by them alone is nobody that the file names."""
    if running is None:
        return None
    return running.model_copy(update={name: _provable(name, running, wanted) for name in ROLES})


def _provable(role: str, running: RemoteOperatorsConfig, wanted: RemoteOperatorsConfig | None) -> tuple[str, ...]:
    """Return the credentials that the wanted section lists for a role and whose proof is checked as it says."""
    if wanted is None:
        return ()
    issuers = {one.name for one in wanted.tokens if one in running.tokens}
    certified = running.tls.client_ca == wanted.tls.client_ca
    listed: tuple[str, ...] = getattr(wanted, role)
    return tuple(one for one in listed if (one.split(":")[1] in issuers if one.startswith(TOKEN) else certified))


def _withdrawn(running: ApplianceConfig, wanted: ApplianceConfig) -> Iterator[str]:
    """Yield a line for each thing that counts no more although what replaces it needs a restart."""
    for one in running.tokens:
        if one not in wanted.tokens:
            yield f"tokens (those of the issuer {one.name} are refused: its entry has changed or is gone)"
    now, then = running.remote_operators, wanted.remote_operators
    if now is None or then is None:
        return
    found = roles_in_force(now, then)
    held = set() if found is None else {name for _, name in found.listed()}
    if missing := sorted({name for _, name in then.listed()} - held):
        yield f"remote_operators (no role until the restart, by a changed issuer or authority: {', '.join(missing)})"
