"""Prefill host's part of a split: ``athanor.fleet.v1.PrefillService`` on a listener of its own, for hosts alone.

Who calls is known from the certificate of the handshake: its one URI must be one of ``split.decode_hosts``. HTTP/2, its
bounds and the end of a call whose caller leaves are those of the tenants' gRPC listener.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from appliance.common.errors import ApplianceError, DeadlineExceededError
from appliance.common.split_config import MAX_PEERS, SplitConfig
from appliance.common.tracebacks import forget_frames
from appliance.gateway.fleet.generated import fleet_pb2 as pb
from appliance.gateway.fleet.prefill_call import METHOD
from appliance.gateway.fleet.prefill_choice import MAX_CALLS, has_part
from appliance.gateway.fleet.prefill_run import AskedPrompt, ComputedPrompt, PrefillRuns
from appliance.gateway.fleet.served_entries import ServedCall, ServedEntries
from appliance.gateway.front.defect import defect
from appliance.gateway.front.operator_access import certificate_credential
from appliance.gateway.grpc.call import GrpcCall
from appliance.gateway.grpc.wire import OK, Status
from appliance.gateway.telemetry import split_names as names
from isolation.ipc.messages import MAX_TOKENS_PER_REQUEST, Priority

PROGRESS_S = 0.1
"""Seconds between two messages while a prompt is computed: two may be late before the caller counts this host as
silent (``prefill_call.SILENCE_S``)."""

MAX_MESSAGE_BYTES = 4 << 20
"""Bytes of a prompt: a million tokens of at most three bytes, as ids below two million have, and names."""

MAX_NAME_CHARS = 512
"""Characters of each name, id or digest in a message: longer than any that there is, and short enough for errors."""

STRANGER_MESSAGE_BYTES = 1 << 10
"""Bytes of a message of who is no host of the list; it is not read."""

MESSAGE_S = 5.0
"""Seconds for a prompt to arrive."""

MAX_READING = 32
"""Prompts that arrive at once, 128 MiB of the longest; each arrives in milliseconds. A host has part of them as a
tenant has of places (``prefill_choice.has_part``), and none of the places in which prompts are computed until its
prompt is there."""

MAX_RUNS = 64
"""Prompts computed for other hosts at once; one more is refused as busy, and computed where it came from. A tenant has
part of them as of a host's places (``prefill_choice.has_part``): half at most, whichever hosts ask for it."""

MAX_CALLERS = MAX_PEERS * MAX_CALLS
"""Connections at once: as many as all hosts of the longest list may have, so that each is told that this one is busy
and does not find it away."""

MAX_RUNS_OF_ONE = 16
"""Prompts of one host among them: twice what a host asks for (``prefill_choice.MAX_CALLS``), so that ends on their way
count. A host that was taken over leaves places to the others."""

NO_DEADLINE_S = 60.0
"""Seconds for a call without a deadline; hosts of this release send one."""

PRIORITIES = {pb.PRIORITY_HIGH: Priority.HIGH, pb.PRIORITY_NORMAL: Priority.NORMAL, pb.PRIORITY_LOW: Priority.LOW}
"""Priorities as other hosts tell them."""

OUTCOMES = ("computed", "stranger", "refused", "busy", "failed", "left")
"""What becomes of a call: ``stranger`` its certificate is that of no host of the list; ``refused`` by policy, files or
form; ``busy`` there are enough; ``failed`` it could not be computed; ``left`` the caller has gone, or its deadline."""

Told = Callable[[str | None, AskedPrompt, str, float], None]
"""Takes the end of a call for the trace: traceparent, prompt, outcome, and when it began in monotonic seconds."""


@dataclass(slots=True)
class PrefillService:
    """Answers calls of other hosts."""

    config: SplitConfig
    runs: PrefillRuns
    entries: ServedEntries
    count: Callable[..., None]
    """Adds to a counter of ``names``."""
    told: Told
    running: int = field(default=0, init=False)
    """Prompts that are computed now."""
    _of_hosts: Counter[str] = field(default_factory=Counter, init=False)
    """Those of each host; bounded by the list of hosts."""
    _reading: Counter[str] = field(default_factory=Counter, init=False)
    """Prompts that arrive, of each host that sends some."""
    _of_tenants: Counter[str] = field(default_factory=Counter, init=False)
    """Those of each tenant that has some."""

    async def serve(self, wire: GrpcCall) -> Status:
        """Answer one call; returns its end."""
        host = certificate_credential(wire.peer_names or ())
        if host not in self.config.decode_hosts:
            wire.unproved()
            self._count("stranger")
            return Status(7, "this certificate is of no host for which prompts are computed here")
        if not wire.claim(host):
            self._count("busy")
            return Status(8, "this host has too many connections")
        if wire.method != METHOD:
            return Status(12, "there is no such method")
        if not has_part(self._reading[host], MAX_READING - self._reading.total()):
            self._count("busy")
            return Status(8, "enough prompts arrive here")
        began = time.monotonic()
        with _counted(self._reading, host):
            asked = await self._read(wire)
        if asked is None:
            self._count("refused")
            return Status(3, "no prompt came, or it is not of this form")
        if self.running >= MAX_RUNS or self._of_hosts[host] >= MAX_RUNS_OF_ONE:
            self._count("busy")
            return Status(8, "enough prompts are computed here")
        self.running += 1
        self._of_hosts[host] += 1
        try:
            return await self._serve(host, wire, asked, began)
        finally:
            self.running -= 1
            self._of_hosts[host] -= 1

    async def _read(self, wire: GrpcCall) -> AskedPrompt | None:
        """Return the prompt that arrives; None where none does in time, or it is of another form."""
        wire.bound(MAX_MESSAGE_BYTES)
        try:
            async with asyncio.timeout(MESSAGE_S):
                data = await wire.receive()
            return _asked(pb.ComputeRequest.FromString(data or b""), wire.time_remaining())
        except (TimeoutError, DecodeError, ValueError, ApplianceError):
            return None

    async def _serve(self, host: str, wire: GrpcCall, asked: AskedPrompt, began: float) -> Status:
        if not has_part(self._of_tenants[asked.tenant], MAX_RUNS - self.running + 1):  # Its own place is free.
            self._count("busy")
            return Status(8, "enough prompts of the tenant are computed here")
        outcome, status = "left", OK
        try:
            with _counted(self._of_tenants, asked.tenant):
                outcome, status = await self._answer(asked, wire)
        finally:
            self._count(outcome)
            self._tell(host, asked, outcome)
            traceparent = next((value for name, value in wire.metadata if name == "traceparent"), None)
            self.told(traceparent, asked, outcome, began)
        return status

    async def _answer(self, asked: AskedPrompt, wire: GrpcCall) -> tuple[str, Status]:
        try:
            found = await self._compute(asked, wire)
            answer = pb.Computed(blocks=found.blocks, cached_tokens=found.cached_tokens)
            await wire.write(pb.ComputeResponse(computed=answer))
        except DeadlineExceededError as error:  # The prompt's, not this host's, which is to be asked again.
            forget_frames(error)
            return "left", Status(4, error.message)
        except ApplianceError as error:
            forget_frames(error)
            refused = error.wire.grpc in ("PERMISSION_DENIED", "NOT_FOUND", "INVALID_ARGUMENT")
            return ("refused", Status(7, error.message)) if refused else ("failed", Status(14, error.message))
        except Exception as error:  # noqa: BLE001 - the gRPC boundary: a defect ends this call alone
            return "failed", Status(13, defect(error, asked.request_id).message)
        return "computed", OK

    async def _compute(self, asked: AskedPrompt, wire: GrpcCall) -> ComputedPrompt:
        """Compute, and say so all the time; a policy that comes meanwhile ends it.

        Raises:
            ApplianceError: it cannot be computed, or may not be any more.
        """
        run = asyncio.ensure_future(self.runs.run(asked))
        try:
            while not run.done():
                await wire.write(pb.ComputeResponse(waiting=pb.Waiting()))
                await asyncio.wait((run,), timeout=PROGRESS_S)
                self.runs.permit(asked)
            return run.result()
        finally:
            run.cancel()
            await asyncio.wait((run,))

    def _count(self, outcome: str) -> None:
        self.count(names.SPLIT_SERVED, outcome=outcome)

    def _tell(self, host: str, asked: AskedPrompt, outcome: str) -> None:
        tenant, model = self.runs.known(asked)
        call = ServedCall(
            host=host,
            request=asked.request_id,
            tenant=tenant,
            model=model,
            outcome=outcome,
            tokens=len(asked.token_ids),
        )
        self.entries.add(call)


@contextmanager
def _counted(counter: Counter[str], name: str) -> Iterator[None]:
    """Count one of this name for the time of the block; a name without any has no row."""
    counter[name] += 1
    try:
        yield
    finally:
        counter[name] -= 1
        if not counter[name]:
            del counter[name]


def _asked(request: pb.ComputeRequest, left_s: float | None) -> AskedPrompt:
    """Return the prompt.

    Raises:
        ValueError: it has no tokens, or more than any engine takes, or a name that cannot be one.
    """
    # Ids have a byte each at least: eight million of them would hold up the loop for half a second.
    if not 0 < len(request.token_ids) <= MAX_TOKENS_PER_REQUEST:
        raise ValueError(f"a prompt has 1 to {MAX_TOKENS_PER_REQUEST} tokens")
    names = request.request_id, request.tenant, request.model, request.alias
    if max(map(len, (*names, request.model_digest, request.policy_digest))) > MAX_NAME_CHARS:
        raise ValueError(f"a name has at most {MAX_NAME_CHARS} characters")
    return AskedPrompt(
        request_id=request.request_id,
        tenant=request.tenant,
        model=request.model,
        alias=request.alias,
        model_digest=request.model_digest,
        policy_digest=request.policy_digest,
        token_ids=array("I", request.token_ids),
        deterministic=request.sampling_class != pb.SAMPLING_CLASS_UNSPECIFIED,
        priority=PRIORITIES.get(request.priority, Priority.HIGH),
        until=time.monotonic() + (NO_DEADLINE_S if left_s is None else left_s),
    )
