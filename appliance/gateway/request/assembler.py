"""Token ids to text on the host, without a hop: table look-ups, UTF-8 across tokens, stop strings across deltas.

An assembler serves one request. ``push`` gives text that is final: never half a character, and never text that could
still turn out to be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from appliance.gateway.sandboxes.text_link import VocabularyTable


class StopScanner:
    """Finds the first stop string in a growing text and holds back what might become one.

    Cost per character does not depend on the stop strings, whose author may have the model repeat what nearly is one.
    """

    __slots__ = ("_begun", "_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._begun = [_Begun(stop) for stop in stops]
        self._held = ""
        self.stopped: str | None = None
        """Stop string that was met."""

    def push(self, text: str) -> str:
        """Add text; returns what is safe to show now, which is nothing after a stop string."""
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        new, text = text, self._held + text
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        if best is not None:
            self._held, self.stopped = "", best[1]
            return text[: best[0]]
        keep = max([begun.push(new) for begun in self._begun])
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the text that was held back, once no stop string can complete any more."""
        held, self._held = self._held, ""
        return held


class _Begun:
    """Length of the beginning of one stop string that a growing text ends with (Knuth, Morris and Pratt, 1977)."""

    __slots__ = ("_borders", "_length", "_stop")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._length = 0
        self._borders = [0]
        """Length of the longest shorter beginning that each beginning ends with, as far as needed."""

    def push(self, text: str) -> int:
        """Add text that does not complete the stop string."""
        stop, borders, length = self._stop, self._borders, self._length
        if not length and stop[0] not in text:
            return 0
        for char in text:
            while length and stop[length] != char:
                length = borders[length - 1]
            if stop[length] == char:
                length += 1
                if length > len(borders):
                    borders.append(self._border(length - 1))
        self._length = length
        return length

    def _border(self, last: int) -> int:
        """Return the border of the beginning that ends with the character at ``last``."""
        stop, borders = self._stop, self._borders
        length = borders[last - 1]
        while length and stop[length] != stop[last]:
            length = borders[length - 1]
        return length + (stop[length] == stop[last])


class Assembler:
    """Text of one output: bytes of tokens, decoded incrementally, scanned for stop strings."""

    __slots__ = ("_decode", "_first", "_scanner", "_table", "has_stops")

    def __init__(self, table: VocabularyTable, stops: Sequence[str] = ()) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._scanner = StopScanner(stops)
        self._first = table.strip_leading_space
        self.has_stops = bool(stops)
        """Whether a stop string may end the text."""

    @property
    def stopped(self) -> str | None:
        """Stop string that ended the text, if one did."""
        return self._scanner.stopped

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the text that became final."""
        entries = self._table.entries
        width = len(entries)
        data = b"".join([entries[token] for token in token_ids if token < width])
        if self._first and data:
            self._first = False
            data = data.removeprefix(b" ")
        return self._scanner.push(self._decode(data))

    def finish(self) -> str:
        """Return the rest at the end of the output: an unfinished character shows as U+FFFD, held text is released."""
        last = self._scanner.push(self._decode(b"", True))
        return last + self._scanner.flush()
