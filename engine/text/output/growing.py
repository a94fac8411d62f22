"""Text of an output as far as it has come, and what a format's reader takes from its beginning.

A format is read by a generator (``engine.text.output.formats``) that yields whenever it needs more text. What it takes
depends on the text alone and not on the pieces in which it came: a piece that may become a marker is held back.

A marker is text, or a special token of the model. The text of a special token stands in marks (``engine.text.marks``),
so the same characters, spelt by other tokens, are text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")

Reading: TypeAlias = Generator[None, None, Result]
"""What yields whenever it needs more text, and returns a result."""

Emit = Callable[[str], None]
"""Takes text that became certain."""

SPACE = " \t\r\n"
"""JSON's white space (RFC 8259, section 2)."""


class MalformedCallError(Exception):
    """A call is not what its format prescribes; the message ends the sentence "the call ..."."""


class UnfinishedCallError(MalformedCallError):
    """The output ended inside a call."""

    def __init__(self) -> None:
        super().__init__("is not complete")


class Growing:
    """Text that grows at its end and is taken from its beginning."""

    def __init__(self, spelling: Mapping[str, str] | None = None) -> None:
        """``spelling``: marker -> its marked text, for markers that are special tokens."""
        self._spelling = spelling or {}
        self._text = ""
        self._taken: list[str] = []
        self.ended = False
        """Whether no more text will come."""

    def push(self, text: str) -> None:
        """Add text at the end."""
        self._text += text

    @property
    def waits(self) -> bool:
        """Whether text has come that is not taken yet."""
        return bool(self._text)

    def begin(self) -> None:
        """Remember what is taken from here on, for ``taken``."""
        self._taken.clear()

    def taken(self) -> str:
        """Return the text that was taken since ``begin``."""
        return "".join(self._taken)

    def more(self) -> Reading[bool]:
        """Wait for more text; false when there will be none."""
        if self.ended:
            return False
        yield
        return True

    def until(self, emit: Emit, markers: Sequence[str]) -> Reading[str | None]:
        """Take the text up to the first of the markers, and it; returns the marker, or None at the end of the output.
        No marker may stand inside another."""
        spelt = {self._spelling.get(marker, marker): marker for marker in markers}
        while True:
            places = [(at, text) for text in spelt if (at := self._text.find(text)) >= 0]
            if places:
                at, text = min(places)
                emit(self._take(at))
                self._take(len(text))
                return spelt[text]
            kept = 0 if self.ended else max((_begun(self._text, text) for text in spelt), default=0)
            emit(self._take(len(self._text) - kept))
            if not (yield from self.more()):
                return None

    def begins(self, markers: Sequence[str]) -> Reading[str | None]:
        """Take one of the markers if the text begins with it, the longest where several do."""
        spelt = {self._spelling.get(marker, marker): marker for marker in markers}
        found = yield from self._first(tuple(spelt))
        if found is None:
            return None
        self._take(len(found))
        return spelt[found]

    def stands(self, markers: Sequence[str]) -> Reading[bool]:
        """Return whether the text begins with one of the markers, and take nothing."""
        found = yield from self._first([self._spelling.get(marker, marker) for marker in markers])
        return found is not None

    def _first(self, spelt: Sequence[str]) -> Reading[str | None]:
        """Return the longest of the texts with which this one begins."""
        while True:
            found = max((text for text in spelt if self._text.startswith(text)), key=len, default=None)
            longer = [text for text in spelt if len(text) > len(found or "") and text.startswith(self._text)]
            if not longer or self.ended:
                return found
            # A longer one may still come.
            yield

    def expect(self, *markers: str) -> Reading[str]:
        """Take one of the markers, and return it.

        Raises:
            MalformedCallError: something else stands here.
        """
        found = yield from self.begins(markers)
        if found is None:
            self.check_more(*markers)
            listed = " or ".join(repr(marker.strip()) for marker in markers)
            raise MalformedCallError(f"has no {listed} where one belongs")
        return found

    def skip(self, characters: str = SPACE) -> Reading[None]:
        """Take what follows of these characters."""
        while True:
            kept = self._text.lstrip(characters)
            self._take(len(self._text) - len(kept))
            if kept or not (yield from self.more()):
                return

    def word(self, allowed: Callable[[str], bool], most: int) -> Reading[str]:
        """Take what follows of characters that are allowed, ``most`` at most."""
        seen = 0
        while True:
            # What was seen before is allowed: no text is looked at twice.
            rest = enumerate(self._text[seen:], start=seen)
            length = seen = next((at for at, char in rest if not allowed(char)), len(self._text))
            if length > most:
                raise MalformedCallError("has a name or a number that is too long")
            if length < len(self._text) or not (yield from self.more()):
                return self._take(length)

    def peek(self) -> Reading[str]:
        """Return the next character without taking it; empty at the end of the output."""
        while not self._text:
            if not (yield from self.more()):
                return ""
        return self._text[0]

    def next(self) -> Reading[str]:
        """Take one character.

        Raises:
            UnfinishedCallError: the output has ended.
        """
        if not (yield from self.peek()):
            raise UnfinishedCallError
        return self._take(1)

    def held(self) -> str:
        """Take what has come and was not taken yet."""
        return self._take(len(self._text))

    def check_more(self, *markers: str) -> None:
        """Raises:
        UnfinishedCallError: the output has ended here, or with the beginning of one of the markers.
        """
        spelt = [self._spelling.get(marker, marker) for marker in markers]
        if self.ended and (not self._text or any(text.startswith(self._text) for text in spelt)):
            raise UnfinishedCallError

    def take_while(self, characters: Callable[[str], int]) -> str:
        """Take as many characters of the text that has come as ``characters`` says; does not wait."""
        return self._take(characters(self._text))

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        if taken:
            self._taken.append(taken)
        return taken


def _begun(text: str, marker: str) -> int:
    """Return the length of the longest beginning of the marker, but for all of it, that the text ends with."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
