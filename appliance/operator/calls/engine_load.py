"""Load that reaches what an engine can do: for collecting its system calls, and for enforcing its list under it.

Drawn from a seed, bounded by what the engine says that it takes: prompts of every length up to the longest, all numbers
of a draw, masks, biases, log-probabilities of outputs and prompts, several choices, stop ids, deadlines, aborts,
probes, quotas, prompts that share a prefix, public or not, and as many rows as fit. Where the engine's blocks may leave
it, prompts come again when theirs were sent away, and a host keeps what comes and gives it back (``SpillHost``).
"""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter, deque
from dataclasses import fields
from typing import Any

from appliance.operator.calls.outbox import send_due
from appliance.operator.calls.spill_host import SpillHost
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.engine import Abort, Drain, StepOutput, Submit
from isolation.ipc.grammar import Masks, MaskState
from isolation.ipc.kv import WHOLE_POOL, KvQuota, KvQuotas
from isolation.ipc.logit_bias import LogitBias
from isolation.ipc.messages import MAX_TOP_LOGPROBS, NAMESPACE_KEY_BYTES, EngineReady, Finish, Priority
from isolation.ipc.ping import Ping
from isolation.ipc.public import PublicPrefix, PublicPrefixes
from isolation.ipc.sampling import Sampling

NAMESPACES = 3
"""Tenants of the load."""

PUBLIC = 100
"""First number from which keys of public prefixes are made."""

MOST_OUTPUT = 48
"""Output tokens of a request, at most: requests come and go, and rows are taken again."""

MOST_CHOICES = 3

REMEMBERED = 256
"""Prompts that may come again."""

AGAIN = 0.25
"""Share of requests whose prompt came before, where blocks may leave the engine."""

ABORTED = 0.15
"""Share of requests that are aborted."""

MOST_STOP_IDS = 4

MOST_BIASES = 8

OPEN_SHARE = 1.5
"""Requests in the engine for each row, so that some wait."""

LEAST_DEADLINE_US = 500
"""Shorter than a prompt of any length takes."""

WORD_BITS = 32

SETTLE_S = 30.0
"""Seconds for what is under way when nothing is added any more."""

PHASE_S = 0.25
"""Seconds with the same number of requests."""

WAIT_S = 0.02
"""Seconds of a wait for the engine; its bell ends it."""


class EngineLoad:
    """Requests of one engine, and what became of them.

    Args:
        ready: what the engine says that it takes.
        rows: its ``max_num_seqs``.
        seed: of everything that is drawn.
        spill: keeps the blocks that leave the engine; None: none do.
    """

    def __init__(self, ready: EngineReady, rows: int, seed: int = 0, spill: SpillHost | None = None) -> None:
        self.ended: Counter[str] = Counter()
        """Requests by how they ended."""
        self.tokens = 0
        self.drained = False
        """Whether all of it has been answered and the program was told to end."""
        self.spill = spill
        self._earlier: deque[tuple[int, array[int]]] = deque(maxlen=REMEMBERED)
        """Tenants and prompts."""
        self._ready = ready
        self._random = random.Random(seed)  # noqa: S311 - a load, not a secret
        self._most = max(1, round(rows * OPEN_SHARE))
        self._next = 1
        self._live: dict[int, int] = {}
        """Output tokens so far of each live request."""
        self._masked: set[int] = set()
        self._aborted: dict[int, int] = {}
        """Output tokens after which a request is aborted, where it is."""
        self._outbox: deque[Message] = deque()
        """What the ring has no room for yet; as much as the live requests give rise to."""
        self._lengths: list[int] = []
        self._shared = [self._ids(min(256, ready.max_context // 2)) for _ in range(NAMESPACES)]

    def play(self, channel: Channel, seconds: float) -> None:
        """Put load on for so long, then let all of it end and drain the engine.

        Raises:
            TimeoutError: requests do not end.
            PeerGoneError: the engine has ended.
            ProtocolError: it broke the protocol.
        """
        rand = self._random
        until = time.monotonic() + seconds
        last = until + SETTLE_S
        wanted, change = self._most, 0.0
        while (now := time.monotonic()) < until or self._live or self._outbox:
            self._take(channel)
            if self.spill is not None:
                self.spill.serve()
            if now >= change:
                # Few rows and many in turn: steps of every size.
                wanted, change = rand.choice((1, 2, self._most // 4 + 1, self._most, self._most)), now + PHASE_S
                self._outbox.append(Ping(self._next) if rand.random() < 0.5 else self._table())
            if now < until and len(self._live) < wanted:
                self._submit()
            else:
                channel.wait(WAIT_S)
            send_due(self._outbox, channel)
            if now > last:
                raise TimeoutError(f"requests did not end within {SETTLE_S:g} s")
        self._outbox.append(Drain())
        while not send_due(self._outbox, channel):
            self._take(channel)
            channel.wait(WAIT_S)
        self.drained = True

    def _submit(self) -> None:
        request = self._draw()
        self._outbox.append(request)
        self._next += request.choices
        for number in range(request.request, request.request + request.choices):
            self._live[number] = 0
            if self._random.random() < ABORTED:
                self._aborted[number] = self._random.randrange(request.max_tokens)
                if not self._aborted[number]:
                    self._outbox.append(Abort(number))
            if request.structured:
                self._masked.add(number)
                self._mask(number)

    def _table(self) -> KvQuotas | PublicPrefixes:
        """A new table of quotas, or of public prefixes where the engine keeps some."""
        if self._ready.publishes and self._random.random() < 0.5:
            count = self._random.randint(0, NAMESPACES)
            pairs = [(bytes([PUBLIC + number]) * NAMESPACE_KEY_BYTES, self._shared[number]) for number in range(count)]
            return PublicPrefixes(tuple(PublicPrefix(key, ids) for key, ids in pairs))
        cap = self._random.choice((WHOLE_POOL // 2, WHOLE_POOL))
        return KvQuotas((KvQuota(bytes(NAMESPACE_KEY_BYTES), WHOLE_POOL // 10, cap),))

    def _draw(self) -> Submit:
        rand, ready = self._random, self._ready
        output = rand.randint(1, min(MOST_OUTPUT, ready.max_context - 1))
        tenant = rand.randrange(NAMESPACES)
        prompt = self._ids(min(self._length(), ready.max_context - output))
        if rand.random() < 0.3:
            prompt = (self._shared[tenant] + prompt)[: ready.max_context - output]
        if self.spill is not None:
            tenant, prompt = self._repeated(tenant, prompt, ready.max_context - output)
        structured = rand.random() < 0.2
        options: dict[str, Any] = {"choices": rand.randint(1, MOST_CHOICES) if rand.random() < 0.1 else 1}
        if rand.random() < 0.3:
            options["logprobs"] = rand.randint(0, MAX_TOP_LOGPROBS)
        if rand.random() < 0.1:
            options["prompt_logprobs"] = rand.randint(0, MAX_TOP_LOGPROBS)
        if rand.random() < 0.2:
            options["stop_ids"] = tuple(sorted(set(self._ids(MOST_STOP_IDS))))
        if rand.random() < 0.1:
            options["logit_bias"] = self._biases()
        if rand.random() < 0.05:
            options["deadline_us"] = LEAST_DEADLINE_US
        if ready.deterministic and not structured and rand.random() < 0.1:
            options["deterministic"] = True
        if ready.publishes and "prompt_logprobs" not in options and rand.random() < 0.2:
            options["public"] = bytes([PUBLIC + tenant]) * NAMESPACE_KEY_BYTES
        return Submit(
            self._next,
            bytes([tenant]) * NAMESPACE_KEY_BYTES,
            prompt,
            output,
            self._sampling(),
            ignore_eos=rand.random() < 0.8,
            retain=rand.random() < 0.8,
            priority=rand.choice(tuple(Priority)),
            weight=rand.randint(1, 4),
            structured=structured,
            **options,
        )

    def _repeated(self, tenant: int, prompt: array[int], most: int) -> tuple[int, array[int]]:
        """An earlier prompt with its tenant, or these, which are remembered."""
        if self._earlier and self._random.random() < AGAIN:
            tenant, prompt = self._random.choice(self._earlier)
            return tenant, prompt[:most]
        self._earlier.append((tenant, prompt))
        return tenant, prompt

    def _sampling(self) -> Sampling:
        """Each number as its table's example, or without effect; greedy one time in four."""
        rand = self._random
        drawn = {
            one.name: one.metadata["parameter"].example if rand.random() < 0.3 else one.metadata["parameter"].identity
            for one in fields(Sampling)
        }
        drawn["seed"] = rand.getrandbits(63)
        if rand.random() < 0.25:
            drawn["temperature"] = 0.0
        return Sampling(**drawn)

    def _length(self) -> int:
        """Every length up to the longest, in an order of its own each time round; the longest among the first."""
        if not self._lengths:
            most = self._ready.max_context - 1
            self._lengths = list(range(1, most + 1))
            # Short ones twice as often as long ones: a step's sizes come from several prompts together.
            self._lengths += [round(most ** self._random.random()) for _ in range(most)]
            self._random.shuffle(self._lengths)
            self._lengths.append(most)
        return self._lengths.pop()

    def _ids(self, count: int) -> array[int]:
        return array("I", (self._random.randrange(self._ready.vocab_size) for _ in range(count)))

    def _biases(self) -> LogitBias:
        ids = sorted(set(self._ids(self._random.randint(1, MOST_BIASES))))
        return LogitBias(array("I", ids), array("f", (self._random.uniform(-5.0, 5.0) for _ in ids)))

    def _mask(self, request: int) -> None:
        """Allow some ids, one at least, for the next token of a structured request."""
        words = array("I", bytes(4 * -(-self._ready.vocab_size // WORD_BITS)))
        for one in self._ids(self._random.choice((1, 5, 200))):
            words[one // WORD_BITS] |= 1 << one % WORD_BITS
        position = array("I", [self._live[request]])
        self._outbox.append(Masks(array("Q", [request]), position, bytes([MaskState.OPEN]), words.tobytes()))

    def _take(self, channel: Channel) -> None:
        for message in channel.receive():
            if isinstance(message, StepOutput):
                self._step(message)

    def _step(self, output: StepOutput) -> None:
        for request, finish in zip(output.requests, output.finishes, strict=True):
            self.tokens += 1
            if request not in self._live:
                continue
            self._live[request] += 1
            if finish != Finish.NONE:
                self._end(request, Finish(finish).name.lower())
            elif self._live[request] == self._aborted.get(request):
                self._outbox.append(Abort(request))
            elif request in self._masked:
                self._mask(request)
        for failure in output.failures:
            self._end(failure.request, failure.code.name.lower())

    def _end(self, request: int, how: str) -> None:
        if self._live.pop(request, None) is not None:
            self.ended[how] += 1
        self._masked.discard(request)
        self._aborted.pop(request, None)
