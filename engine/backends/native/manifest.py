"""What compiled kernels are known by: their variants, their files, the digest of their sources, a processor's features.

Standard library only, and the one module of the kernels that the host imports: the program that
compiles them and the one that opens them must agree.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "kernels.txt"
"""The file of a kernel directory that names the others: ``sources DIGEST``, then ``library VARIANT DIGEST`` lines."""

SOURCES = Path(__file__).parent / "csrc"


@dataclass(frozen=True, slots=True)
class Variant:
    """One form of the kernels: for which processors it is, and how it is compiled."""

    name: str
    machine: str
    """As ``platform.machine`` says it."""
    flags: tuple[str, ...]
    """For the compiler."""
    features: tuple[str, ...]
    """What the processor must have, by the operating system's names."""

    @property
    def library(self) -> str:
        """Name of its file in a kernel directory."""
        return f"kernels-{self.name}.so"


_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
_DOT = (*_V4, "avx512_bf16", "avx512_vnni")
_TILES = (*_DOT, "amx_bf16", "amx_int8", "amx_tile")
_DOT_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_TILE_FLAGS = (*_DOT_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")

TILES = "x86-64-v4-tiles"

VARIANTS = (
    Variant(TILES, "x86_64", _TILE_FLAGS, _TILES),
    Variant("x86-64-v4-dot", "x86_64", _DOT_FLAGS, _DOT),
    Variant("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Variant("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Variant("armv8-dot", "aarch64", ("-march=armv8.2-a+bf16+i8mm+dotprod",), ("asimddp", "bf16", "i8mm")),
    Variant("armv8", "aarch64", ("-march=armv8-a",), ("asimd",)),
)
"""The best of a machine first."""

PLAIN = "plain operations"
"""Form without kernels."""

COMPRESSED = " compressed"
"""End of the name of a form that holds bfloat16 weights in fewer bytes."""

FORMS = ("", PLAIN, *(variant.name + end for variant in VARIANTS for end in ("", COMPRESSED)))
"""Forms in which an engine may compute, by the number that stands for them between engine and host; the first: an
engine that does not choose one."""


def variants_of(machine: str) -> tuple[Variant, ...]:
    """Variants for a kind of machine, the best first."""
    return tuple(one for one in VARIANTS if one.machine == machine)


def source_files() -> tuple[Path, ...]:
    """The sources, in the order in which they are digested; empty where the package came without them."""
    return tuple(sorted(SOURCES.glob("*.[ch]")))


def source_digest() -> str:
    """Hex SHA-256 over names and contents of the sources."""
    digest = hashlib.sha256(b"athanor kernels 2\0")
    for path in source_files():
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def libraries_of(lines: list[str]) -> dict[str, str]:
    """Digests of the libraries that a manifest names, by variant."""
    found = (line.split() for line in lines)
    return {words[1]: words[2] for words in found if len(words) == 3 and words[0] == "library"}


def processor_features() -> frozenset[str]:
    """What the operating system's kernel says of the processor; empty where it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
