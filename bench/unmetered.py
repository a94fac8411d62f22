"""``athanor serve`` whose supervisor counts nothing in its usage book: ``python bench/unmetered.py serve --config
athanor.yaml``. The counterfactual of ``bench/metered_host.py``; the product has no such switch.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def supervise(arguments: list[str]) -> int:
    """Be the supervisor's process, with a meter that takes entries and does nothing; gives its exit status."""
    from appliance.operator import child
    from appliance.supervisor.metering import Metering

    def count(*_: object) -> None:
        """Count nothing."""

    Metering.count = count  # type: ignore[method-assign, assignment]
    return child.main(arguments)


def serve(arguments: list[str]) -> None:
    """Be the launcher, and start the supervisor by way of this file."""
    from appliance.operator import launcher
    from appliance.operator.cli.app import main

    plain = launcher.start

    @functools.wraps(plain)
    def start(argv: Any, **options: Any) -> Any:
        if "supervisor" in argv:
            at = argv.index("appliance.operator.child")
            argv = [argv[0], str(Path(__file__).resolve()), *argv[at:]]
        return plain(argv, **options)

    launcher.start = start
    sys.argv = ["athanor", *arguments]
    main()


if __name__ == "__main__":
    if sys.argv[1] == "appliance.operator.child":
        sys.exit(supervise(sys.argv[2:]))
    serve(sys.argv[1:])
