"""What ``athanor doctor`` says: findings, each with what it means and how it is mended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing is wrong."""
    WARNING = "warning"
    """Works now, but soon will not, or works less well than it could."""
    PROBLEM = "problem"
    """Does not work, or separates tenants less than promised."""


ORDER = tuple(Severity)
"""From the best to the worst."""


class Area(StrEnum):
    """Topic of a finding; topics are shown in this order."""

    MACHINE = "machine"
    SANDBOXES = "sandboxes"
    SERVICE = "service"
    ACCESS = "access"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    area: Area
    check: str
    """What was looked at, in a word or two."""
    level: Severity
    what: str
    """What was found."""
    means: str = ""
    """What follows from it; empty where nothing does."""
    mend: str = ""
    """A command, or the line of a file to change; empty where there is nothing to mend."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a check looks at; its methods make the findings."""

    area: Area
    check: str

    def ok(self, what: str) -> Finding:
        """All is well."""
        return Finding(area=self.area, check=self.check, level=Severity.OK, what=what)

    def note(self, what: str, means: str = "", mend: str = "") -> Finding:
        """Nothing is wrong."""
        return Finding(area=self.area, check=self.check, level=Severity.NOTE, what=what, means=means, mend=mend)

    def warning(self, what: str, means: str, mend: str) -> Finding:
        """Finding of level warning."""
        return Finding(area=self.area, check=self.check, level=Severity.WARNING, what=what, means=means, mend=mend)

    def problem(self, what: str, means: str, mend: str) -> Finding:
        """Finding of level problem."""
        return Finding(area=self.area, check=self.check, level=Severity.PROBLEM, what=what, means=means, mend=mend)


def worst(findings: Iterable[Finding]) -> Severity:
    """The worst level among them; ``OK`` when there are none."""
    return max((one.level for one in findings), key=ORDER.index, default=Severity.OK)
