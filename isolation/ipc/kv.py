"""The messages about KV memory: what each namespace may keep of it, and what it keeps.

The host sends the whole table of quotas whenever it changes, and first of all to an engine that has just come up. An
engine that was sent one, be it empty, tells while it works what accounts hold: for the operator, never for a tenant.

Both payloads are rows of a record, as many as the frame holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from isolation.ipc.frame import Kind, Record, require, require_range, rows_codec
from isolation.ipc.messages import NAMESPACE_KEY_BYTES

WHOLE_POOL = 10_000
"""Parts of the KV pool in which quotas are told."""
MAX_KV_QUOTAS = 10_000
"""Quotas of one table: as many as a policy may have tenants."""
MAX_KV_USES = 1_024
"""Accounts of one ``KvUsage``: the largest ones."""


@dataclass(frozen=True, slots=True)
class KvQuota:
    """What one namespace may keep in the KV pool, in parts of ``WHOLE_POOL``."""

    namespace: bytes
    """A namespace key, as in ``Submit``."""
    reserved: int
    """What it can always have, 0 to ``cap``."""
    cap: int
    """What it never exceeds, 1 to ``WHOLE_POOL``."""
    lends: bool = True
    """Whether others may use what it leaves of ``reserved``."""


@dataclass(frozen=True, slots=True)
class KvQuotas:
    """The whole table of quotas, in place of the last one. Reservations are no more than the pool together, and no
    namespace stands there twice. A request that no longer fits its quota ends as ``TOO_LONG`` or, while its tokens fit,
    at the length that does."""

    quotas: tuple[KvQuota, ...] = ()


@dataclass(frozen=True, slots=True)
class KvUse:
    """What one namespace has in the pool; counts of blocks are unsigned 32-bit, those of events unsigned 64-bit and
    count from the account's beginning."""

    namespace: bytes
    resident: int
    """Blocks with its content, held or cached."""
    held: int
    """Those of its running requests."""
    reserved: int
    """Its reservation."""
    cap: int
    lost: int
    """Cached blocks that were evicted for others."""
    preempted: int
    """Requests that were preempted for others."""
    waited: int
    """Times that its requests had to wait for its own cap."""


@dataclass(frozen=True, slots=True)
class KvUsage:
    """What the accounts with a quota have, and of those without one the largest."""

    uses: tuple[KvUse, ...] = ()


_QUOTA = Record(f"namespace:{NAMESPACE_KEY_BYTES}s reserved:H cap:H lends:?")
_USE = Record(f"namespace:{NAMESPACE_KEY_BYTES}s resident:I held:I reserved:I cap:I lost:Q preempted:Q waited:Q")


def _check_quotas(message: KvQuotas) -> None:
    for quota in message.quotas:
        require_range("cap", quota.cap, 1, WHOLE_POOL)
        require_range("reserved", quota.reserved, 0, quota.cap)
    require(sum(quota.reserved for quota in message.quotas) <= WHOLE_POOL, "more is reserved than the pool")
    keys = {quota.namespace for quota in message.quotas}
    require(len(keys) == len(message.quotas), "a namespace stands in the table twice")


ARMS = (
    rows_codec(Kind.KV_QUOTAS, KvQuotas, KvQuota, _QUOTA, MAX_KV_QUOTAS, _check_quotas),
    rows_codec(Kind.KV_USAGE, KvUsage, KvUse, _USE, MAX_KV_USES),
)
