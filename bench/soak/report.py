"""What a run found: a table for people, a document for programs, and the command that repeats a failure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.soak.memory import Growth, Sample


@dataclass(slots=True)
class Turn:
    """One fault of a run."""

    number: int
    fault: str
    lasted_s: float = 0.0
    ready_s: float | None = None
    """From the end of the fault to right answers for everybody; None: never."""
    bit: str = ""
    """What showed that the harm was done."""
    breaches: list[str] = field(default_factory=list)
    absent: str = ""
    """Why it could not be done here."""


@dataclass(slots=True)
class Control:
    """A leak or a lie that was planted, and whether it was seen."""

    name: str
    seen: bool
    said: str = ""


@dataclass(slots=True)
class Soak:
    """A whole run."""

    seed: int
    minutes: float
    turns: list[Turn] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    """What clients heard."""
    growths: list[Growth] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """What the growths were worked out from."""
    problems: Counter[str] = field(default_factory=Counter)
    """Warnings and errors of the appliance's log."""
    final: list[str] = field(default_factory=list)
    """Breaches that belong to no fault: at rest before the first, or left after the stop."""

    @property
    def failed(self) -> bool:
        """Whether anything was found, or a control was blind."""
        return bool(self.breaches) or not all(one.seen for one in self.controls)

    @property
    def breaches(self) -> list[str]:
        """All of them."""
        leaks = [f"{one.room} grew by {one.grown / 2**20:.1f} MiB" for one in self.growths if one.leaks]
        return [*self.final, *(breach for turn in self.turns for breach in turn.breaches), *leaks]

    def command(self, turn: Turn) -> str:
        """What repeats one turn alone."""
        return f"python -m bench.soak --fault {turn.fault} --seed {self.seed} --turn {turn.number}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seed": self.seed,
            "minutes": self.minutes,
            "failed": self.failed,
            "turns": [asdict(turn) | {"command": self.command(turn)} for turn in self.turns],
            "controls": [asdict(one) for one in self.controls],
            "heard": dict(self.kinds),
            "memory": [asdict(one) | {"leaks": one.leaks} for one in self.growths],
            "samples": [asdict(one) for one in self.samples],
            "log": dict(self.problems),
            "final": self.final,
        }

    def text(self) -> str:
        """For people."""
        lines = ["fault                turns  harm s  ready s (median, max)  breaches"]
        for name in sorted({turn.fault for turn in self.turns}):
            turns = [turn for turn in self.turns if turn.fault == name]
            if turns[0].absent:
                lines.append(f"{name:20} absent: {turns[0].absent}")
                continue
            ready = sorted(turn.ready_s for turn in turns if turn.ready_s is not None) or [float("nan")]
            lines.append(
                f"{name:20} {len(turns):5} {max(turn.lasted_s for turn in turns):7.1f} "
                f"{ready[len(ready) // 2]:8.1f} {ready[-1]:8.1f} {sum(len(turn.breaches) for turn in turns):14}"
            )
        for turn in self.turns:
            lines += [f"BREACH {turn.fault}: {breach}" for breach in turn.breaches]
            if turn.breaches:
                lines.append(f"  again: {self.command(turn)}")
        lines += [f"BREACH {breach}" for breach in self.final]
        lines.append("heard: " + ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common()))
        lines += [_memory_line(one) for one in self.growths]
        blind = [one.name for one in self.controls if not one.seen]
        lines.append(
            f"controls: {len(self.controls) - len(blind)} of {len(self.controls)} planted were seen"
            + (f"; not {', '.join(blind)}" if blind else "")
        )
        lines += [f"log: {count} {what}" for what, count in self.problems.most_common(12)]
        lines.append(f"seed {self.seed}: " + ("FAILED" if self.failed else "sound"))
        return "\n".join(lines)


def _memory_line(one: Growth) -> str:
    return (
        f"memory of {one.room}: {one.per_hour / 2**20:+.1f} MiB/h over {one.samples} samples, "
        f"{one.grown / 2**20:+.1f} MiB in the half life that is judged, noise {one.noise / 2**20:.1f} MiB"
        + (": LEAKS" if one.leaks else "")
    )
