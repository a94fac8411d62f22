"""Checkpoints of sandboxes as the operator sees them: which there are, and why one is not there or not used."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

ROLES = ("engine", "text")
"""Roles of sandboxes that are saved."""

MAX_PROBLEM_CHARS = 300
"""Longest reason: two lines of a terminal."""

MAX_TOLD = 130
"""Most checkpoints that are told: each of 64 models and the base, for both roles."""

MAX_PROBLEMS_BYTES = 64 << 10
"""Most bytes of all reasons, as JSON: a message to the gateway has twice that (``control.MAX_DATAGRAM_BYTES``)."""

IN_THE_LOG = "the supervisor's log says why"
"""In the place of a reason for which there is no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """One checkpoint that sandboxes begin with, or would if it were there."""

    role: str
    """One of ``ROLES``."""
    model: str = ""
    """Model that it is of; empty: the base, which sandboxes of all models begin with."""
    bytes: int = 0
    """Its size; 0: it is not there."""
    made_at: float = 0.0
    """Unix time; 0: not there, or of a release that did not note it."""
    problem: str = ""
    """Why it is not there, or which sandboxes begin without it; empty where all is well."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.role}:{self.model}"


def to_wire(found: Iterable[CheckpointStatus]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return sizes and times by name, and problems by name, of ``MAX_TOLD`` at most. Reasons behind
    ``MAX_PROBLEMS_BYTES`` are ``IN_THE_LOG``."""
    rows, left = tuple(islice(found, MAX_TOLD)), MAX_PROBLEMS_BYTES
    problems = {one.name: one.problem for one in rows if one.problem}
    for name, problem in problems.items():
        left -= len(json.dumps(problem))
        if left < 0:
            problems[name] = IN_THE_LOG
    return {one.name: [one.bytes, int(one.made_at)] for one in rows}, problems


def from_wire(kept: dict[str, list[int]], problems: dict[str, str]) -> tuple[CheckpointStatus, ...]:
    """Return what was told, the bases first.

    Raises:
        ValueError: no supervisor of this release tells it.
    """
    if not problems.keys() <= kept.keys() or any(len(one) > MAX_PROBLEM_CHARS for one in problems.values()):
        raise ValueError("problems of checkpoints that no supervisor of this release tells")
    found = []
    for name, figures in kept.items():
        role, _, model = name.partition(":")
        if role not in ROLES or len(figures) != 2 or min(figures) < 0:
            raise ValueError("a checkpoint that no supervisor of this release tells")
        size, made_at = figures
        found.append(
            CheckpointStatus(role=role, model=model, bytes=size, made_at=made_at, problem=problems.get(name, ""))
        )
    return tuple(sorted(found, key=lambda one: (bool(one.model), one.model, one.role)))
