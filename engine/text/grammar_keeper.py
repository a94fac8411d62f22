"""Grammar keeper: one process for each grammar of all tenants; bounded concurrent compilation, and routing of masks.

A grammar's process is forked (by a separate forker, so that a fork delays no masks), compiles, and then serves the
requests that use this grammar. So a grammar that exceeds its limits is ended with its process; nothing is compiled
twice; nothing compiled is shared between tenants, or between users that have namespaces of their own; and a grammar
that becomes slow later delays only its own requests. The keeper itself parses nothing.

A process may be hostile, where its grammar has taken it over. It is ended when it writes a row that no command asked
for, so it cannot fill the keeper's memory. While the worker takes no answers, the loop reads no process
(``grammar_process.MAX_UNSENT_BYTES``), and time limits do not run (``Keeper.pause``).

Limits: a tenant, with all of its users, has ``TENANT_GRAMMARS`` processes and ``TENANT_QUEUE`` grammars waiting for
compilation; all tenants together have ``MAX_GRAMMARS`` processes. An idle process is evicted when its slot is needed:
the tenant's own least recently used one when the tenant is at its limit; otherwise, or when the sandbox's memory is
scarce, one of the tenant with the most processes. ``MAX_COMPILING`` compile at a time, one for each tenant, tenants in
turn. Long compilations are time-sliced, and one slice runs none of them: together they take less than a core, however
many are hopeless, and serving processes get the rest.
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

from engine.sandbox.shared_pipe import SharedPipe
from engine.text.grammar_child import ADVANCE, CLOSE, COMPILE_CPU_S, COMPILED, OPEN, REFUSED, ROW
from engine.text.grammar_process_handle import GrammarProcess, Key, Result
from engine.text.reasons import presentable
from isolation.ipc.codec import Message, encode
from isolation.ipc.grammar import Advance, CloseGrammar, Masks, MaskState, OpenGrammar
from isolation.ipc.messages import MAX_FRAME_BYTES, Failed, FailureCode

MAX_GRAMMARS = 32
"""Largest number of processes. gVisor copies shared memory in pieces of 2 MiB, so each takes some 15 MiB of the
sandbox's memory, and 39 MiB for a model with 152,000 token ids; when memory is short, there are fewer."""

TENANT_GRAMMARS = 8
"""Largest number of processes of one tenant: grammars of running requests, and cached compiled ones."""

MAX_COMPILING = 2
"""Number of grammars compiled at a time."""

TENANT_QUEUE = 16
"""Largest number of one tenant's grammars that wait for compilation."""

COMPILE_WALL_S = 0.8
"""Seconds after which a compilation is ended, however little processor time it got."""

HEAVY_AFTER_S = 0.1
"""Seconds of compiling after which a grammar counts as heavy; the largest published schemas take about as long."""

TURN_S = 0.02
"""Time slice in seconds of a heavy compilation, after which it is stopped so that serving processes can run."""

MASK_WALL_S = 2.0
"""Seconds after which a process that owes a mask is ended; llguidance's own limits end a mask after some 0.2 s."""

KEPT_S = 60.0
"""Seconds after which an unused compiled grammar is released. Its process occupies sandbox memory (``MAX_GRAMMARS``),
and data of a tenant whose key was destroyed must not stay long: its grammars can no longer be requested, because they
are looked up by a name that depends on the key."""

FRAME_ROOM_BYTES = 1 << 10

BUSY = "the machine was too busy to compile it in time"
"""Failure reason for a grammar that got less than half of its permitted processor time: the cause is machine load, and
a retry may succeed."""

_PROCESS_CLOCK = 2
"""Low bits of a clock id that selects the processor time of all threads; the high bits are the process (Linux,
``include/uapi/linux/time.h``; ``clock_getcpuclockid``)."""

Fork = Callable[[], SharedPipe]
"""Requests a new process: returns the keeper's end of the pipe to it. Its pid is reported later (``Keeper.forked``),
in the order of the requests."""


class Keeper:
    """All grammar processes; ``answers`` receives messages for the host."""

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
        """Return whether time limits must be checked."""
        return any(process.asked or not process.compiled for process in self.processes.values())

    @property
    def empty(self) -> bool:
        """Return whether there is no grammar, so that nothing is due at any time."""
        return not self.processes and not self._queues

    def prepare(self) -> None:
        """Fork a spare process for the first grammar in advance."""
        self._spare = self._ask()

    def forked(self, pid: int) -> None:
        """Record the pid of the process that was requested first."""
        process = self._unborn.popleft()
        process.pid = pid
        if process.ended:
            # Its pipe is closed, so it may have ended before its pid was reported.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif process.key[0]:
            process.began = self._clock()

    def take(self, message: Message) -> None:
        """Handle a message from the host."""
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
        """Read a process's results."""
        results = process.read()
        if results is None:
            self._end(process)
            return
        for result in results:
            if process.ended:
                return
            self._result(process, result)

    def pause(self) -> None:
        """Restart the time limits of all processes: their results are not read at present."""
        now = self._clock()
        for process in self.processes.values():
            process.asked = dict.fromkeys(process.asked, now)
            if process.began is not None:
                process.began = now

    def tick(self) -> None:
        """End processes that exceed a limit or are no longer needed, and start pending ones while there is room."""
        now = self._clock()
        for process in list(self.processes.values()):
            owing_s = now - next(iter(process.asked.values()), now)
            compiling_s = now - _began(process, now)
            unused = process.idle and now - process.used > KEPT_S
            if compiling_s > COMPILE_WALL_S and _starved(process):
                self._end(process, FailureCode.DEADLINE, BUSY)
            elif process.broken or owing_s > MASK_WALL_S or compiling_s > COMPILE_WALL_S or unused:
                self._end(process)
        self._take_turns(now)
        self._start()

    def drain(self) -> list[Message]:
        """Return the messages for the host, with mask rows combined into as few frames as possible."""
        most = max(1, (MAX_FRAME_BYTES - FRAME_ROOM_BYTES) // (self._mask_bytes + 16))
        rows, self._rows = self._rows, []
        answers, self.answers = self.answers, []
        for start in range(0, len(rows), most):
            requests, positions, states, words = zip(*rows[start : start + most], strict=True)
            answers.append(Masks(array("Q", requests), array("I", positions), bytes(states), b"".join(words)))
        return answers

    def _take_turns(self, now: float) -> None:
        """Run one of the heavy compilations for this slice, or none."""
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
        form = bytes((job.kind, job.whitespace, job.thinking))
        key = (job.tenant, hashlib.blake2b(form + job.user + job.source, digest_size=32).digest())
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
        """Fork for the grammars that are next."""
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
            # Fork a spare at once: a fork takes a tenth of a second in a sandbox.
            self._spare = self._ask()

    def _full(self) -> bool:
        return len(self.processes) >= MAX_GRAMMARS or self._scarce()

    def _ask(self) -> GrammarProcess:
        process = GrammarProcess(self._fork())
        self._unborn.append(process)
        return process

    def _evict(self, among: Iterable[GrammarProcess]) -> bool:
        """End one idle process: the least recently used one of the tenant with the most."""
        idle = [process for process in among if process.idle]
        if idle:
            held = Counter(process.tenant for process in self.processes.values())
            self._end(min(idle, key=lambda process: (-held[process.tenant], process.used)))
        return bool(idle)

    def _result(self, process: GrammarProcess, result: Result) -> None:
        if result.tag == COMPILED:
            if process.compiled:
                self._end(process)
                return
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
            self._end(process, FailureCode(result.state), presentable(result.data.decode("utf-8", "replace")))
        elif result.tag == ROW:
            process.owed -= 1
            if process.owed < 0 or len(result.data) != self._mask_bytes:
                self._end(process)
            elif result.request in process.requests:
                process.asked.pop(result.request, None)
                self._rows.append((result.request, result.position, MaskState(result.state), result.data))

    def _end(
        self,
        process: GrammarProcess,
        code: FailureCode = FailureCode.TOO_LONG,
        reason: str = "compiling it takes more time or memory than a grammar may",
    ) -> None:
        """End a process and notify the requests that use it."""
        del self.processes[process.key]
        process.ended = True
        if process.pid:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        process.pipe.close()
        for request in process.requests:
            del self._by_request[request]
            if process.compiled:
                self._rows.append((request, 0, MaskState.BROKEN, bytes(self._mask_bytes)))
            else:
                self._fail(request, code, reason)

    def _fail(self, request: int, code: FailureCode, reason: str) -> None:
        self.answers.append(Failed(request, code, reason))


def _began(process: GrammarProcess, now: float) -> float:
    """Return when a process started compiling; now, if it is not compiling."""
    return now if process.compiled or process.began is None else process.began


def _starved(process: GrammarProcess) -> bool:
    """Return whether a compilation got too little processor time to judge its grammar. Reads its clock, not its /proc
    folder, which gVisor would keep in memory."""
    try:
        return clock_gettime(~process.pid << 3 | _PROCESS_CLOCK) < COMPILE_CPU_S / 2
    except OSError:
        return False  # It has ended of itself.
