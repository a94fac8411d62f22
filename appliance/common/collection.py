"""Keep the garbage collector from running while something large is made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from running in all threads of this process.

    For a large policy: the collector would look at all that it is made of while it is made, again and again and in one
    piece, and no other thread runs meanwhile. Nothing in it is a cycle. As a decorator it does so for each call.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
