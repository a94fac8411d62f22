"""What a tenant may know of a model that it may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a tenant may know of a model."""

    name: str
    created: int
    """Unix seconds at which the appliance began to serve it."""
    max_context: int
    runner: str = "model"
    """``embed``: it gives vectors. ``classify``: it gives labels. ``null``: a benchmark's, which computes nothing and
    answers with meaningless ids."""
    digest: str = ""
    """Digest of the model's files; empty for an alias, and where it is not known."""
