"""The system calls of a text sandbox's programs once they serve: data, each entry with its reason. Whatever is not
here ends the program.

Four programs, four lists (``grammar_process`` says what they do). The *worker* looks at tenants' texts and so may
least: no process, no descriptor, no signal to anybody. The *keeper* makes pipes, hands them over, and halts and ends
grammars' processes; it sees grammars and parses none. The *forker* makes processes and sees nothing of a tenant. A
*grammar's* process compiles what a tenant wrote: it is forked under the forker's list and puts its own, which allows
less, on top.

Files are not there any more: who opens one to read, or looks for one, is told so and goes on. Python does that lazily
in places that no list could name (an encoding that a chat template asks for), and a refusal is what it expects there.
"""

from __future__ import annotations

from engine.allowed_calls import ENDING, ENOSYS, MEMORY, NO_CODE, STDERR, WAITING, Argument, Bells, Call

ENOENT = 2
FORK_FLAGS = 0x0120_0011
"""Of fork(3): a process of its own, whose end is a SIGCHLD; the kernel writes and clears its thread id."""
SIGKILL, SIGALRM, SIGCHLD, SIGCONT, SIGSTOP = 9, 14, 17, 18, 19
WNOHANG = 1
ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF = 0, 1, 2
RLIMIT_AS = 9
FIONBIO = 0x5421
SECCOMP_SET_MODE_FILTER = 1
WRITING_FLAGS = 0x643
"""The bits of open flags that write, create, cut or append: O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND."""


def worker_calls(bells: Bells, keeper: Bells | None, size: int | None) -> tuple[Call, ...]:
    """The worker's list.

    Args:
        bells: the channel's pipes.
        keeper: the pipes from and to the keeper of grammars, where there is one.
        size: the open file that tells the worker's size, where there is one.
    """
    pairs = (bells,) if keeper is None else (bells, keeper)
    return (
        Call("write", 1, 64, "ring the host's bell; orders to the keeper; the last line on stderr",
             (Argument(0, (*(pair.outbound for pair in pairs), STDERR)),)),
        Call("read", 0, 63, "take the rings off our own bell; the keeper's answers",
             (Argument(0, tuple(pair.inbound for pair in pairs)),)),
        *WAITING,
        *MEMORY,
        NO_CODE,
        Call("setitimer", 38, 103, "the clock over a template, and what ends one that ignores it",
             (Argument(0, (ITIMER_REAL, ITIMER_VIRTUAL)),)),
        Call("getitimer", 36, 102, "the clock that ran before is put back", (Argument(0, (ITIMER_REAL,)),)),
        Call("rt_sigaction", 13, 134, "the handler of that clock comes and goes", (Argument(0, (SIGALRM,)),)),
        Call("rt_sigreturn", 15, 139, "the handler of that clock returns"),
        _address_space("the bound on a template's memory comes and goes"),
        *(() if size is None else (_pread(size, "the size that this bound is added to"),)),
        ENDS,
        *NO_FILES,
        *ENDING,
    )  # fmt: skip


def keeper_calls(memory: int | None) -> tuple[Call, ...]:
    """The keeper's list; its pipes come and go, so reads and writes name none.

    Args:
        memory: the open file that tells what the sandbox uses, where there is one.
    """
    return (
        *ANY_PIPE,
        *WAITING,
        *MEMORY,
        NO_CODE,
        Call("pipe2", 293, 59, "two pipes for each grammar's process"),
        Call("ioctl", 16, 29, "pipes that do not block, and nothing else", (Argument(1, (FIONBIO,)),)),
        *PACKETS,
        Call("kill", 62, 129, "end a grammar's process, or halt it while it is the turn of others",
             (Argument(1, (SIGKILL, SIGSTOP, SIGCONT)),)),
        *(() if memory is None else (_pread(memory, "what the sandbox uses of its memory"),)),
        ENDS,
        *NO_FILES,
        *ENDING,
    )  # fmt: skip


def forker_calls(size: int) -> tuple[Call, ...]:
    """The forker's list, under which grammars' processes begin, so it holds all of theirs.

    Args:
        size: the open file that tells the forker's size.
    """
    return (
        *grammar_calls(),
        _pread(size, "the size that a grammar's bound on memory is added to"),
        ENDS,
        Call("rt_sigreturn", 15, 139, "the handler that asks for those ends returns"),
        Call("rt_sigaction", 13, 134, "a new process hears of no ends", (Argument(0, (SIGCHLD,)),)),
        *PACKETS,
        Call("clone", 56, 220, "fork a grammar's process", (Argument(0, (FORK_FLAGS,)),)),
        Call("clone3", 435, 435, "its flags lie in memory, out of a filter's sight: libc falls back to clone",
             answer=ENOSYS),
        Call("set_robust_list", 273, 99, "first call of a new process"),
        Call("seccomp", 317, 277, "a grammar's process puts its own list on top, which can only forbid more",
             (Argument(0, (SECCOMP_SET_MODE_FILTER,)),)),
    )  # fmt: skip


def grammar_calls() -> tuple[Call, ...]:
    """The list of a grammar's process."""
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
    Call("read", 0, 63, "what comes through a pipe"),
    Call("write", 1, 64, "what goes through a pipe; the last line on stderr"),
)
"""Programs that hold nothing but pipes to each other."""

ENDS = Call("wait4", 61, 260, "how a process of ours ended, without waiting for it", (Argument(2, (WNOHANG,)),))

PACKETS = (
    Call("sendmsg", 46, 211, "pipes and process ids between keeper and forker"),
    Call("recvmsg", 47, 212, "the same, the other way"),
)  # fmt: skip
"""The one socket: between keeper and forker."""

NO_FILES = (
    Call("openat", 257, 56, "there are no files any more; to write one is not even asked",
         (Argument(2, (0,), WRITING_FLAGS),), answer=ENOENT),
    Call("newfstatat", 262, 79, "nor anything to be found in a folder", answer=ENOENT),
    Call("getcwd", 79, 17, "nor a folder to be in", answer=ENOENT),
    Call("readlink", 89, None, "nor a link to follow", answer=ENOENT),
    Call("readlinkat", 267, 78, "nor a link to follow", answer=ENOENT),
)  # fmt: skip
"""Calls that are not made, and seem to find nothing."""
