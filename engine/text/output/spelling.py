"""How a model spells the markers of a format: as special tokens, or as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from engine.text.marks import CLOSE, OPEN, ControlTokens


class Spelling:
    """Markers of a format in one model's tokens."""

    def __init__(self, markers: Iterable[str], special: Mapping[str, int]) -> None:
        """``special``: text -> id of the model's special tokens."""
        markers = tuple(markers)
        self._ids = {text: number for text, number in special.items() if any(text in marker for marker in markers)}
        self._tokens = ControlTokens(self._ids)
        self.marked = {marker: text for marker in markers if (text := self._tokens.mark(marker)) != marker}
        """Marker -> its text with the special tokens in marks, for those that have one."""
        self.texts = {number: self._tokens.mark(text) for text, number in self._ids.items()}
        """Special token that is part of a marker -> its marked text."""

    def is_special(self, marker: str) -> bool:
        """Return whether the marker holds a special token, so that no text can spell it."""
        return marker in self.marked

    def split(self, marker: str) -> tuple[str, str]:
        """Return what stands before the marker's first special token, and the rest; all of it where there is none."""
        plain, _, _ = self._tokens.mark(marker).partition(OPEN)
        return plain, marker[len(plain) :]

    def rule(self, text: str) -> str:
        """Return the text as part of a rule in llguidance's dialect of Lark."""
        pieces = []
        for piece in self._tokens.mark(text).split(OPEN):
            name, mark, rest = piece.partition(CLOSE)
            if mark:
                pieces.append(f"<[{self._ids[name]}]>")
            else:
                rest = name
            if rest:
                pieces.append(quoted(rest))
        return " ".join(pieces)


def quoted(text: str) -> str:
    """Return the text as a string of llguidance's dialect of Lark, which is JSON's."""
    return json.dumps(text, ensure_ascii=False)
