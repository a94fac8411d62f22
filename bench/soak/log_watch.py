"""What the appliance has said since the last look: problems are counted by name, and a defect is never overlooked."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

DEFECTS = ("Traceback (most recent call last)", "never retrieved", "was never awaited", "Fatal Python error")
"""What no fault excuses: an error that nobody expected."""

SERIOUS = frozenset({"warning", "error", "critical"})
MAX_KEPT = 20


@dataclass(slots=True)
class LogWatch:
    """Reads a growing log from where it stopped; half a line waits for its end."""

    path: Path
    offset: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    """Warnings and errors, by level and what they said."""

    def look(self) -> list[str]:
        """Defects since the last look, the first few."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return []
        whole = data.rpartition(b"\n")[0]
        self.offset += len(whole) + bool(whole)
        found = [one for line in whole.decode(errors="replace").split("\n") if (one := self._judge(line))]
        return found[:MAX_KEPT]

    def _judge(self, line: str) -> str:
        if any(word in line for word in DEFECTS):
            return f"the log has a defect: {line[-600:]}"
        try:
            said = json.loads(line)
        except ValueError:
            return ""
        if isinstance(said, dict) and said.get("level") in SERIOUS:
            self.problems[f"{said['level']}: {said.get('event')}"] += 1
            if said["level"] == "critical":
                return f"the log has a defect: {line[:600]}"
        return ""
