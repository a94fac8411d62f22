"""Fresh seeds for a program that may be a copy of a saved one.

Sandboxes restored from one checkpoint begin with the same memory, so each generator that drew its seed when it was
imported would give all of them the same numbers. ``os.urandom`` and ``secrets`` ask the kernel each time and need
nothing. What cannot be changed any more is named in SECURITY.md: the secret of string hashes and of Rust's tables, the
places of libraries and stacks in memory.
"""

from __future__ import annotations

import os
import random
import sys

_SEED_BYTES = 8


def reseed() -> None:
    """Seed every generator of this process anew from the kernel. Modules that are not loaded are left alone: they draw
    when they are."""
    random.seed()
    if files := sys.modules.get("tempfile"):
        vars(files)["_name_sequence"] = None  # A generator of its own, made at the first use.
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.manual_seed(int.from_bytes(os.urandom(_SEED_BYTES), "little", signed=True))
    if processes := sys.modules.get("multiprocessing.process"):
        # torch imports it; its key for connections between processes is drawn then. Nobody here makes connections.
        processes.current_process().authkey = os.urandom(32)
