"""Decode host's part of a split: which prompts it has computed by other hosts, and what becomes of that.

Nothing here ends a request: whatever fails is an outcome, and the local engine computes what it does not find.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from appliance.common.kv_store_state import FleetKeyState
from appliance.common.split_config import PrefillHost, SplitConfig
from appliance.gateway.fleet.generated import fleet_pb2 as pb
from appliance.gateway.fleet.host_addresses import HostAddresses
from appliance.gateway.fleet.known_prompts import KnownPrompts
from appliance.gateway.fleet.prefill_call import Dialer, PrefillCallError, call, client_context
from appliance.gateway.fleet.prefill_choice import PrefillHosts
from appliance.gateway.front.key_file import Stamp, stamp_of
from appliance.gateway.request.audit_feed import AuditFeed
from appliance.gateway.request.splitting import COMPUTED, LATE, SplitPrompt
from appliance.gateway.telemetry import split_names as names
from isolation.ipc.messages import Priority

log = structlog.get_logger()

LEAST_BLOCKS = 32
"""Blocks of a prompt, not known to be here, from which on another host is asked: 512 tokens with blocks of 16, about
what one step of an engine computes beside its running answers. A shorter prompt delays those by a step at most, which
is what a handshake, two ways and the store take."""

ASK_S = 60.0
"""Seconds after which a prompt is computed here, though the other host says that it works on it: a queue that long is
no help, and the engine's own may be shorter. At most half of the time that the request has left."""

MAX_COMPUTED = 1_024
"""Computed prompts that are remembered until the local engine has them: of requests that end before nothing is told."""

PRIORITIES = {Priority.HIGH: pb.PRIORITY_HIGH, Priority.NORMAL: pb.PRIORITY_NORMAL, Priority.LOW: pb.PRIORITY_LOW}
"""Priorities of the engine as other hosts are told them."""

OUTCOMES = (COMPUTED, "busy", "away", "silent", "refused", "stranger", "broken", LATE, "left", "no_keys", "empty")
"""What becomes of a long prompt: ``busy`` all hosts have enough calls, of all or of its tenant, or rest, or this one
has; ``empty`` likewise, but one with room would be asked, had enough come of what it computed for the tenant;
``away`` it cannot be reached, or ends; ``silent`` no word in time; ``refused`` by its policy or its files;
``stranger`` another's certificate; ``broken`` it ended the call or not by the protocol; ``late`` the deadline; ``left``
the client has gone; ``no_keys`` this host has not the fleet's keys now."""

_LACKED = "the store has not got it"
_NOT_GIVEN = "the store did not answer, or this host's engine had no room for it"
"""Why nothing came of a prompt, as the log says it."""

_RESTS = frozenset({"away", "silent", "stranger", "broken"})
"""Outcomes after which a host is not asked for a while, where it said so itself for that tenant alone; after ``late``,
where it seems to stall (``PrefillHosts.late``)."""


@dataclass(slots=True)
class Asking:
    """Has long prompts computed by other hosts: the ``Prefiller`` of a decode host."""

    config: SplitConfig
    audit: AuditFeed
    count: Callable[..., None]
    """Adds to a counter of ``names``."""
    keys: Callable[[], FleetKeyState]
    """Whether this host has the keys under which its fleet shares KV."""
    least_blocks: int = LEAST_BLOCKS
    known: KnownPrompts = field(default_factory=KnownPrompts)
    addresses: HostAddresses = field(default_factory=HostAddresses)
    _hosts: PrefillHosts = field(init=False)
    _computed_by: OrderedDict[str, PrefillHost] = field(default_factory=OrderedDict)
    """Who computed each prompt of which the local engine has not begun yet, by the request's id; the newest last."""
    _context: ssl.SSLContext | None = None
    _stamp: Stamp = ()

    def __post_init__(self) -> None:
        self._hosts = PrefillHosts(self.config.prefill_hosts)

    def wants(self, prompt: SplitPrompt) -> bool:
        """Return whether a prompt has enough blocks that the local engine is not known to have."""
        known = self.known.tokens(prompt.namespace, prompt.model, prompt.token_ids, prompt.block_size)
        return (len(prompt.token_ids) - known) // prompt.block_size >= self.least_blocks

    def learn(self, prompt: SplitPrompt) -> None:
        """Remember that the local engine has a prompt."""
        self.known.learn(prompt.namespace, prompt.model, prompt.token_ids, prompt.block_size)

    def taken(self, prompt: SplitPrompt, store_tokens: int, recomputed_blocks: int, *, gap: bool) -> None:
        """Count the tokens that the local engine took from the store, of a prompt that was computed elsewhere, and the
        blocks that it computed itself. A host of whose prompt less came than was computed here rests for the tenant,
        whatever the cause: it may have computed nothing, the store may give nothing, or the engine may have no room. In
        each case a prompt waits for that host in vain, and the next one most likely too. A ``gap`` says that the store
        served."""
        host = self._computed_by.pop(prompt.request_id, None)
        nothing = recomputed_blocks >= max(self.least_blocks, store_tokens // prompt.block_size + 1)
        if host is not None and (store_tokens or nothing):
            rest_s = self._hosts.taken(host, prompt.tenant, time.monotonic(), nothing=nothing)
            if rest_s:
                log.warning(
                    "too little came of a prompt that a host says to have computed; it is not asked for the tenant",
                    cause=_LACKED if gap else _NOT_GIVEN,
                    host=host.host,
                    tenant=prompt.tenant,
                    seconds=rest_s,
                )
        self.count(names.SPLIT_TAKEN, outcome="taken" if store_tokens else "nothing")
        self.count(names.SPLIT_TOKENS, store_tokens)
        self.count(names.SPLIT_RECOMPUTED, recomputed_blocks)

    async def compute(self, prompt: SplitPrompt, begun: Callable[[], None] = lambda: None) -> str:
        """Have a prompt computed; returns a word of ``OUTCOMES``. ``begun``: see ``splitting.Prefiller``."""
        began, host, outcome = time.monotonic(), None, "left"
        if prompt.chosen and self._hosts.named(prompt.chosen) is None:
            self.count(names.SPLIT_IGNORED)
        try:
            if self.keys() is not FleetKeyState.HELD:
                outcome = "no_keys"
            elif (host := self._hosts.choose(prompt.chosen, prompt.tenant, began)) is None:
                outcome = "empty" if self._hosts.rests_for(prompt.tenant, began) else "busy"
            else:
                with self._hosts.asking(host, prompt.tenant, len(prompt.token_ids)):
                    outcome = await self._ask(host, prompt, began, begun)
        finally:
            self._told(prompt, host, outcome, began)
        return outcome

    async def _ask(self, host: PrefillHost, prompt: SplitPrompt, now: float, begun: Callable[[], None]) -> str:
        try:
            context = await self._tls()
            # The other half is the local engine's: a host that says that it works, and does not, ends no request.
            until = now + min(ASK_S, (prompt.until - now) / 2)
            await call(host, Dialer(context, self.addresses), _request(prompt), prompt.traceparent, until, begun)
        except PrefillCallError as error:
            ended = time.monotonic()
            rests = error.outcome == LATE and self._hosts.late(host, prompt.tenant, now, ended)
            if error.outcome in _RESTS:
                self._hosts.rest(host, ended, tenant=prompt.tenant if error.answered else "")
            if rests or error.outcome in _RESTS:
                log.warning(
                    "a host computes no prompts; this one does",
                    host=host.host,
                    tenant=prompt.tenant,
                    outcome=error.outcome,
                    cause=str(error),
                )
            return error.outcome
        except OSError as error:
            log.error("split.tls cannot be used; prompts are computed here", cause=str(error))
            return "away"
        self._hosts.computed(host, time.monotonic())
        self._computed_by[prompt.request_id] = host
        if len(self._computed_by) > MAX_COMPUTED:
            self._computed_by.popitem(last=False)
        return COMPUTED

    async def _tls(self) -> ssl.SSLContext:
        """Return TLS of the files as they are now.

        Raises:
            OSError: one cannot be used.
        """
        tls = self.config.tls
        assert tls is not None, "the role decode has certificates"
        stamp = stamp_of(tls.certificate, tls.key, tls.ca)
        if self._context is None or stamp != self._stamp:
            self._context, self._stamp = await asyncio.to_thread(client_context, tls), stamp
        return self._context

    def _told(self, prompt: SplitPrompt, host: PrefillHost | None, outcome: str, began: float) -> None:
        """Count how it ended, and tell the audit log where a host was asked."""
        self.count(names.SPLIT_ASKED, outcome=outcome)
        self.count(names.SPLIT_WAITED, time.monotonic() - began, outcome=outcome)
        if host is not None:
            self.audit.add(
                "prefill",
                what="asked",
                request=prompt.request_id,
                tenant=prompt.tenant,
                host=host.host,
                model=prompt.model,
                outcome=outcome,
                tokens=len(prompt.token_ids),
                count=1,
            )


def _request(prompt: SplitPrompt) -> pb.ComputeRequest:
    return pb.ComputeRequest(
        request_id=prompt.request_id,
        tenant=prompt.tenant,
        model=prompt.model,
        alias=prompt.alias,
        model_digest=prompt.model_digest,
        policy_digest=prompt.policy_digest,
        token_ids=prompt.token_ids,
        priority=PRIORITIES[prompt.priority],
    )
