"""Messages of ``appliance.common.control`` about models that come and go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelServed:
    """Supervisor: a model that it serves, told to a gateway that attaches and at each change."""

    model: str
    runner: str
    truncates: int
    entry: str
    """Digest of its entry (``appliance.common.served_models.entry_digest``)."""
    state: str
    """``served``, or ``leaving`` once it shall end: the gateway has its requests end and says ``ModelDrained``."""
    again: int
    """1: it leaves for a moment, and comes again with another entry."""
    adapters: list[str]
    """Its adapters as the entry has them: the whole name of each, a space and its digest in hex."""
    templated: int
    """1: its chat template makes one text of a query and a document."""
    labels: list[str]
    """Names of its labels, where it is a classifier that has some."""


@dataclass(frozen=True, slots=True)
class ModelGone:
    """Supervisor: a model is served no more, and nothing is left of its sandboxes."""

    model: str


@dataclass(frozen=True, slots=True)
class ReviewModels:
    """Gateway: asks whether the models that the configuration names now could be served in place of those that are.
    The supervisor reads the configuration for itself; ``entries`` is the digest of what the gateway read
    (``appliance.common.served_models.models_digest``)."""

    request: str
    entries: str


@dataclass(frozen=True, slots=True)
class ModelsReviewed:
    """Supervisor: answer to ``ReviewModels``: a line for each problem; without any, ``ApplyModels`` may follow."""

    request: str
    problems: list[str]


@dataclass(frozen=True, slots=True)
class ApplyModels:
    """Gateway: has what was reviewed last under this id come and go."""

    request: str


@dataclass(frozen=True, slots=True)
class ModelDrained:
    """Gateway: no request uses a model that is leaving any more."""

    model: str


@dataclass(frozen=True, slots=True)
class ModelRest:
    """Supervisor: whether a model's shared sandboxes are there, told after ``ModelServed`` and at each change."""

    model: str
    state: str
    """One of ``appliance.common.sleep_rules.SLEEP_STATES``."""
    cause: str
    """Why the last attempt to wake it failed; empty where it did not."""
    need_bytes: int
    """Memory that its engine takes, about."""
    boot_ms: int
    """Milliseconds that its sandboxes took to boot the last time; 0: they never have."""
    keep: str
    """The entry's ``keep``."""
    idle_ms: int
    """The entry's ``idle_s``, in milliseconds."""


@dataclass(frozen=True, slots=True)
class SleepModel:
    """Gateway: no request uses this model, and its shared sandboxes are to be ended until ``WakeModel``."""

    model: str
    reason: str
    """One of ``appliance.common.sleep_rules.SLEEP_REASONS``."""


@dataclass(frozen=True, slots=True)
class WakeModel:
    """Gateway: the shared sandboxes of this model, which sleeps, are to be booted."""

    model: str
    reason: str
    """One of ``appliance.common.sleep_rules.WAKE_REASONS``."""
    tenant: str
    """Tenant whose request wakes it; empty: the operator does."""


ModelWishes = ReviewModels | ApplyModels | ModelDrained | SleepModel | WakeModel
"""Messages of the gateway."""

ModelWords = ModelServed | ModelGone | ModelsReviewed | ModelRest
"""Messages of the supervisor."""
