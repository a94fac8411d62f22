"""Prompts of this host's requests that another host of the fleet may compute first (docs/fleet.md).

The other host gives the prompt's sealed KV to the fleet's store; then the request enters the local engine, which takes
from the store what it has not. Whatever goes wrong costs time at most: the local engine computes what does not come.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from appliance.gateway.request.ledger import Ledger
from isolation.ipc.engine import Submit
from isolation.ipc.messages import Priority
from policy.kept import splits

COMPUTED = "computed"
"""Outcome of a prompt that another host has computed; all others say why it has not."""

LATE = "late"
"""Outcome of a prompt that another host was still computing at the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPrompt:
    """A prompt that may be computed elsewhere."""

    request_id: str
    tenant: str
    model: str
    alias: str
    """Route by which the caller asked for the model; empty where it asked for the model itself."""
    model_digest: str
    """Digest of the model's files in hex."""
    policy_digest: str
    """Digest of the policy that admitted the request."""
    namespace: bytes
    """Namespace key of the tenant, under which this host remembers what it has. It is never sent."""
    token_ids: array[int]
    """Typecode ``I``."""
    block_size: int
    """Tokens of a KV block."""
    priority: Priority
    until: float
    """Deadline of the request, in monotonic seconds."""
    traceparent: str
    """The request's span (W3C Trace Context)."""
    chosen: str = ""
    """HOST:PORT that the router named; empty where it named none."""

    def recomputed_blocks(self, cached_tokens: int) -> int:
        """Return how many whole blocks an engine computed that had so many tokens of the prompt."""
        return len(self.token_ids) // self.block_size - cached_tokens // self.block_size


class Prefiller(Protocol):
    """Has prompts computed by other hosts."""

    def wants(self, prompt: SplitPrompt) -> bool:
        """Whether a prompt is long enough, as far as this host knows what its engine has of it."""
        ...

    async def compute(self, prompt: SplitPrompt, begun: Callable[[], None]) -> str:
        """Have a prompt computed; returns the outcome's word once that is done or given up. Raises nothing but
        ``asyncio.CancelledError``, which ends the work on the other host. ``begun`` is called when the other host says
        that it works on the prompt, perhaps more than once."""
        ...

    def taken(self, prompt: SplitPrompt, store_tokens: int, recomputed_blocks: int, *, gap: bool) -> None:
        """Note how many tokens of a prompt that was computed elsewhere the local engine took from the store, how many
        whole blocks of it it computed itself, and whether the store was asked and has a ``gap``."""
        ...

    def learn(self, prompt: SplitPrompt) -> None:
        """Note that the local engine has the prompt's KV now."""
        ...


def may_split(ledger: Ledger, tenant: str, submit: Submit, *, external: bool) -> bool:
    """Return whether a request's prompt may be computed by another host, by policy and by what engines look for in the
    store: no deterministic request, none with a public prefix, an adapter or log-probabilities of its prompt. A model
    that is computed outside of the appliance (``external``) leaves no KV."""
    known = ledger.policy.tenants.get(tenant)
    plain = not (submit.deterministic or submit.public or submit.adapter or submit.user or submit.group or external)
    return known is not None and splits(known) and plain and submit.retain and submit.prompt_logprobs < 0
