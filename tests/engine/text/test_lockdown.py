"""Lock-down of a text sandbox's four programs: the lists, and real programs under them (inside gVisor, each attempt of
the probe too: tests/isolation)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.sandbox.allowed_calls import LOW_WORD, Bells, Call
from engine.sandbox.filter import ALLOW, ERRNO, MACHINES, TRAP, compile_filter
from engine.text.allowed_calls import ENOENT, FORK_FLAGS, forker_calls, grammar_calls, keeper_calls, worker_calls
from isolation.ipc.channel import Channel
from isolation.ipc.engine import Drain
from isolation.ipc.grammar import Masks, MaskState
from isolation.ipc.messages import Failed, TextReady
from isolation.ipc.text import Encoded
from tests.engine.sandbox.test_lockdown import check_numbers, run
from tests.engine.text.test_grammar_process import opened
from tests.engine.text.test_process import PATIENCE_S, chat, configured, next_message, started

WORKER = worker_calls(Bells(5, 6), Bells(8, 9), 10)
KEEPER = keeper_calls(7)
FORKER = forker_calls(4)
GRAMMAR = grammar_calls()
LISTS = {"worker": WORKER, "keeper": KEEPER, "forker": FORKER, "grammar": GRAMMAR}

ASKING = (
    "{% set c = messages[0].content %}"
    "{% if c == 'encoding' %}{{ c.encode('iso2022_jp_3') }}{% endif %}"
    "{% if c == 'clock' %}{{ strftime_now('%c %Z') }}{% endif %}"
    "{% if c == 'mistake' %}{{ c.nothing.at.all }}{% endif %}"
    "{{ c }}"
)
"""A chat template that asks for what Python loads when it is first wanted."""


class Serving(NamedTuple):
    """A worker that serves, and two of the processes behind it."""

    channel: Channel
    worker: subprocess.Popen[str]
    keeper: int
    forker: int


def says(calls: tuple[Call, ...], name: str, *arguments: int, machine: str = "x86_64") -> int:
    """What a list says to a call of any of the four with these arguments."""
    call = next(call for some in LISTS.values() for call in some if call.name == name)
    number = call.x86_64 if machine == "x86_64" else call.aarch64
    assert number is not None
    return run(compile_filter(calls, machine), number, *arguments, arch=MACHINES[machine].audit_arch)


@pytest.mark.parametrize("machine", list(MACHINES))
def test_each_program_may_what_it_does(machine: str) -> None:
    """Processes are forked by the forker alone, pipes made and processes ended by the keeper alone; the worker writes
    to its bells, clocks its templates, and touches nobody."""

    def who(name: str, *arguments: int) -> set[str]:
        return {one for one, calls in LISTS.items() if says(calls, name, *arguments, machine=machine) == ALLOW}

    assert who("clone", FORK_FLAGS) == {"forker"}
    assert who("clone", FORK_FLAGS | 0x1000_0000) == set()
    assert who("clone", 17) == set()
    assert who("pipe2", 0, 0o2000000) == {"keeper"}
    assert who("kill", 7, 9) == {"keeper"}
    assert who("kill", 7, 10) == set()
    assert who("sendmsg", 3) == {"keeper", "forker"}
    assert who("ioctl", 3, 0x5421) == {"keeper"}
    assert who("ioctl", 3, 0x5413) == set()
    assert who("setitimer", 0) == {"worker"}
    assert who("setitimer", 2) == {"forker", "grammar"}
    assert (who("rt_sigaction", 14), who("rt_sigaction", 17)) == ({"worker"}, {"forker"})
    assert (who("wait4", 0, 0, 1), who("wait4", 0, 0, 0)) == ({"worker", "keeper", "forker"}, set())
    assert who("rt_sigaction", 31) == set()
    assert who("seccomp", 1) == {"forker"}
    assert who("prlimit64", 0, 9) == {"worker", "forker", "grammar"}
    assert who("prlimit64", 0, 7) == who("prlimit64", 1, 9) == set()
    assert [who("write", fd) >= {"worker"} for fd in (1, 2, 5, 6, 8, 9)] == [False, True, False, True, False, True]
    assert [who("read", fd) >= {"worker"} for fd in (0, 5, 6, 8, 9)] == [False, True, False, True, False]
    assert (who("pread64", 10), who("pread64", 7), who("pread64", 4)) == ({"worker"}, {"keeper"}, {"forker"})


@pytest.mark.parametrize("machine", list(MACHINES))
@pytest.mark.parametrize("name", LISTS)
def test_files_are_gone_and_none_is_written(name: str, machine: str) -> None:
    """Opening to read seems to find nothing; opening to write, create, cut or append is the end."""
    cloexec, folder = 0o2000000, 0o200000
    for flags in (0, cloexec, cloexec | folder):
        assert says(LISTS[name], "openat", 0, 0, flags, machine=machine) == ERRNO | ENOENT
    for flags in (1, 2, cloexec | 0o1, cloexec | 0o100, cloexec | 0o1000, cloexec | 0o2000):
        assert says(LISTS[name], "openat", 0, 0, flags, machine=machine) == TRAP
    assert says(LISTS[name], "newfstatat", machine=machine) == ERRNO | ENOENT


def test_a_grammar_has_nothing_that_its_forker_has_not() -> None:
    """Its list lies on top of the forker's: what is on it alone would be forbidden all the same. Memory that others map
    is on the forker's alone, which a new process uses once, before its own list holds."""
    (mapping,) = {call for call in GRAMMAR if call.name == "mmap"}
    assert set(GRAMMAR) - {mapping} < set(FORKER)
    shared, private, anonymous, writable = 0x01, 0x02, 0x20, 0x3
    for flags, who in ((private | anonymous, set(LISTS)), (shared, {"keeper", "forker"}), (shared | anonymous, set())):
        assert {name for name, calls in LISTS.items() if says(calls, "mmap", 0, 0, writable, flags) == ALLOW} == who
        assert all(says(calls, "mmap", 0, 0, 0x5, flags) == TRAP for calls in LISTS.values())


def test_every_entry_has_its_reason_and_its_number() -> None:
    """Names and numbers are unique for each machine, every entry says why it is there, the lists stay short; nobody
    makes sockets or code, the keeper alone makes memory that others see, and only the worker and the forker have a
    handler to return from."""
    for name, calls in LISTS.items():
        assert len({call.name for call in calls}) == len(calls) <= 45
        for machine in ("x86_64", "aarch64"):
            numbers = [number for call in calls if (number := getattr(call, machine)) is not None]
            assert len(set(numbers)) == len(numbers)
        assert all(len(call.reason.split()) >= 3 for call in calls)
        names = {call.name for call in calls}
        assert not names & {"socket", "connect", "execve", "ptrace", "unlinkat", "fcntl", "dup"}
        assert ("memfd_create" in names) == (name == "keeper")
        assert ("rt_sigreturn" in names) == (name in ("worker", "forker"))
        assert all(argument.mask <= LOW_WORD for call in calls for argument in call.arguments)


def test_numbers_are_those_of_the_kernels_headers() -> None:
    """Where the kernel's headers are installed, their numbers are ours."""
    check_numbers(call for calls in LISTS.values() for call in calls)


def filters(pid: int) -> int:
    """How many filters of system calls hold a process."""
    return int(re.findall(r"Seccomp_filters:\t(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


def children(pid: int) -> list[int]:
    """Processes that this one forked."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def serving(tmp_path: Path, root: Path, model: Path) -> Iterator[Serving]:
    """A worker with a grammar that is followed, and the processes behind it."""
    with started(tmp_path, root) as (channel, process):
        assert isinstance(configured(channel, model), TextReady)
        channel.send(opened(1, "[ab]*"))
        assert isinstance(next_message(channel), Masks)
        (keeper,) = children(process.pid)
        (forker,) = children(keeper)
        yield Serving(channel, process, keeper, forker)


def test_every_process_of_a_serving_worker_is_locked(tmp_path, root, mini_dir) -> None:
    """The worker, the keeper and the forker have a filter, a grammar's process has two, before a tenant's text comes;
    a plain process of the same machine, the control, has fewer."""
    own = filters(os.getpid())
    with serving(tmp_path, root, mini_dir) as (_channel, process, keeper, forker):
        end = time.monotonic() + PATIENCE_S
        assert [filters(pid) - own for pid in (process.pid, keeper, forker)] == [1, 1, 1]
        # The second waits for a grammar: it may be on its way still.
        while (found := [filters(pid) - own for pid in children(forker)]) != [2, 2]:
            assert time.monotonic() < end, found
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("whose", "said"),
    [
        ("grammar", "a grammar's process made a system call beyond its lock-down and was ended"),
        ("keeper", "the keeper of grammars has ended: it made a system call beyond its lock-down"),
        ("forker", "the forker of grammars has ended: it made a system call beyond its lock-down"),
    ],
)
def test_a_breach_of_any_process_is_told(whose: str, said: str, tmp_path, root, mini_dir) -> None:
    """SIGSYS ends it: a line says so, and of an end by another signal (control) nothing is said of the kind. A
    grammar's process ends alone; without its keeper or forker the worker ends too, to be booted anew."""
    for number in (signal.SIGSYS, signal.SIGKILL):
        with serving(tmp_path, root, mini_dir) as (channel, process, keeper, forker):
            os.kill({"keeper": keeper, "forker": forker, "grammar": children(forker)[0]}[whose], number)
            if whose == "grammar":
                broken = next_message(channel)
                assert isinstance(broken, Masks)
                assert broken.states[0] == MaskState.BROKEN
                channel.send(Drain())
            assert process.wait(PATIENCE_S) == (0 if whose == "grammar" else 1)
            assert process.stderr is not None
            assert (said in process.stderr.read()) == (number == signal.SIGSYS)


def test_a_template_that_wants_more_is_refused_and_the_worker_lives(tmp_path, root, tiny) -> None:
    """An encoding that nobody has loaded, the local time, a mistake with its trace: typed answers from one process."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes(tiny("<x>"))
    (model / "chat_template.jinja").write_text(ASKING)
    with started(tmp_path, root) as (channel, process):
        assert isinstance(configured(channel, model), TextReady)
        answers = {}
        for number, content in enumerate(("encoding", "mistake", "clock", "ok")):
            channel.send(chat(number, content))
            answers[content] = next_message(channel)
        assert isinstance(answers["encoding"], Failed)
        assert "iso2022_jp_3" in answers["encoding"].reason
        assert isinstance(answers["mistake"], Failed)
        assert isinstance(answers["clock"], Encoded)
        assert answers["ok"] == Encoded(3, array("I", list(b"ok")))
        assert process.poll() is None
