"""``athanor serve`` whose supervisor counts nothing in its usage book while the file ``unmetered`` lies beside its
configuration: ``python bench/unmetered.py serve --config FOLDER/athanor.yaml``. The counterfactual of
``bench/metered_host.py``; the product has no such switch.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

FLAG = "unmetered"
"""Name of the file that stops counting."""

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def supervise(flag: Path, arguments: list[str]) -> int:
    """Be the supervisor's process, whose meter takes entries and does nothing with them while the flag lies there;
    gives its exit status."""
    from appliance.operator import child
    from appliance.supervisor.metering import Metering

    plain = Metering.count
    left_out = []

    def count(metering: Any, name: str, first: int, batch: Any) -> None:
        """Count, where the flag does not lie there; what was left out before then is not counted later."""
        if flag.exists():
            left_out.append(name)
            return
        if left_out:
            metering._book.apply(name, first, [])
            left_out.clear()
        plain(metering, name, first, batch)

    Metering.count = count  # type: ignore[method-assign]
    return child.main(arguments)


def serve(arguments: list[str]) -> None:
    """Be the launcher, and start the supervisor by way of this file."""
    from appliance.operator import launcher
    from appliance.operator.cli.app import main

    plain = launcher.start
    flag = Path(arguments[arguments.index("--config") + 1]).with_name(FLAG)

    @functools.wraps(plain)
    def start(argv: Any, **options: Any) -> Any:
        if "supervisor" in argv:
            at = argv.index("appliance.operator.child")
            argv = [argv[0], str(Path(__file__).resolve()), str(flag), *argv[at:]]
        return plain(argv, **options)

    launcher.start = start
    sys.argv = ["athanor", *arguments]
    main()


if __name__ == "__main__":
    if sys.argv[2] == "appliance.operator.child":
        sys.exit(supervise(Path(sys.argv[1]), sys.argv[3:]))
    serve(sys.argv[1:])
