"""Nodes of a YAML text with the index of their first and last characters, for changes of the text. Pure.

``policy.positions`` reads the data of a policy and knows where each value begins; here the end of each is known too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from yaml.events import Event, MappingEndEvent, MappingStartEvent, ScalarEvent, SequenceEndEvent, SequenceStartEvent

from policy.yaml_text import events


@dataclass(frozen=True, slots=True)
class Node:
    """A scalar, a mapping or a sequence of a text."""

    start: int
    """Index of its first character."""
    end: int
    """Index behind its last character; comments and blank lines behind it are no part of it."""
    column: int
    """Column of its first character, from 0."""
    block: bool
    """Whether it is a mapping or a sequence without brackets."""
    value: str = ""
    """Text of a scalar."""
    entries: tuple[tuple[Node, Node], ...] = ()
    """Keys and values of a mapping."""
    items: tuple[Node, ...] = ()

    def entry(self, name: str) -> tuple[Node, Node] | None:
        """Return key and value of the entry of a mapping; None where it has none of this name."""
        return next((entry for entry in self.entries if entry[0].value == name), None)

    def at(self, *names: str) -> Node | None:
        """Return the value below a mapping by the keys that lead to it; None where there is none."""
        found: Node | None = self
        for name in names:
            entry = found.entry(name) if found is not None else None
            found = None if entry is None else entry[1]
        return found


def root_node(text: str) -> Node:
    """Return the root of a text that ``policy.positions.load_yaml`` has accepted, without a byte order mark."""
    stream = (one for one in events(text) if isinstance(one, _PARTS))
    return _node(next(stream), stream)


_PARTS = (MappingStartEvent, MappingEndEvent, SequenceStartEvent, SequenceEndEvent, ScalarEvent)


def _node(event: Event, stream: Iterator[Event]) -> Node:
    start, column = event.start_mark.index, event.start_mark.column
    if isinstance(event, ScalarEvent):
        return Node(start, event.end_mark.index, column, block=False, value=event.value)
    entries: list[tuple[Node, Node]] = []
    items: list[Node] = []
    if isinstance(event, MappingStartEvent):
        while not isinstance(key := next(stream), MappingEndEvent):
            entries.append((_node(key, stream), _node(next(stream), stream)))
        ended: Event = key
    else:
        while not isinstance(item := next(stream), SequenceEndEvent):
            items.append(_node(item, stream))
        ended = item
    block = not event.flow_style
    # libyaml ends a collection without brackets where the next token begins, behind comments and blank lines.
    last = entries[-1][1] if entries else items[-1] if items else None
    end = last.end if block and last is not None else ended.end_mark.index
    return Node(start, end, column, block, entries=tuple(entries), items=tuple(items))
