"""The program inside an engine sandbox of several ranks: ``python -m engine.ranks /ipc/host.sock RANKS``.

It takes the memory and the pipes that ranks share, forks them before any tensor library is imported, and waits. The
first rank is the engine that the host meets; the others follow it. Whichever ends first, for whatever reason, ends all:
this process kills the rest and ends with its status, so that the host sees one program's end. A rank is killed by the
kernel when this process ends. Nothing else forks here, and this process can do nothing but wait, kill and end.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from engine.errors import LockdownError
from engine.sandbox.allowed_calls import keeper_calls
from engine.sandbox.lockdown import end_with, leave, lock_down
from engine.sandbox.rank_link import EXIT_RANK_GONE, RankLink, RankRoom
from engine.sandbox.rank_memory import MOST_RANKS
from isolation.ipc.errors import UnsupportedMachineError

EXIT_USAGE = 2
EXIT_LOAD = 3
SIGNALLED = 128
"""Added to the number of a signal that ended a rank, as runsc and shells do."""


def main(arguments: list[str]) -> int:
    """Fork the ranks and keep them; gives the exit status of the one that ended first."""
    if len(arguments) != 2 or not arguments[1].isdecimal() or not 2 <= int(arguments[1]) <= MOST_RANKS:
        return _end(EXIT_USAGE, f"usage: python -m engine.ranks SOCKET RANKS, of which there are 2 to {MOST_RANKS}")
    path, size = arguments[0], int(arguments[1])
    try:
        room = RankRoom.create(size)
    except UnsupportedMachineError as error:
        return _end(EXIT_LOAD, f"engine cannot start: {error}")
    keeper = os.getpid()
    ranks: set[int] = set()
    for rank in range(size):
        child = os.fork()
        if child == 0:
            end_with(keeper)
            _run(path, room.link(rank))
        ranks.add(child)
    room.close()
    try:
        lock_down(keeper_calls())
    except LockdownError as error:
        _kill(ranks)
        return _end(EXIT_LOAD, f"engine cannot start: {error}")
    return keep(ranks)


def keep(ranks: set[int]) -> int:
    """Wait until one of these children ends, end the others, and give its status; that of another where it ended only
    because that one had."""
    ended, status = os.waitpid(-1, 0)
    statuses = [status, *_kill(ranks - {ended})]
    codes = [os.waitstatus_to_exitcode(one) for one in statuses]
    code = next((one for one in codes if one != EXIT_RANK_GONE), EXIT_RANK_GONE)
    return SIGNALLED - code if code < 0 else code


def _kill(ranks: set[int]) -> list[int]:
    """End these children; gives their statuses. One that was ending already keeps its own."""
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)  # It is our child, not waited for: the number is still its own.
    return [os.waitpid(rank, 0)[1] for rank in sorted(ranks)]


def _run(path: str, link: RankLink) -> NoReturn:
    """Become a rank: only now are tensor libraries imported."""
    if link.rank == 0:
        from engine.__main__ import main as lead

        leave(lead([path], link))
    from engine.follow import follow

    leave(follow(link))


def _end(status: int, line: str) -> int:
    sys.stderr.write(line + "\n")
    return status


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
