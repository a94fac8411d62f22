"""``athanor serve`` with the gateway under cProfile: ``python bench/profiled.py FILE serve --config athanor.yaml``.

Used by ``bench/host.py --profile``. When the gateway ends, FILE holds the statistics (``python -m pstats FILE``) and
FILE.txt the functions that took most.
"""

from __future__ import annotations

import cProfile
import functools
import io
import pstats
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHOWN = 60
"""Functions in the text."""


def profile_gateway(target: Path, arguments: list[str]) -> int:
    """Be the gateway's process; gives its exit status."""
    from appliance.operator import child

    # The time of the thread: what others do on the machine meanwhile is not the gateway's.
    profile = cProfile.Profile(time.thread_time)
    try:
        return profile.runcall(child.main, arguments)
    finally:
        profile.dump_stats(target)
        text = io.StringIO()
        pstats.Stats(str(target), stream=text).sort_stats("tottime").print_stats(SHOWN)
        target.with_name(target.name + ".txt").write_text(text.getvalue())


def serve(target: Path, arguments: list[str]) -> None:
    """Be the launcher, and start the gateway by way of this file."""
    from appliance.operator import launcher
    from appliance.operator.cli.app import main

    plain = launcher.start

    @functools.wraps(plain)
    def start(argv: Any, **options: Any) -> Any:
        if "gateway" in argv:
            at = argv.index("appliance.operator.child")
            argv = [argv[0], str(Path(__file__).resolve()), str(target), *argv[at:]]
        return plain(argv, **options)

    launcher.start = start
    sys.argv = ["athanor", *arguments]
    main()


if __name__ == "__main__":
    target, *rest = sys.argv[1:]
    if rest[0] == "appliance.operator.child":
        sys.exit(profile_gateway(Path(target), rest[1:]))
    serve(Path(target), rest)
