"""System calls permitted to the programs of a text sandbox while they serve, each with its reason. Any other call ends
the program.

There are four programs with four lists (``grammar_process`` describes them). The *worker* processes tenants' texts and
so has the fewest rights: no process, no descriptor, no signal to other processes. The *keeper* creates shared pipes,
passes them on, and stops and ends grammar processes; it receives grammars and parses none. The *forker* creates
processes and sees no tenant data. A *grammar process* compiles a tenant's grammar: it is forked under the forker's list
and adds its own, stricter one.

Opening or looking up a file returns an error instead of ending the program. Python does this lazily in places that no
list could enumerate (an encoding requested by a chat template), and handles the error there.
"""

from __future__ import annotations

from dataclasses import replace

from engine.sandbox.allowed_calls import (
    ENDING,
    ENOSYS,
    MAP_ANONYMOUS,
    MAP_PRIVATE,
    MAP_SHARED,
    MEMORY,
    NO_CODE,
    PROT_EXEC,
    STDERR,
    WAITING,
    Argument,
    Bells,
    Call,
)

ENOENT = 2
FORK_FLAGS = 0x0120_0011
"""Flags of fork(3): a new process whose end raises SIGCHLD; the kernel writes and clears its thread id."""
SIGKILL, SIGALRM, SIGCHLD, SIGCONT, SIGSTOP = 9, 14, 17, 18, 19
WNOHANG = 1
ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF = 0, 1, 2
RLIMIT_AS = 9
FIONBIO = 0x5421
SECCOMP_SET_MODE_FILTER = 1
NOT_EXECUTABLE = Argument(2, (0,), PROT_EXEC)
SHARED = Argument(3, (MAP_PRIVATE | MAP_ANONYMOUS, MAP_SHARED), MAP_SHARED | MAP_PRIVATE | MAP_ANONYMOUS)
WRITING_FLAGS = 0x643
"""Open flags that write, create, truncate or append: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND."""


def worker_calls(bells: Bells, keeper: Bells | None, size: int | None) -> tuple[Call, ...]:
    """Return the worker's list.

    Args:
        bells: the channel's pipes.
        keeper: the bells from and to the grammar keeper, if there is one.
        size: the open file that shows the worker's size, if there is one.
    """
    pairs = (bells,) if keeper is None else (bells, keeper)
    return (
        Call(
            "write",
            1,
            64,
            "ring the host's bell and the keeper's; the last line on stderr",
            (Argument(0, (*(pair.outbound for pair in pairs), STDERR)),),
        ),
        Call("read", 0, 63, "take the rings off our own bells", (Argument(0, tuple(pair.inbound for pair in pairs)),)),
        *WAITING,
        *MEMORY,
        NO_CODE,
        Call(
            "setitimer",
            38,
            103,
            "the clock over a template, and what ends one that ignores it",
            (Argument(0, (ITIMER_REAL, ITIMER_VIRTUAL)),),
        ),
        Call("getitimer", 36, 102, "the clock that ran before is put back", (Argument(0, (ITIMER_REAL,)),)),
        Call("rt_sigaction", 13, 134, "the handler of that clock comes and goes", (Argument(0, (SIGALRM,)),)),
        Call("rt_sigreturn", 15, 139, "the handler of that clock returns"),
        _address_space("the bound on a template's memory comes and goes"),
        *(() if size is None else (_pread(size, "the size that this bound is added to"),)),
        ENDS,
        *NO_FILES,
        *ENDING,
    )


def keeper_calls(memory: int | None) -> tuple[Call, ...]:
    """Return the keeper's list; its pipes come and go, so reads and writes name no descriptor.

    Args:
        memory: the open file that shows the sandbox's memory use, if there is one.
    """
    return (
        *ANY_PIPE,
        *WAITING,
        *SHARED_MEMORY,
        NO_CODE,
        Call("memfd_create", 319, 279, "the memory that a grammar's process shares with the keeper"),
        Call("ftruncate", 77, 46, "the size of that memory"),
        Call("pipe2", 293, 59, "two bells for each grammar's process"),
        Call("ioctl", 16, 29, "pipes that do not block, and nothing else", (Argument(1, (FIONBIO,)),)),
        *PACKETS,
        Call(
            "kill",
            62,
            129,
            "end a grammar's process, or halt it while it is the turn of others",
            (Argument(1, (SIGKILL, SIGSTOP, SIGCONT)),),
        ),
        *(() if memory is None else (_pread(memory, "what the sandbox uses of its memory"),)),
        ENDS,
        *NO_FILES,
        *ENDING,
    )


def forker_calls(size: int) -> tuple[Call, ...]:
    """Return the forker's list, under which grammar processes start, so it includes all of their calls.

    Args:
        size: the open file that shows the forker's size.
    """
    return (
        *(call for call in grammar_calls() if call not in MEMORY),
        *SHARED_MEMORY,
        _pread(size, "the size that a grammar's bound on memory is added to"),
        ENDS,
        Call("rt_sigreturn", 15, 139, "the handler that asks for those ends returns"),
        Call("rt_sigaction", 13, 134, "a new process hears of no ends", (Argument(0, (SIGCHLD,)),)),
        *PACKETS,
        Call("clone", 56, 220, "fork a grammar's process", (Argument(0, (FORK_FLAGS,)),)),
        Call(
            "clone3",
            435,
            435,
            "its flags lie in memory, out of a filter's sight: libc falls back to clone",
            answer=ENOSYS,
        ),
        Call("set_robust_list", 273, 99, "first call of a new process"),
        Call(
            "seccomp",
            317,
            277,
            "a grammar's process puts its own list on top, which can only forbid more",
            (Argument(0, (SECCOMP_SET_MODE_FILTER,)),),
        ),
    )


def grammar_calls() -> tuple[Call, ...]:
    """Return the list of a grammar process."""
    return (
        *ANY_PIPE,
        *WAITING,
        *MEMORY,
        NO_CODE,
        Call("setitimer", 38, 103, "the clock over a compilation", (Argument(0, (ITIMER_PROF,)),)),
        _address_space("the bound on a grammar's memory"),
        *NO_FILES,
        *ENDING,
    )


def _address_space(reason: str) -> Call:
    return Call("prlimit64", 302, 261, reason, (Argument(0, (0,)), Argument(1, (RLIMIT_AS,))))


def _pread(fd: int, reason: str) -> Call:
    return Call("pread64", 17, 67, reason, (Argument(0, (fd,)),))


ANY_PIPE = (
    Call("read", 0, 63, "take the rings off a bell"),
    Call("write", 1, 64, "ring a bell; the last line on stderr"),
)
"""Calls of programs whose only descriptors to read and write are bells to each other."""

SHARED_MEMORY = tuple(
    replace(call, arguments=(NOT_EXECUTABLE, SHARED)) if call.name == "mmap" else call for call in MEMORY
)
"""Memory as ``MEMORY`` has it, and memory that keeper and grammar process both map: never executable."""

ENDS = Call("wait4", 61, 260, "how a process of ours ended, without waiting for it", (Argument(2, (WNOHANG,)),))

PACKETS = (
    Call("sendmsg", 46, 211, "pipes and process ids between keeper and forker"),
    Call("recvmsg", 47, 212, "the same, the other way"),
)
"""Calls on the only socket: between keeper and forker."""

NO_FILES = (
    Call(
        "openat",
        257,
        56,
        "there are no files any more; to write one is not even asked",
        (Argument(2, (0,), WRITING_FLAGS),),
        answer=ENOENT,
    ),
    Call("newfstatat", 262, 79, "nor anything to be found in a folder", answer=ENOENT),
    Call("getcwd", 79, 17, "nor a folder to be in", answer=ENOENT),
    Call("readlink", 89, None, "nor a link to follow", answer=ENOENT),
    Call("readlinkat", 267, 78, "nor a link to follow", answer=ENOENT),
)
"""File calls that fail with "not found" instead of being executed."""
