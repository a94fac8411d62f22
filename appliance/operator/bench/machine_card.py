"""A machine card: the facts about a machine that a reader of its figures needs, as JSON with one fact a line.

A card never contains a host name, a path, a user name, an address, a serial number or anything else that tells one
machine of a kind from another: it may be published with the figures. The operator keeps such words out of the note.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from appliance.operator.bench.errors import CardError


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCard:
    """Facts about one machine; None where a fact is not known.

    Every text comes from the processor, the kernel's release or a program's version, none from the machine's
    configuration, but for ``note``.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    architecture: str | None = None
    """Kind of processor as ``uname -m`` says it."""
    best_kernel_variant: str | None = None
    """The best variant of the compiled kernels whose features the processor has; empty where it has those of none."""
    cgroup_cpu_cores: float | None = None
    """Cores that the cgroup of this process may use; 0: no limit that can be seen."""
    cgroup_version: int | None = None
    """Version of the cgroup hierarchy that limits processor time; 0: none is mounted."""
    date: str | None = None
    """Day of the record, ISO 8601, UTC."""
    family: int | None = None
    """Family of the processor."""
    features: Mapping[str, bool | None] | None = None
    """Features that a variant of the compiled kernels needs, and whether the processor has them."""
    kernel: str | None = None
    """Release of the operating system's kernel."""
    logical_cores: int | None = None
    """Logical cores that are online."""
    memory_gib: float | None = None
    """Memory of the machine, in GiB."""
    memory_read_gb_s_all_cores: float | None = None
    """Measured read speed of all usable cores together, in 10^9 bytes a second."""
    memory_read_gb_s_one_core: float | None = None
    """Measured read speed of one core, in 10^9 bytes a second."""
    model: int | None = None
    """Model of the processor within its family."""
    note: str = ""
    """What else a reader must know, in the operator's words."""
    numa_nodes: int | None = None
    """Memory nodes that are online."""
    physical_cores: int | None = None
    """Physical cores that are online."""
    processor: str | None = None
    """Model name of the processor."""
    python: str | None = None
    """Version of Python."""
    runsc: int | None = None
    """Release date of runsc as a number; None where there is none."""
    stepping: int | None = None
    """Stepping of the processor."""
    torch: str | None = None
    """Version of torch."""
    usable_cores: int | None = None
    """Logical cores that this process may run on."""
    vendor: str | None = None
    """Vendor of the processor, as the processor says it."""

    def to_json(self) -> str:
        """Give the card as a JSON object with sorted keys, one fact a line."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> MachineCard:
        """Read a card.

        Raises:
            CardError: the text is no JSON, lacks a fact (an unknown one is null), or has one of another name or type.
        """
        from pydantic import TypeAdapter, ValidationError

        try:
            card = TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise CardError(f"{'.'.join(map(str, first['loc'])) or 'card'}: {first['msg'].lower()}") from None
        lacking = asdict(card).keys() - json.loads(text).keys()
        if lacking:
            raise CardError(f"facts are missing (null where unknown): {', '.join(sorted(lacking))}")
        return card
