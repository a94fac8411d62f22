"""Which processes the kernel ends first where memory runs out."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

END_FIRST = 500
"""Score of a sandbox's processes (``oom_score_adj`` in proc(5)), in thousandths of the memory that ran out.

A sandbox is started again; with the supervisor all of them end. Its resident set has the locked weights of every engine
(``isolation.host.locked_file``), so that it would be the largest, and its end frees none that engines have mapped.
"""


def let_end_first(pids: Iterable[int], score: int = END_FIRST) -> None:
    """Set the score of processes, which their children inherit; one that has ended, or that the kernel keeps as it is,
    is passed over."""
    for pid in pids:
        with suppress(OSError):
            Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))
