"""What the attacker's program is made of: attacks by name, tried one after another, each told in one line of JSON.

The program uses the standard library alone and runs as it is inside a sandbox of ours, and outside as the positive
control. An attack returns what it got hold of, or None; a refusal is an OSError, which is told by its name. What
changes the process itself (a new namespace, another root) is tried in a child of its own.
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
"""Seconds for one attack: what waits longer has reached nobody."""

MAX_SAID = 200
"""Characters of what an attack says."""

FIRST_MEETING = "ring.hand_over"

Target = dict[str, Any]
"""What there is to attack: addresses, paths, process ids, and a canary that must not be read."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One thing to try."""

    name: str
    run: Callable[[Target], str | None]
    alone: bool
    """In a child of its own."""


ATTACKS: dict[str, Attack] = {}


class OutOfTimeError(OSError):
    """An attack waited for longer than it may."""


def attack(kind: str, *, alone: bool = False) -> Callable[[Callable[[Target], str | None]], Any]:
    """Register a function as the attack ``kind.function``."""

    def register(function: Callable[[Target], str | None]) -> Callable[[Target], str | None]:
        name = f"{kind}.{function.__name__}"
        ATTACKS[name] = Attack(name, function, alone)
        return function

    return register


def syscall(number: int, *arguments: Any) -> int:
    """A system call by its number on x86-64.

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
"""Gives up all rights but to write to this descriptor, as an engine does that serves."""


def attempt(one: Attack, target: Target, lock: Lock | None = None) -> dict[str, str]:
    """Try one attack; gives its name, whether it ``reached`` or was ``refused``, and what it says. With a lock it is
    tried by a process that is locked down already."""
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
            got = one.run(target)  # the first call beyond the list is the last thing that happens
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
    """Try every attack and print a line of JSON for each."""
    for one in list(ATTACKS.values()):
        if lock is not None and one.name == FIRST_MEETING:
            attempt(one, target)  # as an engine: met first, then locked down
        print(json.dumps(attempt(one, target, lock)), flush=True)
