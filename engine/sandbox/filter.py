"""A list of allowed calls to a program of classic BPF, as seccomp(2) takes it. Pure.

The program gets ``struct seccomp_data`` (include/uapi/linux/seccomp.h): the number at offset 0, the architecture at 4,
the arguments as 64-bit words from 16. It ends the process for any other architecture, whose numbers mean other calls,
and for any number that is not listed: calls of the x32 kind have bit 30 set and are none of these.

The end is SECCOMP_RET_TRAP: the call is not made and SIGSYS comes, which by default ends all threads. KILL_PROCESS
would be the plainer word, but gVisor of 2024 ends one thread by it, and the others go on waiting for what that one
held (measured). So that a trap is an end, the list must let nobody handle SIGSYS or block it: Linux forces it on who
blocks it, gVisor of 2024 does not (measured).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from engine.sandbox.allowed_calls import LOW_WORD, Argument, Call

TRAP = 0x0003_0000
ALLOW = 0x7FFF_0000
ERRNO = 0x0005_0000

_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT, _ARGUMENT_BYTES = 0, 4, 16, 8

MAX_INSTRUCTIONS = 4_096
"""BPF_MAXINSNS of the kernel."""


class Machine(NamedTuple):
    """What a filter must know of the machine."""

    audit_arch: int
    """AUDIT_ARCH_* of include/uapi/linux/audit.h."""
    seccomp: int
    """Number of seccomp(2)."""


MACHINES = {"x86_64": Machine(0xC000_003E, 317), "aarch64": Machine(0xC000_00B7, 277)}
"""By ``os.uname().machine``."""


class Instruction(NamedTuple):
    """``struct sock_filter``."""

    code: int
    if_true: int
    if_false: int
    operand: int

    def encode(self) -> bytes:
        """The eight bytes that the kernel takes."""
        return struct.pack("=HBBI", *self)


def compile_filter(calls: Sequence[Call], machine: str) -> tuple[Instruction, ...]:
    """The program for a machine of ``MACHINES``. A call's number is compared once, so no name may come twice."""
    program = [
        Instruction(_LOAD, 0, 0, _ARCH_AT),
        Instruction(_EQUAL, 1, 0, MACHINES[machine].audit_arch),
        Instruction(_RETURN, 0, 0, TRAP),
        Instruction(_LOAD, 0, 0, _NUMBER_AT),
    ]
    names = [call.name for call in calls]
    assert len(set(names)) == len(names), "a call is listed twice"
    for call in calls:
        number = call.x86_64 if machine == "x86_64" else call.aarch64
        if number is not None:
            block = _block(call)
            program += [Instruction(_EQUAL, 0, len(block), number), *block]
    program.append(Instruction(_RETURN, 0, 0, TRAP))
    assert len(program) <= MAX_INSTRUCTIONS
    return tuple(program)


def _block(call: Call) -> list[Instruction]:
    """What is done when the number fits; it never falls through, so the number stays loaded for the next one."""
    block: list[Instruction] = []
    for argument in call.arguments:
        block += _condition(argument)
    answer = ALLOW if call.answer is None else ERRNO | call.answer
    return [*block, Instruction(_RETURN, 0, 0, answer)]


def _condition(argument: Argument) -> list[Instruction]:
    """Trap unless the argument is one of the values. Both machines are little-endian: the low word comes first."""
    load = [Instruction(_LOAD, 0, 0, _ARGUMENTS_AT + _ARGUMENT_BYTES * argument.index)]
    if argument.mask != LOW_WORD:
        load.append(Instruction(_AND, 0, 0, argument.mask))
    count = len(argument.values)
    tests = [Instruction(_EQUAL, count - place, 0, value) for place, value in enumerate(argument.values)]
    return [*load, *tests, Instruction(_RETURN, 0, 0, TRAP)]
