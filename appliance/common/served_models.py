"""Which models come and go when the configured ones are compared with those that are served. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from appliance.common.config import ModelConfig
from appliance.common.config_keys import default_words

DRAIN_S = 20.0
"""Seconds that running requests have to end when their model is taken away; those that are left are cut then. A restart
gives them as long."""

DRAIN_BOUND_S = DRAIN_S + 10.0
"""Seconds after which the supervisor ends such a model whatever the gateway says."""

SERVED, LEAVING = "served", "leaving"
"""States of a model in ``control.ModelServed``."""


def entry_digest(model: ModelConfig) -> str:
    """Digest of a model's entry, by which a changed one is known."""
    return hashlib.sha256(json.dumps(model.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def models_digest(models: Iterable[ModelConfig]) -> str:
    """Digest of all entries: gateway and supervisor read them each for itself, and must have read the same."""
    entries = "".join(sorted(f"{model.name} {entry_digest(model)}\n" for model in models))
    return hashlib.sha256(entries.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ModelDifference:
    """What makes the served models the wanted ones: a changed one goes and comes again."""

    added: tuple[ModelConfig, ...] = ()
    changed: tuple[ModelConfig, ...] = ()
    """As they shall be."""
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    @property
    def coming(self) -> tuple[ModelConfig, ...]:
        """Models whose sandboxes are to be booted."""
        return (*self.added, *self.changed)

    def lines(self, before: Iterable[ModelConfig]) -> tuple[str, ...]:
        """A line for each model; ``before`` are the entries of an earlier reading, from which a changed one differs."""
        known = {model.name: model for model in before}
        return (
            *(f"model {model.name}: added, its sandboxes are starting" for model in self.added),
            *(f"model {model.name}: {_keys(known.get(model.name), model)}started anew" for model in self.changed),
            *(f"model {name}: removed, its requests have {DRAIN_S:g} s to end" for name in self.removed),
        )


def difference(served: Mapping[str, str], wanted: Iterable[ModelConfig]) -> ModelDifference:
    """Compare entries that are served, by name and digest, with those that are wanted."""
    models = tuple(wanted)
    names = {model.name for model in models}
    return ModelDifference(
        added=tuple(model for model in models if model.name not in served),
        changed=tuple(model for model in models if served.get(model.name, "") not in ("", entry_digest(model))),
        removed=tuple(name for name in served if name not in names),
    )


def _keys(before: ModelConfig | None, after: ModelConfig) -> str:
    """Keys of an entry that differ, with old and new value."""
    if before is None:
        return ""
    pairs = [(name, value, getattr(after, name)) for name, value in before]
    return "".join(f"{name} ({default_words(old)} -> {default_words(new)}), " for name, old, new in pairs if old != new)
