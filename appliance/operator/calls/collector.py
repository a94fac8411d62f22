"""Collects the system calls of a program that reports them: ``python -m appliance.operator.calls.collector REPORT PLACE
COMMAND...``.

It listens at PLACE, starts COMMAND (``appliance.operator.calls.observed``), takes the listener of each process that
comes to its lock-down, answers every report, and writes what it saw to REPORT, as JSON, once all of them have ended.
Its exit status is the command's, 128 and the signal where one ended it. SIGTERM ends the command.

A process of its own, and the parent of what it looks into: the kernel lets a parent do that, and the load that is put
on the program shall not wait for these reports.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.operator.calls import notifications
from appliance.operator.calls.call_list import CallList, ListedCall, decode
from appliance.operator.calls.call_names import name_of
from appliance.operator.calls.describing import describe, files_of, libraries_near, process_of, thread_name, threads_of
from isolation.errors import ProcessError
from isolation.host.process import Child, start

EXIT_USAGE = 2
EXIT_REFUSED = 5
"""The kernel lets this process not look into the command."""

MAX_TOLD_BYTES = 1 << 20
"""Bytes of one process's word at its lock-down: lists, some 10 KiB."""

MAX_KINDS = 4_096
"""Different calls outside of a list that are told apart; more are counted under one line."""

LISTENER_TIMEOUT_S = 10.0
"""Seconds between a process's word and its filter."""

LEFT_TIMEOUT_S = 10.0
"""Seconds for the processes behind a command that has ended."""

LOOK_S = 0.0005
"""Seconds between two looks for a filter."""

POLL_S = 0.1
"""Seconds between two looks whether the command lives."""

ANOTHER = "a call of another architecture"
OVERFLOW = "further kinds"

_ARCHES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL


@dataclass(slots=True)
class Outside:
    """Calls of one kind that a list does not have."""

    number: int
    near: list[str]
    """Libraries that the first of them came through, as far as its stack tells."""
    count: int = 0
    threads: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Seen:
    """What the processes of one program did after lock-down."""

    entries: dict[int, ListedCall]
    complete: bool
    """Whether every call was reported, those on the list too."""
    processes: set[int] = field(default_factory=set)
    threads: Counter[str] = field(default_factory=Counter)
    """Threads at lock-down, by name."""
    files: Counter[str] = field(default_factory=Counter)
    """What descriptors were then."""
    used: Counter[str] = field(default_factory=Counter)
    outside: dict[tuple[str, str], Outside] = field(default_factory=dict)

    def to_json(self, program: str) -> dict[str, Any]:
        """As the report holds it."""
        rows = [
            {
                "name": name,
                "number": one.number,
                "arguments": detail,
                "count": one.count,
                "threads": dict(one.threads),
                "near": one.near,
            }
            for (name, detail), one in sorted(self.outside.items())
        ]
        unused = [one.name for one in self.entries.values() if one.name not in self.used] if self.complete else None
        return {
            "program": program,
            "processes": len(self.processes),
            "threads": dict(self.threads.most_common()),
            "files": dict(self.files.most_common()),
            "used": dict(self.used.most_common()) if self.complete else None,
            "outside": rows,
            "unused": unused,
        }


@dataclass(frozen=True, slots=True)
class ReportSource:
    """One listener: the process that made it, and the lists of that process and of those that it forks."""

    fd: int
    pid: int
    own: Seen
    forked: Seen
    narrowed: set[int] = field(default_factory=set)
    """Forked processes that have asked for their own filter: from there on their list is ``forked``."""


class CallCollector:
    """Everything that was seen, by program, and the listeners that go on telling."""

    def __init__(self, machine: str) -> None:
        self.seen: dict[str, Seen] = {}
        self.sources: dict[int, ReportSource] = {}
        self._machine = machine
        self._processes: dict[int, int] = {}

    def admit(self, told: dict[str, Any]) -> None:
        """Take the listener of a process that has told its lists.

        Raises:
            OSError: it may not be looked into.
            TimeoutError: it put on no filter.
        """
        pid = int(told["pid"])
        fd = _taken(pid)
        if fd is None:
            return  # It has ended, and says why itself.
        lists = [self._of(one, everything=bool(told["everything"])) for one in decode(told["lists"])]
        lists[0].processes.add(pid)
        lists[0].threads.update(threads_of(pid))
        lists[0].files.update(files_of(pid))
        self._processes[pid] = pid
        self.sources[fd] = ReportSource(fd, pid, lists[0], lists[-1])

    def _of(self, calls: CallList, *, everything: bool) -> Seen:
        """The account of a program; descriptors in its list are those of its latest process."""
        seen = self.seen.setdefault(calls.program, Seen({}, everything))
        seen.entries = calls.by_number()
        return seen

    def serve(self, source: ReportSource) -> None:
        """Take one report, note it and answer it."""
        report = notifications.receive(source.fd)
        if report is None:
            return
        if name_of(self._machine, report.number) == "seccomp" and report.arguments[0] == notifications.TAKEN_MARK:
            notifications.answer(source.fd, report, 0)
            return
        process = self._process(report.thread)
        seen = source.forked if process in source.narrowed else source.own
        entry = seen.entries.get(report.number) if report.arch == _ARCHES[self._machine] else None
        if entry is not None and entry.allows(report.arguments):
            seen.used[entry.name] += 1
            answer = self._narrow(source, process) if entry.name == "seccomp" else entry.answer
            if answer is not None:
                notifications.answer(source.fd, report, answer)
                return
        else:
            self._note(seen, report)
        notifications.let_through(source.fd, report)

    def _narrow(self, source: ReportSource, process: int) -> int:
        """A forked process puts its own filter on top: it seems to succeed, and its list is judged by here, because the
        kernel gives a process one listener."""
        source.narrowed.add(process)
        source.forked.processes.add(process)
        return 0

    def _process(self, thread: int) -> int:
        """The process of a thread. Numbers of ended threads are given again, and the processes here live on."""
        if thread not in self._processes:
            self._processes[thread] = process_of(thread)
        return self._processes[thread]

    def _note(self, seen: Seen, report: notifications.Notification) -> None:
        name = ANOTHER
        if report.arch == _ARCHES[self._machine]:
            name = name_of(self._machine, report.number)
        key = (name, describe(report.thread, name, report.arguments))
        if key not in seen.outside and len(seen.outside) >= MAX_KINDS:
            key = (name, OVERFLOW)
        if key not in seen.outside:
            seen.outside[key] = Outside(report.number, libraries_near(report.thread))
        one = seen.outside[key]
        one.count += 1
        one.threads[thread_name(report.thread)] += 1

    def close(self, fd: int) -> None:
        """Forget a listener whose processes have ended."""
        del self.sources[fd]
        os.close(fd)

    def to_json(self) -> list[dict[str, Any]]:
        """Everything that was seen."""
        return [seen.to_json(program) for program, seen in self.seen.items()]


def _taken(pid: int) -> int | None:
    """A copy of the listener that a process is about to make; None when it has ended."""
    deadline = time.monotonic() + LISTENER_TIMEOUT_S
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        while time.monotonic() < deadline:
            try:
                found = notifications.find_listener(pid)
            except FileNotFoundError:
                return None
            if found is not None:
                return notifications.take_descriptor(pidfd, found)
            if select.select([pidfd], [], [], LOOK_S)[0]:
                return None
    finally:
        os.close(pidfd)
    raise TimeoutError(f"process {pid} told its list and put on no filter")


def _listening(place: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(place)
    listener.listen()
    return listener


def _reap() -> None:
    """Reap what the command left behind, which is this process's since then."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_by(pidfd: int) -> None:
    """End the command, if it is still there: its number may be another's by then."""
    with suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)


def _collect(collector: CallCollector, listener: socket.socket, child: Child, pidfd: int) -> None:
    """Answer reports until the command and all that it left behind have ended.

    Raises:
        OSError, TimeoutError: as ``CallCollector.admit``.
    """
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(pidfd, select.POLLIN)
    until: float | None = None
    while until is None or (collector.sources and time.monotonic() < until):
        if until is not None:
            _reap()
        for fd, event in poll.poll(POLL_S * 1_000):
            if fd == pidfd:
                until = time.monotonic() + LEFT_TIMEOUT_S
                poll.unregister(pidfd)
                child.poll()  # A listener ends with the last process that is not reaped.
            elif fd == listener.fileno():
                connection, _ = listener.accept()
                with connection:
                    told = connection.recv(MAX_TOLD_BYTES)
                known = set(collector.sources)
                collector.admit(json.loads(told))
                for new in collector.sources.keys() - known:
                    poll.register(new, select.POLLIN)
            elif event & select.POLLIN:
                collector.serve(collector.sources[fd])
            elif event & _ENDED:
                poll.unregister(fd)
                collector.close(fd)


def main(arguments: Sequence[str]) -> int:
    """Collect the calls of one command; gives its exit status."""
    if len(arguments) < 3:
        sys.stderr.write("usage: collector REPORT PLACE COMMAND...\n")
        return EXIT_USAGE
    report, place, *command = arguments
    collector = CallCollector(os.uname().machine)
    notifications.adopt_orphans()
    with _listening(place) as listener:
        try:
            child = start(command, env=os.environ, stdio=sys.stderr.fileno())
        except ProcessError as error:
            sys.stderr.write(f"collector: {error}\n")
            return EXIT_USAGE
        pidfd = os.pidfd_open(child.pid)
        signal.signal(signal.SIGTERM, lambda *_: _end_by(pidfd))
        try:
            _collect(collector, listener, child, pidfd)
        except (OSError, TimeoutError) as error:
            sys.stderr.write(f"collector: the program's calls cannot be seen: {error}\n")
            return EXIT_REFUSED
        finally:
            child.end(grace_s=0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.close(pidfd)
    status = child.poll()
    assert status is not None
    Path(report).write_text(json.dumps({"status": status, "programs": collector.to_json()}), encoding="utf-8")
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
