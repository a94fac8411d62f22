"""Calls that each begin with a marker, within a section or without: the reading that several formats share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.text.output.growing import Growing, Reading
from engine.text.output.parts import Parts

ReadCall = Callable[[Growing, Parts], Reading[None]]
"""Takes one call behind its marker."""


def read_calls(
    text: Growing, parts: Parts, begin: str, read_call: ReadCall, around: Sequence[str] = ()
) -> Reading[None]:
    """Read content, and the calls in it, to the end of the output.

    Args:
        text: the output.
        parts: takes what is found.
        begin: marker before each call.
        read_call: takes one call, to its end.
        around: markers around calls, which are dropped.
    """
    markers = (*around, begin)
    while not parts.over:
        marker = yield from text.until(parts.content, markers)
        if marker is None:
            return
        if marker == begin:
            with parts.trying(text, begin):
                yield from read_call(text, parts)
                parts.called()
