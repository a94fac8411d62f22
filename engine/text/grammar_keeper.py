"""Keeps the grammars of all tenants, a process each: compiles beside everything else, bounded, and routes masks.

A grammar's process is forked (by another one, so that a fork holds up nobody's masks), compiles, and then serves the
requests that follow this grammar. So a grammar that takes too much is ended with its process; what is compiled is not
compiled again; nothing compiled is shared between tenants; and a grammar that gets slow later holds up the requests of
this grammar alone. The keeper itself parses nothing.

Bounds. A tenant has ``TENANT_GRAMMARS`` processes and ``TENANT_QUEUE`` grammars waiting to be compiled; all together
have ``MAX_GRAMMARS``. A process that nobody needs goes when its place is needed: the tenant's own that was not used
for longest, where the tenant has as many as it may; else, or where the sandbox's memory gets scarce, one of whoever has
the most. ``MAX_COMPILING`` compile at a time, one of a tenant, tenants in turn. Compilations that take long have turns,
too, and one turn is nobody's: together they take less than a core, however many are hopeless, and what serves has the
rest.
"""

from __future__ import annotations

import hashlib
import os
import signal
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import clock_gettime, monotonic

from engine.text.grammar_child import ADVANCE, CLOSE, COMPILE_CPU_S, COMPILED, OPEN, REFUSED, ROW
from engine.text.grammar_schema import GrammarProcess, Key, Result
from isolation.ipc.codec import encode
from isolation.ipc.grammar_messages import Advance, CloseGrammar, Masks, MaskState, OpenGrammar
from isolation.ipc.messages import MAX_FRAME_BYTES, Failed, FailureCode, Message

MAX_GRAMMARS = 32
"""Processes. gVisor copies shared memory in pieces of 2 MiB, so each takes some 15 MiB of the sandbox's, and 39 MiB
where a model has 152,000 token ids; where that leaves too little for one more, there are fewer."""

TENANT_GRAMMARS = 8
"""Processes of one tenant: grammars that its running requests follow, and compiled ones that may be used again."""

MAX_COMPILING = 2
"""Grammars compiled at a time."""

TENANT_QUEUE = 16
"""Grammars of one tenant that wait to be compiled."""

COMPILE_WALL_S = 0.8
"""Seconds after which a compilation is ended, however little processor time it got."""

HEAVY_AFTER_S = 0.1
"""Seconds of compiling after which a grammar is a heavy one; the largest published schemas take about as long."""

TURN_S = 0.02
"""How long a heavy compilation runs, and then stands still so that whatever serves has the processor."""

MASK_WALL_S = 2.0
"""Seconds after which a process that owes a mask is ended; llguidance's own limits end a mask after some 0.2 s."""

KEPT_S = 60.0
"""Seconds after which a compiled grammar that nobody has followed is let go. Its process has memory of the sandbox's
(``MAX_GRAMMARS``), and of a tenant whose key was destroyed nothing shall stay for long: nobody can ask for its grammars
any more, since they are found by a name that goes with the key."""

FRAME_ROOM_BYTES = 1 << 10

BUSY = "the machine was too busy to compile it in time"
"""Why a grammar was not compiled that had less than half of the processor time which it may take: no fault of its own,
and the same request may do better a moment later."""

_PROCESS_CLOCK = 2
"""Processor time of all threads: the low bits of a clock's number whose high ones are a process (Linux,
``include/uapi/linux/time.h``; ``clock_getcpuclockid``)."""

Fork = Callable[[], tuple[int, int]]
"""Asks for a process: gives the pipe to it and the pipe from it. Its pid is reported later (``Keeper.forked``), in the
order of asking."""


class Keeper:
    """All grammars' processes; ``answers`` takes what the host is to be told."""

    def __init__(
        self,
        fork: Fork,
        mask_bytes: int,
        clock: Callable[[], float] = monotonic,
        scarce: Callable[[], bool] = lambda: False,
    ) -> None:
        self.answers: list[Message] = []
        self.processes: dict[Key, GrammarProcess] = {}
        self._fork = fork
        self._mask_bytes = mask_bytes
        self._clock = clock
        self._scarce = scarce
        self._queues: OrderedDict[bytes, deque[tuple[Key, OpenGrammar]]] = OrderedDict()
        self._by_request: dict[int, GrammarProcess] = {}
        self._rows: list[tuple[int, int, int, bytes]] = []
        self._unborn: deque[GrammarProcess] = deque()
        self._turns = 0
        self._turned = 0.0
        self._spare: GrammarProcess | None = None

    @property
    def busy(self) -> bool:
        """Whether the clock is to be looked at."""
        return any(process.asked or not process.compiled for process in self.processes.values())

    def prepare(self) -> None:
        """Have a process made for the first grammar before it comes."""
        self._spare = self._ask()

    def forked(self, pid: int) -> None:
        """The process that was asked for first is there."""
        process = self._unborn.popleft()
        process.pid = pid
        if process.ended:
            # Its pipes are closed, so it may have gone by itself before anybody was told that it was there.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif process.key[0]:
            process.began = self._clock()

    def take(self, message: Message) -> None:
        """Do what the host asks."""
        if isinstance(message, OpenGrammar):
            self._open(message)
        elif isinstance(message, Advance):
            now = self._clock()
            for request, token_id in zip(message.requests, message.token_ids, strict=True):
                process = self._by_request.get(request)
                if process is not None and process.compiled:
                    process.asked[request] = now
                    process.command(ADVANCE, request, token_id)
        elif isinstance(message, CloseGrammar):
            self._close(message.request)

    def read(self, process: GrammarProcess) -> None:
        """Take a process's results."""
        results = process.read()
        if results is None:
            self._end(process)
            return
        for result in results:
            self._result(process, result)

    def tick(self) -> None:
        """End what takes too long or is not wanted any more, and begin what there is room for."""
        now = self._clock()
        for process in list(self.processes.values()):
            owing_s = now - next(iter(process.asked.values()), now)
            compiling_s = now - _began(process, now)
            unused = process.idle and now - process.used > KEPT_S
            if compiling_s > COMPILE_WALL_S and _starved(process):
                self._end(process, FailureCode.DEADLINE, BUSY)
            elif owing_s > MASK_WALL_S or compiling_s > COMPILE_WALL_S or unused:
                self._end(process)
        self._take_turns(now)
        self._start()

    def drain(self) -> list[Message]:
        """What the host is to be told now, the rows of masks put together into as few frames as hold them."""
        most = max(1, (MAX_FRAME_BYTES - FRAME_ROOM_BYTES) // (self._mask_bytes + 16))
        rows, self._rows = self._rows, []
        answers, self.answers = self.answers, []
        for start in range(0, len(rows), most):
            requests, positions, states, words = zip(*rows[start : start + most], strict=True)
            answers.append(Masks(array("Q", requests), array("I", positions), bytes(states), b"".join(words)))
        return answers

    def _take_turns(self, now: float) -> None:
        """Let one of the heavy compilations run, or none."""
        if now - self._turned < TURN_S:
            return
        heavy = [process for process in self.processes.values() if now - _began(process, now) > HEAVY_AFTER_S]
        self._turned = now
        self._turns += 1
        for place, process in enumerate(heavy):
            process.halt(self._turns % (len(heavy) + 1) != place)

    def _open(self, job: OpenGrammar) -> None:
        if job.request in self._by_request:
            self._fail(job.request, FailureCode.INVALID, "the request follows a grammar already")
            return
        key = (job.tenant, hashlib.blake2b(bytes((job.kind,)) + job.source, digest_size=32).digest())
        process = self.processes.get(key)
        if process is not None:
            process.keep &= job.keep
            self._join(process, job.request)
            return
        queue = self._queues.setdefault(job.tenant, deque())
        if len(queue) >= TENANT_QUEUE:
            self._fail(job.request, FailureCode.OVERLOADED, "too many grammars wait to be compiled")
            return
        queue.append((key, job))
        self._start()

    def _join(self, process: GrammarProcess, request: int) -> None:
        now = self._clock()
        process.used = now
        process.requests.add(request)
        self._by_request[request] = process
        if process.compiled:
            process.asked[request] = now
            process.command(OPEN, request)
        else:
            process.opening.append(request)

    def _close(self, request: int) -> None:
        process = self._by_request.pop(request, None)
        if process is None:
            for queue in self._queues.values():
                for entry in queue:
                    if entry[1].request == request:
                        queue.remove(entry)
                        return
            return
        process.requests.discard(request)
        process.asked.pop(request, None)
        process.used = self._clock()
        if not process.requests and not (process.compiled and process.keep):
            self._end(process)
        elif process.compiled:
            process.command(CLOSE, request)

    def _start(self) -> None:
        """Fork for the grammars whose turn it is."""
        for tenant in list(self._queues):
            compiling = [process for process in self.processes.values() if not process.compiled]
            if len(compiling) >= MAX_COMPILING:
                return
            queue = self._queues[tenant]
            while queue and queue[0][0] in self.processes:
                process = self.processes[queue[0][0]]
                process.keep &= queue[0][1].keep
                self._join(process, queue.popleft()[1].request)
            if queue and all(process.tenant != tenant for process in compiling):
                key, job = queue.popleft()
                self._compile(key, job)
                self._queues.move_to_end(tenant)
            if not queue:
                del self._queues[tenant]

    def _compile(self, key: Key, job: OpenGrammar) -> None:
        own = [process for process in self.processes.values() if process.tenant == job.tenant]
        if len(own) >= TENANT_GRAMMARS and not self._evict(own):
            self._fail(job.request, FailureCode.OVERLOADED, f"{TENANT_GRAMMARS} different grammars are in use")
        elif self._full() and not self._evict(self.processes.values()):
            self._fail(job.request, FailureCode.OVERLOADED, "too many different grammars are in use")
        else:
            process = self._spare or self._ask()
            process.key = key
            process.keep = job.keep
            if process.pid:
                process.began = self._clock()
            process.give(encode(job))
            self.processes[key] = process
            self._join(process, job.request)
            # The next one need not wait until it is forked, which takes a sandbox a tenth of a second.
            self._spare = self._ask()

    def _full(self) -> bool:
        return len(self.processes) >= MAX_GRAMMARS or self._scarce()

    def _ask(self) -> GrammarProcess:
        process = GrammarProcess(*self._fork())
        self._unborn.append(process)
        return process

    def _evict(self, among: Iterable[GrammarProcess]) -> bool:
        """End one that nobody follows: of whoever has the most, the one not used for longest."""
        idle = [process for process in among if process.idle]
        if idle:
            held = Counter(process.tenant for process in self.processes.values())
            self._end(min(idle, key=lambda process: (-held[process.tenant], process.used)))
        return bool(idle)

    def _result(self, process: GrammarProcess, result: Result) -> None:
        if result.tag == COMPILED:
            process.compiled = True
            process.halt(False)
            process.used = now = self._clock()
            for request in process.opening:
                if request in process.requests:
                    process.asked[request] = now
                    process.command(OPEN, request)
            process.opening.clear()
            self._start()
        elif result.tag == REFUSED:
            self._end(process, FailureCode(result.state), result.data.decode("utf-8", "replace"))
        elif result.tag == ROW and result.request in process.requests and len(result.data) == self._mask_bytes:
            process.asked.pop(result.request, None)
            self._rows.append((result.request, result.position, MaskState(result.state), result.data))

    def _end(
        self,
        process: GrammarProcess,
        code: FailureCode = FailureCode.TOO_LONG,
        reason: str = "compiling it takes more time or memory than a grammar may",
    ) -> None:
        """End a process; requests that follow it are told."""
        del self.processes[process.key]
        process.ended = True
        os.close(process.commands)
        os.close(process.results)
        if process.pid:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for request in process.requests:
            del self._by_request[request]
            if process.compiled:
                self._rows.append((request, 0, MaskState.BROKEN, bytes(self._mask_bytes)))
            else:
                self._fail(request, code, reason)

    def _fail(self, request: int, code: FailureCode, reason: str) -> None:
        self.answers.append(Failed(request, code, reason))


def _began(process: GrammarProcess, now: float) -> float:
    """Since when a process has been compiling; now, when it does not."""
    return now if process.compiled or process.began is None else process.began


def _starved(process: GrammarProcess) -> bool:
    """Whether a compilation got so little of the processor that nothing is known of its grammar. Its clock is asked and
    not its folder in /proc, which gVisor would remember."""
    try:
        return clock_gettime(~process.pid << 3 | _PROCESS_CLOCK) < COMPILE_CPU_S / 2
    except OSError:
        return False  # It has ended of itself.
