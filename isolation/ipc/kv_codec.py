"""Arms of the codec for KV memory: KvQuotas and KvUsage.

Payloads (``n`` items each where marked, as many as the frame holds):

* KvQuotas: n x (namespace 32 bytes, reserved u16, cap u16, lends u8);
* KvUsage: n x (namespace 32 bytes, resident u32, held u32, reserved u32, cap u32, lost u64, preempted u64,
  waited u64).
"""

from __future__ import annotations

import struct

from isolation.ipc.frame import (
    HEADER_BYTES,
    MAX_U32,
    MAX_U64,
    Arm,
    Frame,
    Kind,
    flag,
    require,
    require_length,
    require_range,
)
from isolation.ipc.kv_messages import (
    MAX_KV_QUOTAS,
    MAX_KV_USES,
    WHOLE_POOL,
    KvQuota,
    KvQuotas,
    KvUsage,
    KvUse,
)
from isolation.ipc.messages import NAMESPACE_KEY_BYTES

_QUOTA = struct.Struct(f"<{NAMESPACE_KEY_BYTES}sHHB")
_USE = struct.Struct(f"<{NAMESPACE_KEY_BYTES}sIIIIQQQ")


def _check_quotas(message: KvQuotas) -> None:
    require_length("quotas", len(message.quotas), MAX_KV_QUOTAS)
    for quota in message.quotas:
        require(len(quota.namespace) == NAMESPACE_KEY_BYTES, "a namespace key has another length")
        require_range("cap", quota.cap, 1, WHOLE_POOL)
        require_range("reserved", quota.reserved, 0, quota.cap)
    require(sum(quota.reserved for quota in message.quotas) <= WHOLE_POOL, "more is reserved than the pool")
    keys = {quota.namespace for quota in message.quotas}
    require(len(keys) == len(message.quotas), "a namespace stands in the table twice")


def _pack_quotas(message: KvQuotas) -> bytes:
    return b"".join(
        _QUOTA.pack(quota.namespace, quota.reserved, quota.cap, bool(quota.lends)) for quota in message.quotas
    )


def _unpack_quotas(_request: int, frame: Frame) -> KvQuotas:
    size = len(frame) - HEADER_BYTES
    require(size % _QUOTA.size == 0 and size <= _QUOTA.size * MAX_KV_QUOTAS, "the frame holds no whole quotas")
    return KvQuotas(
        tuple(
            KvQuota(namespace, reserved, cap, flag(lends))
            for namespace, reserved, cap, lends in _QUOTA.iter_unpack(frame[HEADER_BYTES:])
        )
    )


def _check_usage(message: KvUsage) -> None:
    require_length("uses", len(message.uses), MAX_KV_USES)
    for use in message.uses:
        require(len(use.namespace) == NAMESPACE_KEY_BYTES, "a namespace key has another length")
        for name in ("resident", "held", "reserved", "cap"):
            require_range(name, getattr(use, name), 0, MAX_U32)
        for name in ("lost", "preempted", "waited"):
            require_range(name, getattr(use, name), 0, MAX_U64)


def _pack_usage(message: KvUsage) -> bytes:
    uses = (
        _USE.pack(
            use.namespace, use.resident, use.held, use.reserved, use.cap, use.lost, use.preempted, use.waited
        )
        for use in message.uses
    )
    return b"".join(uses)


def _unpack_usage(_request: int, frame: Frame) -> KvUsage:
    size = len(frame) - HEADER_BYTES
    require(size % _USE.size == 0 and size <= _USE.size * MAX_KV_USES, "the frame holds no whole accounts")
    return KvUsage(tuple(KvUse(*fields) for fields in _USE.iter_unpack(frame[HEADER_BYTES:])))


ARMS = (
    Arm(Kind.KV_QUOTAS, KvQuotas, _check_quotas, _pack_quotas, _unpack_quotas, names_request=False),
    Arm(Kind.KV_USAGE, KvUsage, _check_usage, _pack_usage, _unpack_usage, names_request=False),
)
