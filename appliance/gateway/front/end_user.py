"""End users: whom of a tenant's users a request is for, as a pseudonym."""

from __future__ import annotations

import hashlib
import secrets

from appliance.common.errors import InvalidRequestError

MAX_END_USER_CHARS = 512
"""Characters of a name: eight times what OpenAI takes for ``safety_identifier``."""

PSEUDONYM_BYTES = 16
"""Bytes of a pseudonym: two names never have one."""

_KEY = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
"""Key of this process: what is kept of a name leads to it for nobody who has not the process's memory."""


def end_user(name: str | None, param: str) -> str:
    """Return the pseudonym of an end user for the time of this process; empty where none is named.

    Raises:
        InvalidRequestError: the name is too long.
    """
    if not name:
        return ""
    if len(name) > MAX_END_USER_CHARS:
        raise InvalidRequestError(f"{param} may have at most {MAX_END_USER_CHARS} characters", param=param)
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=_KEY, digest_size=PSEUDONYM_BYTES).hexdigest()
