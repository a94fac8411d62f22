"""Facts about processor and memory, read from files of /proc and /sys. Changes nothing, starts nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

KIB_PER_GIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Facts about the processor of a machine; None where the system does not tell."""

    name: str | None
    vendor: str | None
    family: int | None
    model: int | None
    stepping: int | None
    logical_cores: int | None
    """Cores that are online."""
    physical_cores: int | None
    """Pairs of package and core among them."""
    numa_nodes: int | None
    """Nodes that are online."""


def look_at_processor(root: Path = Path("/")) -> Processor:
    """Read the facts below a root: of the first processor, since all of a machine's are of one kind for us."""
    facts = _first_processor(_read(root / "proc/cpuinfo"))
    system = root / "sys/devices/system"
    online = parse_cores(_read(system / "cpu/online"))
    return Processor(
        name=facts.get("model name"),
        vendor=facts.get("vendor_id", facts.get("CPU implementer")),
        family=_number(facts.get("cpu family")),
        model=_number(facts.get("model", facts.get("CPU part"))),
        stepping=_number(facts.get("stepping", facts.get("CPU revision"))),
        logical_cores=len(online) or None,
        physical_cores=_physical_cores(system / "cpu", online),
        numa_nodes=len(parse_cores(_read(system / "node/online"))) or None,
    )


def memory_gib(root: Path = Path("/")) -> float | None:
    """Read the size of the memory, in GiB to a tenth."""
    found = re.search(r"^MemTotal:\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return round(int(found[1]) / KIB_PER_GIB, 1) if found else None


def parse_cores(text: str) -> list[int]:
    """Parse a list of the kernel's such as ``0-3,8``. Pure."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _first_processor(cpuinfo: str) -> dict[str, str]:
    """Lines of the first paragraph of /proc/cpuinfo by name."""
    pairs = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs if value.strip()}


def _physical_cores(cpus: Path, online: list[int]) -> int | None:
    """Count pairs of package and core; a core whose place is not told makes the count unknown."""
    places = {
        tuple(_read(cpus / f"cpu{core}/topology" / name).strip() for name in ("physical_package_id", "core_id"))
        for core in online
    }
    return len(places) if places and all(all(place) for place in places) else None


def _number(text: str | None) -> int | None:
    """Read a decimal or, with 0x, a hexadecimal number."""
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
