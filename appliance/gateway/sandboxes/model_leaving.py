"""A model that is being taken away, and what its requests are told. Pure."""

from __future__ import annotations

from enum import Enum, auto

from appliance.common.errors import ApplianceError, ModelRemovedError, UnavailableError
from appliance.gateway.sandboxes.link import RETRY_AFTER_S


class Leaving(Enum):
    """Whether a model is being taken away."""

    NO = auto()
    FOR_GOOD = auto()
    AGAIN = auto()
    """It comes again, with another entry of the configuration."""


def model_leaves(name: str, *, again: bool, running: bool) -> ApplianceError:
    """The error of a request whose model is being taken away.

    Args:
        name: by which the caller asked for it.
        again: whether the same name is served again, soon or by another model.
        running: whether the request was being served.
    """
    stopped = "; the request was stopped" if running else ""
    if again:
        return UnavailableError(f"the model {name} is being started anew{stopped}", retry_after_s=RETRY_AFTER_S)
    return ModelRemovedError(f"the model {name} is being taken away{stopped}", param="model", details={"model": name})
