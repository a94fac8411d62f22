"""Framework of the attacker's program: named attacks, tried one after another, each reported as one line of JSON.

The program uses the standard library alone and runs unchanged inside a sandbox, and outside as the positive control. An
attack returns what it obtained, or None; a refusal is an OSError, reported by its name. An attack that changes the
process itself (a new namespace, another root) runs in a child process.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ATTEMPT_S = 5
"""Seconds for one attack; one that waits longer counts as refused."""

MAX_SAID = 200
"""Characters of an attack's report."""

FIRST_MEETING = "ring.hand_over"

Target = dict[str, Any]
"""Targets of the attacks: addresses, paths, process ids, and a canary that must not be read."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack."""

    name: str
    run: Callable[[Target], str | None]
    alone: bool
    """Whether it runs in a child process."""


ATTACKS: dict[str, Attack] = {}


class OutOfTimeError(OSError):
    """An attack exceeded its time limit."""


def attack(kind: str, *, alone: bool = False) -> Callable[[Callable[[Target], str | None]], Any]:
    """Register a function as the attack ``kind.function``."""

    def register(function: Callable[[Target], str | None]) -> Callable[[Target], str | None]:
        name = f"{kind}.{function.__name__}"
        ATTACKS[name] = Attack(name, function, alone)
        return function

    return register


def syscall(number: int, *arguments: Any) -> int:
    """Make a system call by its number on x86-64.

    Raises:
        OSError: it failed.
    """
    result = int(_LIBC.syscall(number, *(_word(value) for value in arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _word(value: Any) -> Any:
    return ctypes.c_long(value) if isinstance(value, int) else value


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


Lock = Callable[[int], None]
"""Gives up all rights except writing to this descriptor, like a serving engine."""


def attempt(one: Attack, target: Target, lock: Lock | None = None) -> dict[str, str]:
    """Run one attack; return its name, ``reached`` or ``refused``, and its report. With a lock, a process that is
    already locked down runs it."""
    outcome, said = _in_child(one, target, lock) if one.alone or lock is not None else _here(one, target)
    return {"attack": one.name, "outcome": outcome, "said": said[:MAX_SAID]}


def _here(one: Attack, target: Target) -> tuple[str, str]:
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(ATTEMPT_S)
    try:
        got = one.run(target)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        return "refused", f"{name} {error.strerror or ''}".strip()
    except (ValueError, AttributeError, TypeError) as error:
        return "broken", f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return ("refused", "nothing there") if got is None else ("reached", got)


def _in_child(one: Attack, target: Target, lock: Lock | None) -> tuple[str, str]:
    inlet, outlet = os.pipe()
    pid = os.fork()
    if pid == 0 and lock is not None:
        lock(outlet)
        try:
            got = one.run(target)  # the first unlisted call ends the process
        except OSError as error:
            got, said = None, errno.errorcode.get(error.errno or 0, type(error).__name__)
        else:
            said = str(got)
        os.write(outlet, json.dumps(("reached" if got else "refused", said)).encode()[:4096])
        os._exit(0)
    if pid == 0:
        os.close(inlet)
        os.write(outlet, json.dumps(_here(one, target)).encode()[:4096])
        os._exit(0)
    os.close(outlet)
    with os.fdopen(inlet, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not said:
        return "refused", f"the process ended with {os.waitstatus_to_exitcode(status)}"
    outcome, what = json.loads(said)
    return outcome, what


def _too_late(_number: int, _frame: object) -> None:
    raise OutOfTimeError(errno.ETIMEDOUT, "nothing came")


def try_all(target: Target, lock: Lock | None = None) -> None:
    """Run every attack and print a line of JSON for each."""
    for one in list(ATTACKS.values()):
        if lock is not None and one.name == FIRST_MEETING:
            attempt(one, target)  # as an engine: handshake first, then lock-down
        print(json.dumps(attempt(one, target, lock)), flush=True)
