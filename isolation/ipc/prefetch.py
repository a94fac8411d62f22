"""The message of a prompt that another host computes: its blocks may be taken before its request comes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from isolation.ipc.frame import Kind, Record, record_codec, require_range
from isolation.ipc.messages import MAX_TOKENS_PER_REQUEST, NAMESPACE_KEY_BYTES


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Host: another host computes this prompt; take its blocks from the store as they come there. Not answered, and
    no duty. It ends with the ``Submit`` of the same prompt that says ``coming``, or with an ``Abort`` of its id."""

    request: int
    """Id of its own, of no request."""
    namespace: bytes
    """As in ``Submit``."""
    token_ids: array[int]
    """The prompt, typecode ``I``, at least one id."""


def _check(message: Prefetch) -> None:
    require_range("prompt length", len(message.token_ids), 1, MAX_TOKENS_PER_REQUEST)


ARMS = (
    record_codec(
        Kind.PREFETCH, Prefetch, Record(f"namespace:{NAMESPACE_KEY_BYTES}s"), _check, tail="token_ids", typecode="I"
    ),
)
