"""``python -m bench.soak``: the appliance under load and under faults. Needs root; harms nothing of this machine."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from appliance.common.errors import ApplianceError
from appliance.operator.cli.guarded import guard_process
from bench.soak import room
from bench.soak.errors import SoakError, UsageError
from bench.soak.faults.catalogue import FAULTS, find
from bench.soak.run import Wish, soak
from isolation.errors import IsolationError

FAILED, USAGE, UNAVAILABLE, INTERRUPTED = 1, 2, 5, 130
"""Exit codes, as ``athanor selftest`` has them."""


def main(argv: list[str]) -> int:
    """Run what the command line asks for; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description="Faults under load, and what must hold.")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long faults follow each other")
    parser.add_argument("--seed", type=int, default=1, help="of the order, the load and every choice")
    parser.add_argument("--fault", action="append", default=[], help="this one (again and again); see --list")
    parser.add_argument("--turns", type=int, default=0, help="end after so many faults")
    parser.add_argument("--turn", type=int, default=0, help="number of the first, to repeat one of another run")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--log", type=Path, help="write what the appliance has said to this file")
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    wanted = parser.parse_args(argv)
    if wanted.list:
        print("\n".join(f"{fault.name:20} {fault.says}" for fault in FAULTS))
        return 0
    try:
        chosen = tuple(find(name) for name in wanted.fault)
        # Opened before the namespace is entered, where the same path is another file.
        output = wanted.json.open("w") if wanted.json is not None else None
        log = wanted.log.open("wb") if wanted.log is not None else None
    except UsageError as error:
        return _fail(str(error), USAGE)
    except OSError as error:
        return _fail(f"cannot write {error.filename}: {error.strerror}", USAGE)
    wish = Wish(wanted.seed, wanted.minutes, chosen, wanted.turn, wanted.turns or 1_000_000, log)
    try:
        entered = room.enter()
        # Inside of the namespace, so that the guard sees what the appliance leaves there.
        scratch = guard_process()
        # SIGTERM interrupts as ctrl-c does, once: the appliance is ended and what was found so far is not shown.
        signal.signal(signal.SIGTERM, _interrupt)
        inside = replace(entered, temporary=scratch.path)
        found = soak(wish, inside, lambda line: print(line, file=sys.stderr, flush=True))
    except SoakError as error:
        return _fail(str(error), UNAVAILABLE)
    except KeyboardInterrupt:
        return _fail("ended before its time", INTERRUPTED)
    except (ApplianceError, IsolationError) as error:
        return _fail(str(error), FAILED)
    print(found.text())
    if output is not None:
        with output:
            json.dump(found.to_dict(), output, indent=2)
    return FAILED if found.failed else 0


def _interrupt(number: int, _frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _fail(problem: str, code: int) -> int:
    print(f"soak: {problem}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
