"""Names of tools, as OpenAI's API has them."""

from __future__ import annotations

import re

MAX_NAME = 128
"""Characters of the longest name that a format may spell, with what stands around it."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]")


def is_name_character(character: str) -> bool:
    """Return whether a name may hold the character; with points and colons, which formats put around names."""
    return _NAME.fullmatch(character) is not None
