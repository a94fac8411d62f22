"""Marks that distinguish control tokens written by the template from text that looks like them.

A control token (``<|im_start|>``, ``</s>``) opens and closes the parts of a conversation; a party that can write one
can speak in another's name (OWASP AISVS 1.0, 2.1.7). After rendering, a template's own control tokens and these
characters in a message look alike. So the trusted side is marked, not the hostile one: every control token that stands
literally in the template, and every special token passed to it as a variable, is wrapped in two code points, ``OPEN``
and ``CLOSE``, and the tokenizer recognises control tokens only in that form. Text without marks is ordinary text,
whatever it spells: within one message, across two messages, or together with the template's own characters. A lost mark
makes a token literal, never the reverse.

The two code points are noncharacters (Unicode 16, section 23.7: "intended for process-internal use"). Input that
contains one is refused, so no client can write a mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

OPEN = "\ufdd0"
CLOSE = "\ufdd1"

_ANY_MARK = re.compile(f"[{OPEN}{CLOSE}]")
_MARKED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}|[{OPEN}{CLOSE}]")


def holds_mark(text: str) -> bool:
    """Return whether ``text`` contains a reserved code point."""
    return _ANY_MARK.search(text) is not None


def wrap(token: str) -> str:
    """Wrap one control token in its marks, the form known to the tokenizer."""
    return f"{OPEN}{token}{CLOSE}"


def unmark(text: str) -> str:
    """Return ``text`` without any mark."""
    return _ANY_MARK.sub("", text) if holds_mark(text) else text


class ControlTokens:
    """Control tokens of one model, by their text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if text)
        # Longest first: where one token is a prefix of another, the tokenizer takes the longer one too.
        alternatives = sorted(self.texts, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, alternatives)) or r"(?!)")

    def mark(self, text: str) -> str:
        """Wrap every control token in ``text``; only for texts of the model's author."""
        return self._pattern.sub(lambda match: wrap(match.group()), text)

    def settle(self, rendered: str) -> str:
        """Remove marks from a rendered conversation except those around whole control tokens."""
        return _MARKED.sub(self._settled, rendered) if holds_mark(rendered) else rendered

    def unmarked_in(self, settled: str) -> str | None:
        """Return the first control token in settled text that has no marks, or None."""
        match = self._pattern.search(_MARKED.sub(OPEN, settled))
        return match.group() if match is not None else None

    def _settled(self, match: re.Match[str]) -> str:
        token = match.group(1)
        return match.group() if token in self.texts else token or ""
