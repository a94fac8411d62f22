"""Which control tokens come from the template, and which from somebody's text.

A control token (``<|im_start|>``, ``</s>``) opens and closes the parts of a conversation; whoever
can write one can speak in another's name (OWASP AISVS 1.0, 2.1.7). After rendering, a template's
own control tokens and the same characters in a message look alike. So the trusted side is marked,
not the hostile one: every control token that stands literally in the template, and every special
token handed to it as a variable, is wrapped in two code points, ``OPEN`` and ``CLOSE``, and the
tokenizer knows control tokens in that wrapping only. Text without marks is ordinary text,
whatever it spells: within one message, over the seam of two messages, or together with the
template's own characters. A mark that gets lost makes a token literal, never the other way round.

The two code points are noncharacters (Unicode 16, section 23.7: "intended for process-internal
use"). Input that holds one is refused, so nobody outside can write a mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

OPEN = "\ufdd0"
CLOSE = "\ufdd1"

_ANY_MARK = re.compile(f"[{OPEN}{CLOSE}]")
_MARKED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}|[{OPEN}{CLOSE}]")


def holds_mark(text: str) -> bool:
    """Whether a reserved code point stands in ``text``."""
    return _ANY_MARK.search(text) is not None


def wrap(token: str) -> str:
    """One control token as the tokenizer knows it."""
    return f"{OPEN}{token}{CLOSE}"


def unmark(text: str) -> str:
    """``text`` without any mark."""
    return _ANY_MARK.sub("", text) if holds_mark(text) else text


class ControlTokens:
    """The control tokens of one model, by their text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if text)
        # Longest first: where one token begins another, the tokenizer takes the longer one too.
        alternatives = sorted(self.texts, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, alternatives)) or r"(?!)")

    def mark(self, text: str) -> str:
        """``text`` with every control token in it wrapped; for texts of the model's maker only."""
        return self._pattern.sub(lambda match: wrap(match.group()), text)

    def settle(self, rendered: str) -> str:
        """A rendered conversation in which marks stand around whole control tokens only."""
        return _MARKED.sub(self._settled, rendered) if holds_mark(rendered) else rendered

    def unmarked_in(self, settled: str) -> str | None:
        """The first control token that stands in settled text without marks, or None."""
        match = self._pattern.search(_MARKED.sub(OPEN, settled))
        return match.group() if match is not None else None

    def _settled(self, match: re.Match[str]) -> str:
        token = match.group(1)
        return match.group() if token in self.texts else token or ""
