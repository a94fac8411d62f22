"""The keeper of grammars by itself: a clock of the test's, and processes that do nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator

import pytest

from engine.sandbox.attach import receive_packet, send_packet, socket_pair
from engine.sandbox.shared_pipe import AREA_BYTES, SharedMemory, SharedPipe, memory_by_descriptor
from engine.text.grammar_child import COMPILE_CPU_S, COMPILED, REFUSED, RESULT, ROW
from engine.text.grammar_keeper import (
    COMPILE_WALL_S,
    HEAVY_AFTER_S,
    KEPT_S,
    MASK_WALL_S,
    TENANT_GRAMMARS,
    TENANT_QUEUE,
    TURN_S,
    Keeper,
)
from engine.text.grammar_process import MAX_UNSENT_BYTES, FrameReader, KeeperLoop
from engine.text.grammar_process_handle import MAX_COMMAND_BYTES, GrammarProcess
from engine.text.sandbox_memory import SandboxMemory
from isolation.ipc.codec import encode
from isolation.ipc.doorbell import create_pipe
from isolation.ipc.grammar import Advance, CloseGrammar, GrammarKind, Masks, MaskState, OpenGrammar, Whitespace
from isolation.ipc.messages import Failed, FailureCode
from isolation.ipc.sweeping import Rounds


class Sleepers:
    """Forks that are sleeping programs; the test holds the other ends of their pipes."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ends: list[SharedPipe] = []
        self.program = ["sleep", "600"]

    def fork(self) -> SharedPipe:
        """One more."""
        commands_in, commands_out = create_pipe()
        results_in, results_out = create_pipe()
        memfd = memory_by_descriptor()
        self.ends.append(SharedPipe.opened(os.dup(memfd), commands_in, results_out, first=False))
        self.processes.append(subprocess.Popen(self.program))
        return SharedPipe.opened(memfd, results_in, commands_out, first=True)

    def halted(self, keeper: Keeper) -> tuple[bool, ...]:
        """Which of the grammars' processes stand still, once the system has done what the keeper asked it."""
        grammars = list(keeper.processes.values())
        until = time.monotonic() + 5
        while True:
            states = tuple(stands_still(grammar.pid) for grammar in grammars)
            if states == tuple(grammar.halted for grammar in grammars):
                return states
            assert time.monotonic() < until, "the system never did what the keeper says it did"


def stands_still(pid: int) -> bool:
    """Whether a process is stopped (proc(5), the state in ``stat``)."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    """Ended at last."""
    made = Sleepers()
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
    for end in made.ends:
        end.close()


def test_heavy_compilations_have_turns(sleepers: Sleepers) -> None:
    """Two grammars that compile for long never run together, each runs a third of the time, and for a third nobody
    does; before, both run. One that has compiled goes on for good."""
    now = [0.0]
    keeper = Keeper(sleepers.fork, 4, clock=lambda: now[0])
    for number in range(2):
        keeper.take(OpenGrammar(number + 1, bytes([number]) * 16, GrammarKind.REGEX, b"a"))
    for process in sleepers.processes:
        keeper.forked(process.pid)
    keeper.tick()
    assert sleepers.halted(keeper) == (False, False)
    now[0] = HEAVY_AFTER_S + 0.01
    seen = []
    for _ in range(9):
        now[0] += TURN_S
        keeper.tick()
        seen.append(sleepers.halted(keeper))
    assert sorted(set(seen)) == [(False, True), (True, False), (True, True)]
    assert [seen.count(one) for one in set(seen)] == [3, 3, 3]
    while not sleepers.halted(keeper)[0]:
        now[0] += TURN_S
        keeper.tick()
    first = next(process for process in keeper.processes.values() if process.pid == sleepers.processes[0].pid)
    sleepers.ends[0].write(RESULT.pack(COMPILED, 1, 0, 0, 0))
    keeper.read(first)
    for _ in range(4):
        assert not sleepers.halted(keeper)[0]
        now[0] += TURN_S
        keeper.tick()


@pytest.mark.parametrize(("program", "code"), [("sleep", FailureCode.DEADLINE), ("spin", FailureCode.TOO_LONG)])
def test_a_late_compilation_is_told_by_what_it_got(sleepers: Sleepers, program: str, code: FailureCode) -> None:
    """A compilation that is out of time without having had the processor is the machine's fault, and may be asked for
    again; one that had it is too complex."""
    now = [0.0]
    if program == "spin":
        sleepers.program = [sys.executable, "-c", "while True: pass"]
    keeper = Keeper(sleepers.fork, 4, clock=lambda: now[0])
    keeper.take(OpenGrammar(1, b"t" * 16, GrammarKind.REGEX, b"a"))
    keeper.forked(sleepers.processes[0].pid)
    if program == "spin":
        until = time.monotonic() + 30
        while _processor_s(sleepers.processes[0].pid) < COMPILE_CPU_S:
            assert time.monotonic() < until
            time.sleep(0.02)
    now[0] = COMPILE_WALL_S + 0.01
    keeper.tick()
    (answer,) = keeper.answers
    assert isinstance(answer, Failed)
    assert (answer.request, answer.code) == (1, code)


def _processor_s(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def test_a_grammar_that_must_not_be_kept_goes_with_its_last_request(sleepers: Sleepers) -> None:
    """Its process is ended when nobody follows it any more, and also when one of its requests asked for that after
    another; an ordinary one stays (control)."""
    keeper = Keeper(sleepers.fork, 4)
    for number, kept in enumerate((True, False)):
        tenant = bytes([number]) * 16
        for request in (10 * number + 1, 10 * number + 2):
            keep = kept or request == 11
            keeper.take(OpenGrammar(request, tenant, GrammarKind.REGEX, b"a", keep=keep))
        keeper.forked(sleepers.processes[number].pid)
        (process,) = [one for one in keeper.processes.values() if one.tenant == tenant]
        sleepers.ends[number].write(RESULT.pack(COMPILED, 10 * number + 1, 0, 0, 0))
        keeper.read(process)
        keeper.take(CloseGrammar(10 * number + 1))
        assert not process.ended
        keeper.take(CloseGrammar(10 * number + 2))
        assert process.ended is not kept
    assert len(keeper.processes) == 1


def test_a_schema_of_other_whitespace_is_another_grammar(sleepers: Sleepers) -> None:
    """Compact and flexible forms of one schema never share what was compiled; two compact ones do (control)."""
    keeper = Keeper(sleepers.fork, 4)
    for request, whitespace in enumerate((Whitespace.COMPACT, Whitespace.COMPACT, Whitespace.FLEXIBLE), start=1):
        keeper.take(OpenGrammar(request, b"t" * 16, GrammarKind.JSON_SCHEMA, b"{}", whitespace=whitespace))
    (process,) = keeper.processes.values()
    keeper.forked(sleepers.processes[0].pid)
    sleepers.ends[0].write(RESULT.pack(COMPILED, 1, 0, 0, 0))
    keeper.read(process)
    assert [one.requests for one in keeper.processes.values()] == [{1, 2}, {3}]


def test_users_of_a_tenant_share_its_account_and_no_grammar(sleepers: Sleepers) -> None:
    """One grammar of many users is compiled for each, one after the other, and no user finds another's; but they have
    as many processes and places in the queue as a tenant without users. One user finds its own (control)."""
    keeper = Keeper(sleepers.fork, 4)

    def opened(request: int, user: int) -> None:
        keeper.take(OpenGrammar(request, b"t" * 16, GrammarKind.REGEX, b"a", user=bytes([user]) * 16))

    for user in range(1, TENANT_QUEUE + 3):
        opened(user, user)
    # One compiles, as many wait as may, and the last is refused.
    assert len(keeper.processes) == 1
    assert [(one.request, one.code) for one in keeper.answers if isinstance(one, Failed)] == [
        (TENANT_QUEUE + 2, FailureCode.OVERLOADED)
    ]
    for number in range(TENANT_GRAMMARS):
        keeper.forked(sleepers.processes[number].pid)
        process = keeper.processes[next(reversed(keeper.processes))]
        sleepers.ends[number].write(RESULT.pack(COMPILED, number + 1, 0, 0, 0))
        keeper.read(process)
    assert [one.requests for one in keeper.processes.values()] == [{n} for n in range(1, TENANT_GRAMMARS + 1)]
    opened(100, 1)
    assert next(iter(keeper.processes.values())).requests == {1, 100}
    keeper.take(OpenGrammar(101, b"o" * 16, GrammarKind.REGEX, b"a"))
    assert len(keeper.processes) == TENANT_GRAMMARS + 1


def test_a_grammar_that_nobody_follows_is_let_go_after_a_while(sleepers: Sleepers) -> None:
    """One that was used a moment ago stays, one that a request follows stays however long that takes (control), and
    one that nobody has followed for longer than it is kept for is ended."""
    now = [100.0]
    keeper = Keeper(sleepers.fork, 4, clock=lambda: now[0])
    keeper.take(OpenGrammar(1, b"t" * 16, GrammarKind.REGEX, b"a"))
    keeper.forked(sleepers.processes[0].pid)
    (process,) = keeper.processes.values()
    sleepers.ends[0].write(RESULT.pack(COMPILED, 1, 0, 0, 0) + RESULT.pack(ROW, 1, 0, 0, 4) + bytes(4))
    keeper.read(process)
    now[0] += 2 * KEPT_S
    keeper.tick()
    assert not process.ended
    keeper.take(CloseGrammar(1))
    now[0] += KEPT_S
    keeper.tick()
    assert not process.ended
    now[0] += 1.0
    keeper.tick()
    assert process.ended
    assert not keeper.processes


def test_where_memory_gets_scarce_who_has_most_gives_one_up(sleepers: Sleepers) -> None:
    """With room every grammar stays (control). Without, one more takes the place of the unused one of the tenant with
    the most, however lately that was used; and where all are followed it is refused as something to ask for again."""
    scarce = [False]
    keeper = Keeper(sleepers.fork, 4, scarce=lambda: scarce[0])

    def opened(request: int, tenant: bytes, source: bytes, closed: bool = True) -> None:
        keeper.take(OpenGrammar(request, tenant * 16, GrammarKind.REGEX, source))
        place = len(sleepers.processes) - 2  # The last one is the spare.
        keeper.forked(sleepers.processes[place].pid)
        process = keeper.processes[next(reversed(keeper.processes))]
        sleepers.ends[place].write(RESULT.pack(COMPILED, request, 0, 0, 0))
        keeper.read(process)
        if closed:
            keeper.take(CloseGrammar(request))

    for request, tenant in enumerate((b"a", b"b", b"b"), start=1):
        opened(request, tenant, b"x%d" % request)
    assert [process.tenant[:1] for process in keeper.processes.values()] == [b"a", b"b", b"b"]
    scarce[0] = True
    opened(4, b"c", b"x4", closed=False)
    assert [process.tenant[:1] for process in keeper.processes.values()] == [b"a", b"b", b"c"]
    opened(5, b"d", b"x5", closed=False)
    opened(6, b"e", b"x6", closed=False)
    assert [process.tenant[:1] for process in keeper.processes.values()] == [b"c", b"d", b"e"]
    keeper.take(OpenGrammar(7, b"f" * 16, GrammarKind.REGEX, b"x7"))
    (answer,) = keeper.answers
    assert isinstance(answer, Failed)
    assert (answer.request, answer.code) == (7, FailureCode.OVERLOADED)


def test_a_process_that_is_gone_before_it_was_announced_ends_nobody(sleepers: Sleepers) -> None:
    """A refused grammar's process ends at once, and its end may be heard before its pid is told: the keeper goes on and
    serves the next."""
    keeper = Keeper(sleepers.fork, 4)
    keeper.take(OpenGrammar(1, b"a" * 16, GrammarKind.REGEX, b"("))
    sleepers.ends.pop(0).close()
    keeper.read(next(iter(keeper.processes.values())))
    assert not keeper.processes
    sleepers.processes[0].kill()
    sleepers.processes[0].wait()
    keeper.forked(sleepers.processes[0].pid)
    keeper.take(OpenGrammar(2, b"a" * 16, GrammarKind.REGEX, b"a"))
    assert len(keeper.processes) == 1


def _hostile(sleepers: Sleepers, keeper: Keeper) -> GrammarProcess:
    """The grammar process of request 1, whose other end is the test's."""
    keeper.take(OpenGrammar(1, b"a" * 16, GrammarKind.REGEX, b"a"))
    keeper.forked(sleepers.processes[0].pid)
    (process,) = keeper.processes.values()
    return process


@pytest.mark.parametrize(
    "told",
    [
        RESULT.pack(REFUSED, 1, 0, int(FailureCode.INVALID), 0) * 2,
        RESULT.pack(REFUSED, 1, 0, int(FailureCode.INVALID), 0) + RESULT.pack(COMPILED, 1, 0, 0, 0),
        RESULT.pack(REFUSED, 1, 0, 250, 0),
        RESULT.pack(COMPILED, 1, 0, 0, 0) + RESULT.pack(ROW, 1, 0, 250, 4) + bytes(4),
        RESULT.pack(250, 1, 0, 0, 0),
        RESULT.pack(REFUSED, 1, 0, int(FailureCode.INVALID), 60_000) + b"\n\xff" * 30_000,
    ],
    ids=("refused twice", "compiled after its end", "no code", "no state", "no tag", "a reason that fits no frame"),
)
def test_no_result_ends_the_keeper(sleepers: Sleepers, told: bytes) -> None:
    """A process that a tenant's grammar has taken over may write anything: its own request fails, once, and the keeper
    serves the next grammar."""
    keeper = Keeper(sleepers.fork, 4)
    process = _hostile(sleepers, keeper)
    sleepers.ends[0].write(told)
    keeper.read(process)
    keeper.take(OpenGrammar(2, b"b" * 16, GrammarKind.REGEX, b"b"))
    keeper.forked(sleepers.processes[1].pid)
    second = keeper.processes[next(reversed(keeper.processes))]
    sleepers.ends[1].write(RESULT.pack(COMPILED, 2, 0, 0, 0))
    keeper.read(second)
    assert second.compiled
    assert second.requests == {2}
    assert process.ended
    answers = keeper.drain()
    assert len(answers) == 1
    assert all(encode(one) for one in answers)


MASK_BYTES = 48 << 10
"""Of a model with 393,000 token ids: a few hundred masks are more than the loop may hold."""

ASKED = 300
"""Rows that are asked for and that the worker does not take: 14 MiB."""


@pytest.mark.parametrize(
    "told",
    [
        RESULT.pack(ROW, 1, 0, int(MaskState.OPEN), 4) + bytes(4),
        RESULT.pack(ROW, 7, 0, int(MaskState.OPEN), 4) + bytes(4),
        RESULT.pack(ROW, 1, 0, int(MaskState.OPEN), 0),
        RESULT.pack(COMPILED, 1, 0, 0, 0),
    ],
    ids=("its own request", "another request", "a row of no size", "compiled"),
)
def test_a_flood_of_results_ends_its_process(sleepers: Sleepers, told: bytes) -> None:
    """A process that writes results without end is ended after the one row that was asked for, its request is told,
    and the process beside it goes on."""
    keeper = Keeper(sleepers.fork, 4)
    process = _hostile(sleepers, keeper)
    keeper.take(OpenGrammar(2, b"b" * 16, GrammarKind.REGEX, b"b"))
    keeper.forked(sleepers.processes[1].pid)
    other = keeper.processes[next(reversed(keeper.processes))]
    for end, one, request in zip(sleepers.ends, (process, other), (1, 2), strict=False):
        end.write(RESULT.pack(COMPILED, request, 0, 0, 0))
        keeper.read(one)
    sleepers.ends[0].write(told * 1_000)
    keeper.read(process)
    (masks,) = keeper.drain()
    assert isinstance(masks, Masks)
    assert process.ended
    assert masks.states[-1] == MaskState.BROKEN
    assert set(masks.requests) == {1}
    assert len(masks.requests) <= 2
    row = RESULT.pack(ROW, 2, 0, int(MaskState.OPEN), 4) + bytes(4)
    sleepers.ends[1].write(row)
    keeper.read(other)
    keeper.take(Advance(array("Q", (2,)), array("I", (1,))))
    sleepers.ends[1].write(row)
    keeper.read(other)
    (masks,) = keeper.drain()
    assert isinstance(masks, Masks)
    assert list(masks.requests) == [2, 2]
    assert not other.ended


def test_a_process_that_reads_no_commands_is_ended(sleepers: Sleepers) -> None:
    """A process may leave its commands unread while its grammar's requests come and go: what waits for it is bounded,
    and beyond that it is ended."""
    keeper = Keeper(sleepers.fork, 4)
    process = _hostile(sleepers, keeper)
    sleepers.ends[0].write(RESULT.pack(COMPILED, 1, 0, 0, 0))
    keeper.read(process)
    for request in range(10, 10 + MAX_COMMAND_BYTES // 20):
        keeper.take(OpenGrammar(request, b"a" * 16, GrammarKind.REGEX, b"a"))
        keeper.take(CloseGrammar(request))
        assert len(process._outbound) <= MAX_COMMAND_BYTES + 26
    keeper.tick()
    assert process.ended


def test_answers_that_nobody_takes_are_bounded(sleepers: Sleepers) -> None:
    """While the worker takes nothing, the loop holds ``MAX_UNSENT_BYTES`` and one turn's results, however many rows a
    process may write; nobody is ended for being late meanwhile, and no row is lost."""
    ours, forker = socket_pair()
    shared = SharedMemory(None)
    (worker_in, keeper_out), (keeper_in, worker_out) = create_pipe(), create_pipe()
    worker = SharedPipe(shared, worker_in, worker_out, first=True)
    keeper_end = SharedPipe(shared, keeper_in, keeper_out, first=False)
    loop = KeeperLoop(MASK_BYTES, ours, keeper_end, Rounds(lambda: None), SandboxMemory(0, 0))
    now = [0.0]
    keeper = loop._keeper
    keeper._clock = lambda: now[0]
    keeper.prepare()
    _, fds = receive_packet(forker, 3)
    os.set_blocking(fds[1], False)
    child = SharedPipe.opened(*fds, first=False)
    sleepers.processes.append(subprocess.Popen(sleepers.program))
    send_packet(forker, sleepers.processes[0].pid.to_bytes(4, "little"))
    for request in (1, 2):
        worker.write(encode(OpenGrammar(request, b"a" * 16, GrammarKind.REGEX, b"a")))
    while not keeper.processes:
        loop.turn()
    (process,) = keeper.processes.values()
    child.write(RESULT.pack(COMPILED, 1, 0, 0, 0))
    while not process.compiled:
        loop.turn()
    worker.write(encode(Advance(array("Q", [1] * (ASKED - 1)), array("I", [0] * (ASKED - 1)))))
    while process.owed < ASKED + 1:
        loop.turn()
    rows = (RESULT.pack(ROW, 1, 0, int(MaskState.OPEN), MASK_BYTES) + bytes(MASK_BYTES)) * ASKED
    sent = before = 0
    while (sent := sent + child.write(memoryview(rows)[sent:])) > before or len(loop._unsent) <= MAX_UNSENT_BYTES:
        before = sent
        loop.turn()
        assert len(loop._unsent) <= MAX_UNSENT_BYTES + 3 * (AREA_BYTES + MASK_BYTES)
    for _ in range(3):
        now[0] += MASK_WALL_S
        loop.turn()
    assert sent < len(rows)
    assert not process.ended
    reader, found = FrameReader(worker), 0
    while found < ASKED:
        found += sum(len(one.requests) for one in reader.read() or () if isinstance(one, Masks))
        sent += child.write(memoryview(rows)[sent:])
        loop.turn()
    assert not process.ended
    child.close()
    process.pipe.close()
    for fd in (*worker.bells, *keeper_end.bells):
        os.close(fd)
    for end in (forker, ours):
        end.close()


def test_an_impossible_cursor_met_by_a_command_ends_the_process_alone(sleepers: Sleepers) -> None:
    """The cursor of a hostile process may be found impossible while a command is written for it: that process is ended
    at the next look, and the keeper serves the next grammar."""
    keeper = Keeper(sleepers.fork, 4)
    process = _hostile(sleepers, keeper)
    sleepers.ends[0].write(RESULT.pack(COMPILED, 1, 0, 0, 0))
    keeper.read(process)
    process.pipe._words[process.pipe._out + 16] = 1 << 40  # Where the process says how far it has read.
    keeper.take(Advance(array("Q", (1,)), array("I", (1,))))
    keeper.tick()
    assert process.ended
    keeper.take(OpenGrammar(2, b"b" * 16, GrammarKind.REGEX, b"b"))
    assert [one.requests for one in keeper.processes.values()] == [{2}]
