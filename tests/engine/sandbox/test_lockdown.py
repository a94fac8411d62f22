"""Lock-down: the list, the program that the kernel gets, real processes under it (inside gVisor: tests/isolation)."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import LockdownError
from engine.sandbox.allowed_calls import (
    ENOSYS,
    MAP_ANONYMOUS,
    MAP_PRIVATE,
    MAP_SHARED,
    PROT_EXEC,
    THREAD_FLAGS,
    Bells,
    Call,
    engine_calls,
)
from engine.sandbox.filter import ALLOW, ERRNO, MACHINES, TRAP, Instruction, compile_filter
from engine.sandbox.lockdown import generates_code, lock_down
from isolation.errors import describe_status

BELLS = Bells(5, 6)
STRICT = engine_calls(BELLS, threads=1, generates_code=False)
WIDE = engine_calls(BELLS, threads=8, generates_code=True)
WITHIN = {"ring the bell", "say on stderr", "hear the bell", "sleep", "memory", "close", "clock"}
"""What of the probe's attempts an engine comes back from; without lock-down all come back."""
WITHIN_TEXT = {
    "worker": {"clock over a template", "handle the clock", "bound the memory"},
    "keeper": {
        "write to another descriptor",
        "read another descriptor",
        "pipe",
        "a pipe that does not block",
        "memfd",
        "end nobody",
        "send a packet",
    },
    "forker": {
        "write to another descriptor",
        "read another descriptor",
        "a second filter",
        "clock over a grammar",
        "bound the memory",
        "fork and forget",
        "send a packet",
    },
    "grammar": {"write to another descriptor", "read another descriptor", "clock over a grammar", "bound the memory"},
}
"""The same for each program of a text sandbox, besides ``ALL_OF_TEXT``."""
ALL_OF_TEXT = {"open to read", "stat", "list", "ring the bell", "hear the bell", "import", "an encoding"}
PROBE = Path(__file__).with_name("lockdown_probe.py")


def run(program: tuple[Instruction, ...], number: int, *arguments: int, arch: int) -> int:
    """What a program answers: the few instructions of classic BPF that we use, over ``struct seccomp_data``."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, arch, 0, *words)
    place = accumulator = 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, operand)[0]
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x15:
            place += if_true if accumulator == operand else if_false
        else:
            assert code == 0x06
            return operand


def answer(calls: tuple[Call, ...], name: str, *arguments: int, machine: str = "x86_64") -> int:
    """What the filter says to a listed call with these arguments."""
    call = next(call for call in WIDE if call.name == name)
    number = call.x86_64 if machine == "x86_64" else call.aarch64
    assert number is not None
    return run(compile_filter(calls, machine), number, *arguments, arch=MACHINES[machine].audit_arch)


@pytest.mark.parametrize("machine", list(MACHINES))
def test_exactly_the_listed_numbers_pass(machine: str) -> None:
    """Of the first thousand numbers those on the list are answered, all others kill, and so do those of x32."""
    for calls in (STRICT, WIDE):
        numbers = {call.x86_64 if machine == "x86_64" else call.aarch64 for call in calls if not call.arguments}
        conditional = {call.x86_64 if machine == "x86_64" else call.aarch64 for call in calls if call.arguments}
        program, arch = compile_filter(calls, machine), MACHINES[machine].audit_arch
        for number in set(range(1_000)) - conditional:
            assert (run(program, number, arch=arch) != TRAP) == (number in numbers)
            assert run(program, number | 0x4000_0000, arch=arch) == TRAP


def test_another_architecture_is_none_of_ours() -> None:
    """The numbers of i386 (socketcall, execve) mean other calls, so its calls die whatever their number."""
    program = compile_filter(WIDE, "x86_64")
    assert all(run(program, number, arch=0x4000_0003) == TRAP for number in range(500))


@pytest.mark.parametrize("machine", list(MACHINES))
def test_arguments_decide(machine: str) -> None:
    """Writes go to the bell and stderr, reads come from the bell, memory is private, without file and never code."""
    private, writable = MAP_PRIVATE | MAP_ANONYMOUS, 0x3

    def says(calls: tuple[Call, ...], name: str, *arguments: int) -> int:
        return answer(calls, name, *arguments, machine=machine)

    assert [says(STRICT, "write", fd) == ALLOW for fd in (0, 1, 2, 5, 6, 7)] == [False, False, True, False, True, False]
    assert [says(STRICT, "read", fd) == ALLOW for fd in (0, 2, 5, 6)] == [False, False, True, False]
    assert says(STRICT, "mmap", 0, 4096, writable, private) == ALLOW
    assert says(STRICT, "mmap", 0, 4096, writable, private | 0x20000) == ALLOW
    assert says(WIDE, "mmap", 0, 4096, writable | PROT_EXEC, private) == TRAP
    assert says(STRICT, "mmap", 0, 4096, writable, MAP_PRIVATE) == TRAP
    assert says(STRICT, "mmap", 0, 4096, writable, MAP_SHARED | MAP_ANONYMOUS) == TRAP
    assert says(STRICT, "mprotect", 0, 4096, writable) == ALLOW
    assert says(STRICT, "mprotect", 0, 4096, PROT_EXEC | 1) == TRAP
    assert says(WIDE, "mprotect", 0, 4096, PROT_EXEC | 1) == ALLOW
    assert says(STRICT, "futex", 0, 9 | 128 | 256) == ALLOW
    assert says(STRICT, "futex", 0, 6 | 128) == TRAP
    assert says(STRICT, "rt_sigprocmask") == ERRNO
    assert says(STRICT, "tgkill", 1, 1, signal.SIGABRT) == ALLOW
    assert says(STRICT, "tgkill", 1, 1, signal.SIGKILL) == TRAP


@pytest.mark.parametrize("machine", list(MACHINES))
def test_a_pool_may_start_threads_and_never_processes(machine: str) -> None:
    """With more than two threads the flags of a thread pass, those of a fork die, and clone3 is sent back to clone."""
    assert {call.name for call in engine_calls(BELLS, threads=2, generates_code=True)} & {"clone", "clone3"} == set()
    assert answer(STRICT, "clone", THREAD_FLAGS, machine=machine) == TRAP
    assert answer(WIDE, "clone", THREAD_FLAGS, machine=machine) == ALLOW
    assert answer(WIDE, "clone", signal.SIGCHLD, machine=machine) == TRAP
    assert answer(WIDE, "clone", THREAD_FLAGS | 0x1000_0000, machine=machine) == TRAP
    assert answer(WIDE, "clone3", machine=machine) == ERRNO | ENOSYS
    assert errno.ENOSYS == ENOSYS


def test_every_entry_has_its_reason_and_its_number() -> None:
    """Names and numbers are unique for each machine, every entry says why it is there, and the list stays short."""
    assert len({call.name for call in WIDE}) == len(WIDE) <= 40
    for machine in ("x86_64", "aarch64"):
        numbers = [number for call in WIDE if (number := getattr(call, machine)) is not None]
        assert len(set(numbers)) == len(numbers)
    assert all(len(call.reason.split()) >= 3 for call in WIDE)
    assert not {"rt_sigaction", "rt_sigreturn", "sigaltstack"} & {call.name for call in WIDE}


def check_numbers(calls: Iterable[Call]) -> None:
    """Numbers of x86-64 against the kernel's headers, where they are installed; a skip where they are not."""
    if os.uname().machine != "x86_64":
        pytest.skip("the header read here is that of x86-64")
    for path in (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")):
        if path.exists():
            break
    else:
        pytest.skip("no kernel headers here")
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", path.read_text())}
    ours = {call.name: call.x86_64 for call in calls if call.x86_64 is not None}
    assert ours == {name: known[name] for name in ours}


def test_numbers_are_those_of_the_kernels_headers() -> None:
    """Where the kernel's headers are installed, their numbers are ours."""
    check_numbers(WIDE)


def check_report(report: dict[str, Any], *, text: bool = True, few: bool = False) -> None:
    """What the probe must have found, wherever it ran; ``text``: of a text sandbox's programs too; ``few``: of two of
    them, and of some attempts of each kind."""
    free, engine = report["free"], report["engine"]
    assert free["tried"] == len(free["back"]) == engine["tried"] >= (20 if few else 47)
    assert (set(engine["back"]), engine["odd"]) == (WITHIN, {})
    assert (report["code"], report["pool"], report["pool fork"]) == (0, 0, -signal.SIGSYS)
    programs = {"worker", "grammar"} if few else WITHIN_TEXT.keys()
    assert report["text"].keys() == (programs if text else set())
    for who, found in report["text"].items():
        assert found["tried"] >= (30 if few else 60)
        assert (who, set(found["back"]), found["odd"]) == (who, WITHIN_TEXT[who] | ALL_OF_TEXT, {})


def test_one_more_call_ends_the_process(root: Path) -> None:
    """Each of some forty calls comes back before lock-down and is the last one after it; the listed ones go on. So it
    is with the lists of a text sandbox's programs."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-s", str(PROBE)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environment)
    check_report(json.loads(done.stdout))


def test_a_machine_without_a_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor whose numbers nobody wrote down the engine does not start."""
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", "6", "1", "riscv64")))
    with pytest.raises(LockdownError, match="riscv64"):
        lock_down(STRICT)


def test_code_without_a_file_is_seen() -> None:
    """Executable pages of no file are generated code; the kernel's own pages and libraries are not."""
    library = "7f01-7f02 r-xp 00001000 08:01 77                         /usr/lib/libc.so.6\n"
    kernel = "7f05-7f06 r-xp 00000000 00:00 0                          [vdso]\n"
    heap = "7f07-7f08 rw-p 00000000 00:00 0 \n"
    assert not generates_code([library, kernel, heap])
    assert generates_code([library, "7f09-7f0a rwxp 00000000 00:00 0 \n"])


def test_the_operator_reads_what_a_breach_is() -> None:
    """A death by SIGSYS is told in words, from inside a sandbox and without one; another death says nothing of it."""
    for status in (128 + signal.SIGSYS, -signal.SIGSYS):
        assert "SIGSYS" in describe_status(status)
        assert "made a system call beyond its lock-down" in describe_status(status)
    assert "lock-down" not in describe_status(128 + signal.SIGSEGV)
