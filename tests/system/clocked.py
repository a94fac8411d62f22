"""``athanor`` with a gateway whose wall clock can be set: ``python tests/system/clocked.py FILE demo ...``.

FILE holds the seconds by which the gateway's ``time.time`` and ``time.time_ns`` are ahead of the machine's clock; it is
read with each call, so that a test sets the clock while the gateway runs. The machine's own clock stays as it is.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

NS = 1_000_000_000


def set_clock(file: Path) -> None:
    """Let the wall clock of this process be ahead by what the file says."""
    wall, wall_ns = time.time, time.time_ns

    def ahead() -> int:
        return int(file.read_text() or "0")

    time.time = lambda: wall() + ahead()
    time.time_ns = lambda: wall_ns() + ahead() * NS


def launch(script: str, words: list[str], arguments: list[str], role: str = "gateway") -> None:
    """Be the launcher, and start one process by way of a script, with these words before the child's own."""
    from appliance.operator import launcher
    from appliance.operator.cli.app import main

    plain = launcher.start

    @functools.wraps(plain)
    def start(argv: Any, **options: Any) -> Any:
        if role in argv:
            at = argv.index("appliance.operator.child")
            argv = [argv[0], script, *words, *argv[at:]]
        return plain(argv, **options)

    launcher.start = start
    sys.argv = ["athanor", *arguments]
    main()


if __name__ == "__main__":
    offset, *rest = sys.argv[1:]
    if rest[0] == "appliance.operator.child":
        # Before anything of ours is imported: defaults like ``wall=time.time`` are bound at import.
        set_clock(Path(offset))
        from appliance.operator import child

        sys.exit(child.main(rest[1:]))
    launch(str(Path(__file__).resolve()), [offset], rest)
