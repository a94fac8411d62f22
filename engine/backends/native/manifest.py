"""What compiled kernels are known by: their two files, the digest of their sources, the features of a processor.

Standard library only, and the one module of the kernels that the host imports: the program that
compiles them and the one that opens them must agree.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

LIBRARY = "kernels.so"
MANIFEST = "kernels.txt"
"""The files of a kernel directory; the manifest holds lines of ``name value``."""

SOURCES = Path(__file__).parent / "csrc"


def source_files() -> tuple[Path, ...]:
    """The sources, in the order in which they are digested; empty where the package came without them."""
    return tuple(sorted(SOURCES.glob("*.[ch]")))


def source_digest() -> str:
    """Hex SHA-256 over names and contents of the sources."""
    digest = hashlib.sha256(b"athanor kernels 1\0")
    for path in source_files():
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


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
