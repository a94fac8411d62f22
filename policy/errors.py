"""Errors found in a policy text.

``PolicyError``
  * ``PolicySyntaxError``: the text is not the YAML we accept;
  * ``PolicySchemaError``: it is YAML, but no policy.

Both carry every problem found, each with the location of its cause. A refused request is no error: it is a
``policy.decision.Decision``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a policy file, with its location."""

    file: str
    """Name of the source, as given by the caller."""
    line: int
    """Line, counted from 1; 0: the whole file, in a warning."""
    column: int
    """Column, counted from 1, in characters."""
    path: str
    """Dotted path of the key, such as ``tenants.alpha.limits.concurrency``; empty for the whole
    file."""
    message: str

    def __str__(self) -> str:
        path = f" {self.path}:" if self.path else ""
        return f"{self.file}:{self.line}:{self.column}:{path} {self.message}"


class PolicyError(Exception):
    """Base class of all policy errors; its text has one line for each problem, ``file:line:column: path: message``."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class PolicySyntaxError(PolicyError):
    """The text is no YAML, or uses a YAML feature that is refused (aliases, tags, directives, several documents)."""


class PolicySchemaError(PolicyError):
    """The YAML does not describe a policy."""
