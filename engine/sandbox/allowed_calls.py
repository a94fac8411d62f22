"""The system calls that an engine makes after warm-up: data, each entry with its reason. Whatever is not here ends it.

Numbers are of x86-64 (arch/x86/entry/syscalls/syscall_64.tbl) and aarch64 (include/uapi/asm-generic/unistd.h); a call
that a machine does not have is None. The order is that of use: the filter looks from the top.

Three lists are put together by ``engine_calls``:

* the base, what every engine needs;
* the pool: above two compute threads libgomp ends and starts threads whenever a parallel region needs fewer or more
  of them than the last one (seen with strace: three regions of 4 and 2 threads in turn clone seven times);
* generated code: oneDNN, which multiplies 16-bit types, writes a kernel for every new shape. A step's number of rows
  takes any value, so new shapes come for as long as the engine lives (some 300 in a run of 100 mixed requests); float32
  goes through MKL, which writes none.
"""

from __future__ import annotations

from dataclasses import dataclass

LOW_WORD = 0xFFFF_FFFF

PROT_EXEC = 0x4
MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS = 0x01, 0x02, 0x20
FUTEX_OPTIONS = 0x80 | 0x100
"""Private, and by the real-time clock."""
FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAIT_BITSET, FUTEX_WAKE_BITSET = 0, 1, 9, 10
THREAD_FLAGS = 0x3D_0F00
"""The flags of pthread_create(3): a thread of this process, never a process of its own."""
SIGABRT = 6
SIGKILL = 9
ENOSYS = 38
STDERR = 2


@dataclass(frozen=True, slots=True)
class Argument:
    """A condition: argument ``index``, under ``mask``, is one of ``values``.

    Only the low 32 bits are looked at: the kernel takes descriptors, operations and flags as ``int``.
    """

    index: int
    values: tuple[int, ...]
    mask: int = LOW_WORD


@dataclass(frozen=True, slots=True)
class Call:
    """One allowed system call; every condition must hold."""

    name: str
    x86_64: int | None
    aarch64: int | None
    reason: str
    arguments: tuple[Argument, ...] = ()
    answer: int | None = None
    """The call is not made: it seems to fail with this error or, with 0, to succeed."""


@dataclass(frozen=True, slots=True)
class Bells:
    """The descriptors that stay in use: where the host rings, and where it is rung."""

    inbound: int
    outbound: int


@dataclass(frozen=True, slots=True)
class RankBells:
    """Pipes between the ranks of one engine (``engine.sandbox.rank_link``): our own, and those of the others."""

    inbound: int
    outbound: tuple[int, ...]


def engine_calls(
    bells: Bells, *, threads: int, generates_code: bool, spill: Bells | None = None, ranks: RankBells | None = None
) -> tuple[Call, ...]:
    """The list of an engine on the CPU.

    Args:
        bells: the channel's pipes.
        spill: those of the channel to the supervisor, if there is one.
        threads: compute threads, the loop's own included.
        generates_code: whether its kernels are written while it runs.
        ranks: pipes to the other ranks, if there are some.
    """
    host = (bells,) if spill is None else (bells, spill)
    inbound, outbound = [pair.inbound for pair in host], [pair.outbound for pair in host]
    if ranks is not None:
        inbound, outbound = [*inbound, ranks.inbound], [*outbound, *ranks.outbound]
    return _computing(inbound, outbound, threads=threads, generates_code=generates_code)


def rank_calls(ranks: RankBells, *, threads: int, generates_code: bool) -> tuple[Call, ...]:
    """The list of a rank that follows: an engine's, without anything of the host's."""
    return _computing([ranks.inbound], list(ranks.outbound), threads=threads, generates_code=generates_code)


def keeper_calls() -> tuple[Call, ...]:
    """The list of the process that keeps the ranks: it waits for one to end, kills the others, and ends."""
    return (
        Call("wait4", 61, 260, "wait until a rank ends"),
        Call("kill", 62, 129, "end the other ranks", (Argument(1, (SIGKILL,)),)),
        Call("write", 1, 64, "the last line on stderr", (Argument(0, (STDERR,)),)),
        *MEMORY,
        NO_CODE,
        *(call for call in WAITING if call.name in ("futex", "clock_gettime", "restart_syscall")),
        *(call for call in ENDING if call.name in ("exit_group", "rt_sigprocmask")),
    )


def _computing(inbound: list[int], outbound: list[int], *, threads: int, generates_code: bool) -> tuple[Call, ...]:
    pool = POOL if threads > 2 else ()
    wire = _wire(inbound, outbound)
    return (*wire, *WAITING, *MEMORY, GENERATED_CODE if generates_code else NO_CODE, *pool, *ENDING)


def _wire(inbound: list[int], outbound: list[int]) -> tuple[Call, ...]:
    return (
        Call("write", 1, 64, "ring a bell; the last line on stderr", (Argument(0, (*outbound, STDERR)),)),
        Call("read", 0, 63, "take the rings off our own bells", (Argument(0, tuple(inbound)),)),
    )


WAITING = (
    Call(
        "futex",
        202,
        98,
        "barriers of the compute threads and locks of malloc; nothing with priority inheritance",
        (Argument(1, (FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAIT_BITSET, FUTEX_WAKE_BITSET), LOW_WORD ^ FUTEX_OPTIONS),),
    ),
    Call("poll", 7, None, "sleep until the host rings"),
    Call("ppoll", None, 73, "the same where there is no poll"),
    Call("clock_gettime", 228, 113, "clocks that the kernel does not keep in the process's memory"),
    Call("clock_nanosleep", 230, 115, "the pause while the ring to the host is full"),
    Call("sched_yield", 24, 124, "spinning locks of the compute libraries"),
    Call("restart_syscall", 219, 128, "a wait that was interrupted by a stop of the sandbox goes on"),
)
"""How the engine waits."""

MEMORY = (
    Call(
        "mmap",
        9,
        222,
        "tensors; private memory without a file, not executable",
        (
            Argument(2, (0,), PROT_EXEC),
            Argument(3, (MAP_PRIVATE | MAP_ANONYMOUS,), MAP_SHARED | MAP_PRIVATE | MAP_ANONYMOUS),
        ),
    ),
    Call("munmap", 11, 215, "tensors are let go"),
    Call("madvise", 28, 233, "malloc gives pages of a thread back; large tensors ask for huge pages"),
    Call("brk", 12, 214, "the heap grows"),
    Call("mremap", 25, 216, "a large block of the heap grows in place"),
    Call("sched_getaffinity", 204, 123, "malloc counts the processors before it gives a thread an arena of its own"),
    Call("getrandom", 318, 278, "hashes and generators that are seeded late"),
)
"""Memory of the process itself."""

NO_CODE = Call(
    "mprotect", 10, 226, "the heaps of threads grow; nothing becomes executable", (Argument(2, (0,), PROT_EXEC),)
)

GENERATED_CODE = Call("mprotect", 10, 226, "oneDNN makes its kernels executable; the heaps of threads grow")

POOL = (
    Call("clone", 56, 220, "libgomp starts compute threads again", (Argument(0, (THREAD_FLAGS,)),)),
    Call(
        "clone3", 435, 435, "its flags lie in memory, out of a filter's sight: libc falls back to clone", answer=ENOSYS
    ),
    Call("set_robust_list", 273, 99, "first call of a new thread"),
    Call("rseq", 334, 293, "second call of a new thread"),
)
"""A thread pool that changes its size."""

ENDING = (
    Call("exit", 60, 93, "a compute thread ends"),
    Call("exit_group", 231, 94, "the engine ends"),
    Call(
        "rt_sigprocmask",
        14,
        135,
        "libc hides signals at the end of a thread and in abort; nobody may hide SIGSYS",
        answer=0,
    ),
    Call("close", 3, 57, "the channel is closed"),
    Call("getpid", 39, 172, "abort names the process to itself"),
    Call("gettid", 186, 178, "abort names the thread to itself"),
    Call(
        "tgkill",
        234,
        131,
        "abort: a failed check in a library ends as one, not as a breach",
        (Argument(2, (SIGABRT,)),),
    ),
)
"""How the engine ends, in order or not."""
