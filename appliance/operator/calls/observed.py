"""The program of a sandbox with another lock-down: ``python -m appliance.operator.calls.observed PROGRAM MODE PLACE
SOCKET``.

PROGRAM is ``engine`` or ``text``; what runs is the real program, up to its lock-down. MODE says what comes then:

* ``collect``: a filter that reports every call to the collector, which lets it through;
* ``outside``: a filter that reports the calls outside of the list only, so that the rest keeps its speed;
* ``enforce``: the real lock-down, with further calls allowed, read from a file.

PLACE is the collector's socket, or that file. The served programs have no such mode: no option, no configuration and no
variable of theirs leads here. This module replaces names in their modules, in its own process only, and is in no
sandbox's image, which holds the packages ``engine`` and ``isolation`` alone.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from appliance.operator.calls.call_list import CallList, Condition, ListedCall, encode
from appliance.operator.calls.notifications import TAKEN_MARK
from appliance.operator.calls.widening import widened
from engine.errors import LockdownError
from engine.sandbox.allowed_calls import Argument, Call
from engine.sandbox.filter import MACHINES, TRAP, Instruction, compile_filter
from engine.sandbox.lockdown import CompiledFilter, leave, lock_down, prepare

EXIT_USAGE = 2

NOTIFY = 0x7FC0_0000
"""SECCOMP_RET_USER_NOTIF: the call waits until the listener has answered."""

SET_MODE_FILTER = 1
FLAGS = 1 | 1 << 3 | 1 << 4 | 1 << 5
"""All threads (TSYNC); give a listener; say by ESRCH when a thread refuses, since the result is a descriptor; and a
call that was reported waits through signals, so that it is reported once."""

RETURN = 0x06

LockDown = Callable[[Sequence[Call]], None]


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main(arguments: Sequence[str]) -> int:
    """Run a program of a sandbox under another lock-down; gives its exit status."""
    if len(arguments) != 4 or arguments[0] not in ("engine", "text") or arguments[1] not in MODES:
        sys.stderr.write("usage: observed engine|text collect|outside|enforce PLACE SOCKET\n")
        return EXIT_USAGE
    program, mode, place, path = arguments
    make = MODES[mode](place)
    if program == "engine":
        module = importlib.import_module("engine.__main__")
        _replace(module, "lock_down", make("engine"))
    else:
        module = importlib.import_module("engine.text.__main__")
        _replace_text(module, make)
    status: int = module.main([path])
    if program == "engine":
        leave(status)
    return status


def _replace_text(worker: ModuleType, make: Callable[[str], LockDown]) -> None:
    """Replace the lock-down of a text sandbox's programs. A process has one listener at most, so a grammar's process,
    which is forked under the forker's filter, reports through that one; its own filter, which it asks for, is not put
    on top (``collector``)."""
    grammars = importlib.import_module("engine.text.grammar_process")
    forker, keeper = make("forker"), make("keeper")

    def by_list(calls: Sequence[Call]) -> None:
        # The forker's list alone forks.
        (forker if any(call.name == "clone" for call in calls) else keeper)(calls)

    _replace(worker, "lock_down", make("worker"))
    _replace(grammars, "lock_down", by_list)


def _replace(module: ModuleType, name: str, value: object) -> None:
    assert name in vars(module), f"{module.__name__} has no {name} any more"
    vars(module)[name] = value


def _collecting(place: str, *, everything: bool) -> Callable[[str], LockDown]:
    def make(program: str) -> LockDown:
        return lambda calls: _collect(place, program, calls, everything=everything)

    return make


def _enforcing(place: str) -> Callable[[str], LockDown]:
    added = json.loads(Path(place).read_text(encoding="utf-8"))

    def make(program: str) -> LockDown:
        return lambda calls: lock_down(widened(calls, added.get(program, ())))

    return make


MODES: dict[str, Callable[[str], Callable[[str], LockDown]]] = {
    "collect": lambda place: _collecting(place, everything=True),
    "outside": lambda place: _collecting(place, everything=False),
    "enforce": _enforcing,
}


def _collect(place: str, program: str, calls: Sequence[Call], *, everything: bool) -> None:
    """Tell the collector who this is, and put on the filter that reports.

    Raises:
        LockdownError: the kernel takes no such filter.
        OSError: no collector listens.
    """
    machine = os.uname().machine
    lists = [_listed(program, calls, machine)]
    judged = calls
    if program == "forker":
        # Its children are grammars' processes, whose list is part of its own: reported is what is beyond theirs.
        judged = importlib.import_module("engine.text.allowed_calls").grammar_calls()
        lists.append(_listed("grammar", judged, machine))
        # A signal that comes before a report is taken breaks the call off: clone would fail where it never does.
        signal.siginterrupt(signal.SIGCHLD, False)
    code = b"".join(one.encode() for one in reporting(judged, machine, everything=everything))
    prepare()
    told = {"pid": os.getpid(), "everything": everything, "lists": encode(lists)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(place)
        connection.send(json.dumps(told).encode())
    os.close(_listen(CompiledFilter(MACHINES[machine].seccomp, code)))


def reporting(calls: Sequence[Call], machine: str, *, everything: bool) -> tuple[Instruction, ...]:
    """The program of a list whose every end is a report; or, with ``everything``, one that reports each call. Pure."""
    report = Instruction(RETURN, 0, 0, NOTIFY)
    if everything:
        return (report,)
    end = Instruction(RETURN, 0, 0, TRAP)
    return tuple(report if one == end else one for one in compile_filter(calls, machine))


def _listen(program: CompiledFilter) -> int:
    """Put the filter on; gives the descriptor of its listener, which the collector takes out of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = _Program(len(program.code) // struct.calcsize("=HBBI"), program.code)
    given = int(libc.syscall(program.seccomp, SET_MODE_FILTER, FLAGS, ctypes.byref(words)))
    if given < 0:
        raise LockdownError(f"the kernel takes no filter that reports: {os.strerror(ctypes.get_errno())}")
    # Outside of every list, so it waits for the collector, which must have found the listener before it is closed.
    libc.syscall(program.seccomp, TAKEN_MARK, 0, None)
    return given


def _listed(program: str, calls: Sequence[Call], machine: str) -> CallList:
    entries = []
    for call in calls:
        number = call.x86_64 if machine == "x86_64" else call.aarch64
        if number is not None:
            entries.append(ListedCall(call.name, number, tuple(map(_condition, call.arguments)), call.answer))
    return CallList(program, tuple(entries))


def _condition(argument: Argument) -> Condition:
    return Condition(argument.index, argument.values, argument.mask)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
