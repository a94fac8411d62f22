"""Keys of end users' namespaces within their tenant's: derived, never drawn or kept.

Where the policy says ``namespace: user``, a request's KV blocks are named under a key that follows from the tenant's
namespace key and the end user that the request names. So no end user's request finds another's blocks, and whatever
renews or forgets the tenant's key (a shred, a rotation, a supervisor that came anew) does so for all of its end users.
The tenant stays the owner and the account of the blocks: quotas, fair service and spilled KV are the tenant's.

Pure but for the key of a request that names no end user, which is random and used once.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from isolation.ipc.messages import NAMESPACE_KEY_BYTES

PERSON = b"athanor-end-user"
"""Domain of the derivation; 16 bytes, BLAKE2b's limit."""


@dataclass(frozen=True, slots=True)
class UserKey:
    """Key of an end user's namespace."""

    key: bytes
    """Names the blocks in place of the tenant's key; empty: the tenant's holds."""
    keeps: bool
    """Whether blocks may be found by later requests under the key."""


NO_USER_KEY = UserKey(b"", keeps=True)
"""The tenant's requests share one namespace."""


def user_key_of(namespace: bytes, end_user: str) -> UserKey:
    """Return the key of an end user by its pseudonym; of a request that names none, a key that no other request has and
    under which nothing is kept."""
    if not end_user:
        return UserKey(secrets.token_bytes(NAMESPACE_KEY_BYTES), keeps=False)
    said = end_user.encode()
    return UserKey(
        hashlib.blake2b(said, key=namespace, digest_size=NAMESPACE_KEY_BYTES, person=PERSON).digest(), keeps=True
    )
