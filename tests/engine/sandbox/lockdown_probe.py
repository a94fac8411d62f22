"""Tries system calls with and without lock-down, each in a child of its own; tells what came back as one JSON line.

Runs outside and inside a sandbox: ``python lockdown_probe.py ["engine only"] ["few"]``. A child ends with status 0 once
its call has come back, whatever it gave; minus the signal when the call ended it. ``-31`` is SIGSYS.
"""

import ctypes
import importlib
import json
import mmap
import os
import platform
import resource
import signal
import socket
import sys
import tempfile
import threading
import time

from engine.sandbox.allowed_calls import Bells, engine_calls
from engine.sandbox.lockdown import compiled, lock_down, narrow
from engine.text.allowed_calls import forker_calls, grammar_calls, keeper_calls, worker_calls

LIBC = ctypes.CDLL(None, use_errno=True)
SCRATCH = tempfile.mkdtemp()
VICTIM = os.path.join(SCRATCH, "victim")
NUMBERS = {
    "x86_64": {
        "io_uring_setup": 425,
        "ptrace": 101,
        "clone": 56,
        "fork": 57,
        "vfork": 58,
        "execveat": 322,
        "bpf": 321,
        "process_vm_readv": 310,
        "memfd_create": 319,
        "userfaultfd": 323,
        "seccomp": 317,
        "clone3": 435,
        "perf_event_open": 298,
        "keyctl": 250,
        "setns": 308,
        "open_by_handle_at": 304,
        "openat2": 437,
    },
    "aarch64": {
        "io_uring_setup": 425,
        "ptrace": 117,
        "clone": 220,
        "execveat": 281,
        "bpf": 280,
        "openat2": 437,
        "process_vm_readv": 270,
        "memfd_create": 279,
        "userfaultfd": 282,
        "seccomp": 277,
        "clone3": 435,
        "perf_event_open": 241,
        "keyctl": 219,
        "setns": 268,
        "open_by_handle_at": 265,
    },
}[platform.machine()]


def raw(name, *arguments):
    """A system call by its number; what it gives."""
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return LIBC.syscall(ctypes.c_long(NUMBERS[name]), *words)


def branch(start):
    """Run something that may give a second process; the second one ends at once."""
    parent = os.getpid()
    given = start()
    if given == 0 and LIBC.getpid() != parent:
        os._exit(0)
    if given and given > 0:
        os.waitpid(given, 0x4000_0000)  # __WALL: also a child that sends no SIGCHLD


def thread_socket():
    """A thread that was there before lock-down asks for a socket."""
    GO.set()
    WAITER.join()


def block_the_end():
    """Block the signal that a trapped call sends, then make such a call."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGSYS})
    os.getppid()


def executable(memory):
    """Make a page of ours executable."""
    return LIBC.mprotect(ctypes.c_void_p(memory), ctypes.c_size_t(4096), 5)


BEYOND = {
    "socket": lambda: socket.socket(socket.AF_UNIX),
    "execve": lambda: os.execv("/proc/self/exe", [sys.executable, "-S", "-c", ""]),
    "execveat": lambda: raw("execveat", -1, b"/nowhere", None, None, 0),
    "fork": lambda: branch(os.fork),
    "clone process": lambda: branch(lambda: raw("clone", 17, 0, 0, 0, 0)),
    "clone thread": lambda: threading.Thread(target=int).start(),
    "clone new namespaces": lambda: branch(lambda: raw("clone", 0x10000000 | 17, 0, 0, 0, 0)),
    "open to read": lambda: os.close(os.open("/proc/self/stat", os.O_RDONLY)),
    "open to write": lambda: os.close(os.open(VICTIM, os.O_WRONLY)),
    "create": lambda: os.close(os.open(os.path.join(SCRATCH, "new"), os.O_CREAT | os.O_WRONLY)),
    "openat2": lambda: raw("openat2", -100, b"/", None, 0),
    "open by handle": lambda: raw("open_by_handle_at", -100, None, 0),
    "stat": lambda: os.stat("/"),
    "list": lambda: os.listdir("/"),
    "unlink": lambda: os.unlink(VICTIM),
    "rename": lambda: os.rename(VICTIM, VICTIM),
    "chmod": lambda: os.chmod(VICTIM, 0o600),
    "ptrace": lambda: raw("ptrace", 16, 999_999, 0, 0),
    "process_vm_readv": lambda: raw("process_vm_readv", os.getppid(), None, 0, None, 0, 0),
    "kill": lambda: os.kill(os.getpid(), 0),
    "signal another thread": lambda: signal.pthread_kill(threading.get_ident(), 0),
    "mmap executable": lambda: mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_EXEC | 3),
    "mmap shared": lambda: mmap.mmap(-1, 4096, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, 3),
    "mmap file": lambda: mmap.mmap(FILE, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ),
    "mprotect executable": lambda: executable(PAGE),
    "write to another descriptor": lambda: os.write(FILE, b"x"),
    "read another descriptor": lambda: os.read(FILE, 1),
    "memfd": lambda: raw("memfd_create", b"x", 0),
    "pipe": os.pipe,
    "dup": lambda: os.dup(0),
    "io_uring_setup": lambda: raw("io_uring_setup", 0, None),
    "bpf": lambda: raw("bpf", 0, None, 0),
    "perf_event_open": lambda: raw("perf_event_open", None, 0, -1, -1, 0),
    "userfaultfd": lambda: raw("userfaultfd", 0xFFFF),
    "keyctl": lambda: raw("keyctl", 0, 0, 0),
    "setns": lambda: raw("setns", -1, 0),
    "chdir": lambda: os.chdir("/"),
    "setuid": lambda: os.setuid(os.getuid()),
    "ioctl": lambda: os.isatty(FILE),
    "futex with priority": lambda: LIBC.syscall(FUTEX, ctypes.byref(WORD), 6 | 128, 0, None, None, 0),
    "handle the end": lambda: signal.signal(signal.SIGSYS, lambda *_: None),
    "block the end": block_the_end,
    "a second filter": lambda: raw("seccomp", 1, 0, None),
    "a socket in another thread": thread_socket,
    "an unknown call": lambda: LIBC.syscall(ctypes.c_long(1_000)),
}
"""What an engine must not do after lock-down; before it every one of these comes back."""

WITHIN = {
    "ring the bell": lambda: os.write(OUT, b"x"),
    "say on stderr": lambda: os.write(2, b""),
    "hear the bell": lambda: os.read(BELL, 16),
    "sleep": lambda: time.sleep(0.002),
    "memory": lambda: mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 3).close(),
    "close": lambda: os.close(BELL),
    "clock": lambda: time.clock_gettime_ns(time.CLOCK_THREAD_CPUTIME_ID),
}
"""What it may do."""

OF_TEXT = {
    "ring the bell": WITHIN["ring the bell"],
    "hear the bell": WITHIN["hear the bell"],
    "import": lambda: print(importlib.import_module("xml.dom.minidom")),
    "an encoding": lambda: print("x".encode("utf-16-be" if "encodings.utf_16_be" not in sys.modules else "utf-7")),
    "clock over a template": lambda: signal.setitimer(signal.ITIMER_REAL, 0),
    "clock over a grammar": lambda: signal.setitimer(signal.ITIMER_PROF, 0),
    "handle the clock": lambda: signal.signal(signal.SIGALRM, lambda *_: None),
    "handle another signal": lambda: signal.signal(signal.SIGTERM, lambda *_: None),
    "bound the memory": lambda: resource.setrlimit(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)),
    "bound another's memory": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_AS),
    "more files": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    "a pipe that does not block": lambda: os.set_blocking(BELL, False),
    "end nobody": lambda: os.kill(0x7FFF_FFF0, signal.SIGKILL),
    "signal nobody": lambda: os.kill(0x7FFF_FFF0, signal.SIGUSR1),
    "fork and forget": lambda: os.fork() or os._exit(0),
    "send a packet": lambda: PAIR[0].sendmsg([b"x"]),
    "connect": lambda: PAIR[0].connect("/nowhere"),
}
"""What one program of a text sandbox or another may do."""

if platform.machine() == "x86_64":
    BEYOND |= {
        "vfork": lambda: branch(lambda: raw("fork")),
        "a call of the x32 kind": lambda: LIBC.syscall(ctypes.c_long(0x4000_0000 | 39)),
    }
FEW = (
    "socket",
    "execve",
    "fork",
    "clone thread",
    "open to read",
    "stat",
    "list",
    "mmap executable",
    "mprotect executable",
    "write to another descriptor",
    "read another descriptor",
    "pipe",
    "a second filter",
    "a socket in another thread",
    "an unknown call",
)
"""Of those beyond: all that some program of a text sandbox may do, and some of each kind that none may."""

if "few" in sys.argv:
    BEYOND = {name: BEYOND[name] for name in FEW}
FUTEX = ctypes.c_long(202 if platform.machine() == "x86_64" else 98)
WORD = ctypes.c_int(0)
GO = threading.Event()


def ask_for_a_socket():
    """What the thread does once it is told."""
    GO.wait()
    socket.socket(socket.AF_UNIX)


def lock_engine(**options):
    """As an engine that serves."""
    lock_down(engine_calls(Bells(BELL, OUT), **{"threads": 1, "generates_code": False, **options}))


def lock_grammar():
    """As a grammar's process: under the forker's list, with its own on top."""
    own = compiled(grammar_calls())
    lock_down(forker_calls(BELL))
    narrow(own)


TEXT = {
    "worker": lambda: lock_down(worker_calls(Bells(BELL, OUT), None, None)),
    "keeper": lambda: lock_down(keeper_calls(None)),
    "forker": lambda: lock_down(forker_calls(BELL)),
    "grammar": lock_grammar,
}
"""The programs of a text sandbox, as they serve."""
if "engine only" in sys.argv:
    TEXT = {}
elif "few" in sys.argv:
    TEXT = {who: TEXT[who] for who in ("worker", "grammar")}  # One filter, and one on top of another.


def status_of(action, lock, **options):
    """The status of a child that runs it, locked or, with None, not."""
    global WAITER
    pid = os.fork()
    if pid == 0:
        WAITER = threading.Thread(target=ask_for_a_socket, daemon=True)
        WAITER.start()
        try:
            if lock is not None:
                lock(**options)
            action()
        except (OSError, ImportError, LookupError):
            pass
        finally:
            # Another error prints nothing here; its status tells.
            os._exit(99 if isinstance(sys.exc_info()[1], Exception) else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


PAIR = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
BELL, OUT = os.pipe2(os.O_NONBLOCK)
os.write(OUT, b"some rings")
with open(VICTIM, "wb") as file:
    file.write(b"v" * 8192)
FILE = os.open(VICTIM, os.O_RDWR)
PAGE = LIBC.mmap
PAGE.restype, PAGE.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
PAGE = PAGE(None, 4096, 3, 0x22, -1, 0)


def tried(actions, lock):
    """How many were tried, which came back, and what became of those that neither came back nor ended by SIGSYS. A
    sandbox's line of output is short."""
    statuses = {name: status_of(act, lock) for name, act in actions.items()}
    odd = {name: status for name, status in statuses.items() if status not in (0, -signal.SIGSYS)}
    return {"tried": len(statuses), "back": [name for name, status in statuses.items() if status == 0], "odd": odd}


report = {
    "free": tried(BEYOND | WITHIN, None),
    "engine": tried(BEYOND | WITHIN, lock_engine),
    "code": status_of(BEYOND["mprotect executable"], lock_engine, generates_code=True),
    "pool": status_of(BEYOND["clone thread"], lock_engine, threads=3),
    "pool fork": status_of(BEYOND["fork"], lock_engine, threads=3),
    "text": {who: tried(BEYOND | OF_TEXT, lock) for who, lock in TEXT.items()},
}
print(json.dumps(report), flush=True)
