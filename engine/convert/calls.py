"""System calls permitted during a conversion, each with its reason. Any other call ends the program."""

from __future__ import annotations

from engine.sandbox.allowed_calls import ENDING, GENERATED_CODE, MEMORY, NO_CODE, POOL, WAITING, Argument, Call

STDOUT, STDERR = 1, 2

WRITING_FLAGS = 0x643
"""Open flags that write, create, truncate or append: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND."""

TCGETS = 0x5401
FIOCLEX = 0x5451


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


def reader_calls(*, generates_code: bool) -> tuple[Call, ...]:
    """Return the seccomp allow-list of a program that loads models and computes with them.

    Args:
        generates_code: whether its kernels are written while it runs.
    """
    return (
        Call("openat", 257, 56, "open files for reading", (Argument(2, (0,), WRITING_FLAGS),)),
        Call("open", 2, None, "the same, as some libraries ask it", (Argument(1, (0,), WRITING_FLAGS),)),
        Call("read", 0, 63, "read files"),
        Call("pread64", 17, 67, "read files from a place on"),
        Call("preadv", 295, 69, "the same, into several buffers"),
        Call("preadv2", 327, 286, "the same, as Python asks for it"),
        Call("lseek", 8, 62, "the place in a file"),
        Call("fstat", 5, 80, "the size of a file"),
        Call("newfstatat", 262, 79, "whether a file is there"),
        Call("stat", 4, None, "the same, as some libraries ask it"),
        Call("readlink", 89, None, "folders of libraries"),
        Call("readlinkat", None, 78, "the same where there is no readlink"),
        Call("getdents64", 217, 61, "modules that Python imports late"),
        Call("ioctl", 16, 29, "Python asks whether a file is a terminal", (Argument(1, (TCGETS, FIOCLEX)),)),
        Call("fcntl", 72, 25, "Python looks at a descriptor's flags", (Argument(1, (1, 3)),)),
        Call("sysinfo", 99, 179, "how much memory there is"),
        Call("write", 1, 64, "tell of progress", (Argument(0, (STDOUT, STDERR)),)),
        *MEMORY,
        GENERATED_CODE if generates_code else NO_CODE,
        *WAITING,
        *POOL,
        *ENDING,
    )
