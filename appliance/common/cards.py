"""NVIDIA cards that models use: what is told of one, and from when on something is wrong with it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_CARDS = 16
"""Most cards that are watched: no machine that one appliance serves on has more, and each has series of its own."""

MIB = 1 << 20

SHARE_MARGIN_BYTES = 512 * MIB
"""What an engine may hold beyond its share: the driver counts in pages of 2 MiB, and code that it loads late."""

OK, LOST, RESET, ABSENT = "ok", "lost", "reset", "absent"
STATES = (OK, LOST, RESET, ABSENT)
"""A card answers; has fallen off the bus; does nothing before a reset; or is not among the driver's cards."""

FIGURES = (
    "memory_total_bytes",
    "memory_used_bytes",
    "busy_percent",
    "memory_busy_percent",
    "power_mw",
    "power_limit_mw",
    "temperature_c",
    "slowdown_c",
    "ecc_uncorrected",
    "remapped_corrected",
    "remapped_uncorrected",
    "remap_pending",
    "remap_failed",
    "clock_reasons",
    "mig",
)
"""Numbers that NVML may tell of a card; those of ECC are since the driver was loaded."""

XIDS: dict[str, frozenset[int]] = {
    "program": frozenset({13, 31, 43, 45, 68, 69, 109}),
    "memory": frozenset({48, 63, 64, 92, 94, 95}),
    "bus": frozenset({74, 79}),
    "driver": frozenset({61, 62, 119, 120, 121}),
}
"""Xid events by where their cause mostly lies (NVIDIA, "XID Errors"): what a program did, the card's memory, PCIe and
NVLink, the driver and the card's own processor. Any other is ``other``."""

XID_KINDS = (*XIDS, "other")

FALLEN_XID = 79
"""Xid of a card that has fallen off the bus: nothing reaches it any more."""

THROTTLES = {"power": 0x04 | 0x80, "heat": 0x20 | 0x40, "hardware": 0x08}
"""Why clocks are lower than they might be, as bits of NVML's clock event reasons: the limit of power or the supply's
brake; heat, as the driver or the card sees it; a slow-down of the card's own, which stands beside one of the others
where its reason is known. A card that idles, and clocks that somebody has set, are no trouble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Memory of a card that a model's engines hold, single tenants' ones among them."""

    model: str
    held: int
    """Bytes."""
    share: int
    """Bytes that they may hold together; 0: no share is configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardStatus:
    """One card that models use."""

    index: int
    """N of /dev/nvidiaN."""
    uuid: str
    """Empty before the card has told it."""
    state: str
    """One of ``STATES``."""
    figures: dict[str, int] = field(default_factory=dict)
    """Those of ``FIGURES`` that are known."""
    xids: dict[str, int] = field(default_factory=dict)
    """Xid events since the supervisor began to watch, by kind; empty where they are not told."""
    last_xid: int = 0
    """The newest one's number; 0: there was none."""
    models: tuple[ModelMemory, ...] = ()
    """Models whose engines' memory is known."""
    unknown_bytes: int = 0
    """Memory held by processes that are not engines of this appliance, or whose engine is not known."""
    engines: tuple[str, ...] = ()
    """Models whose engines have the card, whether or not their memory is known."""
    out: str = ""
    """Why no engine gets it, as a sentence: it is lost, or was too lately or too often; empty where one may."""

    @property
    def throttled(self) -> tuple[str, ...]:
        """Why its clocks are lower than they might be."""
        bits = self.figures.get("clock_reasons", 0)
        return tuple(name for name, mask in THROTTLES.items() if bits & mask)

    @property
    def failing(self) -> str:
        """What is wrong with its memory, in words; empty where nothing is known to be."""
        figures = self.figures
        if figures.get("remap_failed"):
            return "a bad row of its memory could not be replaced"
        if figures.get("ecc_uncorrected"):
            return f"uncorrected errors of memory: {figures['ecc_uncorrected']} since the driver was loaded"
        if figures.get("remap_pending"):
            return "a bad row of its memory is replaced at the next reset"
        return ""


def xid_kind(number: int) -> str:
    """Kind of an Xid event, one of ``XID_KINDS``."""
    return next((kind for kind, numbers in XIDS.items() if number in numbers), "other")


def allowed_bytes(total: int, share: int) -> int:
    """Bytes of a card of so many that an engine with this share in percent may hold."""
    return total * share // 100 + SHARE_MARGIN_BYTES
