"""End users: whom of a tenant's users a request is for, as a pseudonym."""

from __future__ import annotations

from appliance.common.errors import InvalidRequestError
from appliance.common.usage.pseudonyms import name_digest

MAX_END_USER_CHARS = 512
"""Characters of a name: eight times what OpenAI takes for ``safety_identifier``."""


def end_user(name: str | None, param: str) -> str:
    """Return the digest of an end user's name, which is kept in its place; empty where none is named.

    Raises:
        InvalidRequestError: the name is too long.
    """
    if not name:
        return ""
    if len(name) > MAX_END_USER_CHARS:
        raise InvalidRequestError(f"{param} may have at most {MAX_END_USER_CHARS} characters", param=param)
    return name_digest(name)
