"""System calls permitted during a conversion, each with its reason. Any other call ends the program."""

from __future__ import annotations

from engine.sandbox.allowed_calls import ENDING, MEMORY, NO_CODE, WAITING, Argument, Call

STDOUT, STDERR = 1, 2


def converter_calls(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> tuple[Call, ...]:
    """Return the seccomp allow-list.

    Args:
        inputs: descriptors of the files that are read.
        outputs: descriptors of the files that are written.
    """
    return (
        Call("preadv", 295, 69, "read the files", (Argument(0, inputs),)),
        Call("preadv2", 327, 286, "the same, as Python asks for it", (Argument(0, inputs),)),
        Call("write", 1, 64, "write the results; tell of progress", (Argument(0, (*outputs, STDOUT, STDERR)),)),
        Call("fstat", 5, 80, "the size of a file", (Argument(0, inputs),)),
        Call("newfstatat", 262, 79, "the same, as libc asks it", (Argument(0, inputs),)),
        Call("fsync", 74, 82, "the results are on the drive before they get their name", (Argument(0, outputs),)),
        *MEMORY,
        NO_CODE,
        *WAITING,
        *ENDING,
    )
