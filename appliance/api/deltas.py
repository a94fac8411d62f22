"""Deltas joined and cut, so that what leaves at a tick is one event a choice, and fits its record; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from appliance.request import Delta


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """One delta a choice with all that theirs say, in the order in which the choices first spoke."""
    parts: dict[int, list[Delta]] = {}
    for delta in deltas:
        parts.setdefault(delta.choice, []).append(delta)
    return [
        Delta(
            "".join(one.text for one in own),
            tuple(token for one in own for token in one.token_ids),
            tuple(entry for one in own for entry in one.logprobs),
            choice,
        )
        for choice, own in parts.items()
    ]


def cut(delta: Delta, fits: Callable[[Delta], bool]) -> Iterator[Delta]:
    """The delta in parts that fit; one of a single token that does not is given as it is. Text and tokens are halved
    each for itself, so a part's text need not be that of its tokens."""
    tokens, scored, text = len(delta.token_ids), len(delta.logprobs), len(delta.text)
    if fits(delta) or max(tokens, scored, text) <= 1:
        yield delta
        return
    for first in (True, False):
        part = replace(
            delta,
            text=delta.text[_half(text, first=first)],
            token_ids=delta.token_ids[_half(tokens, first=first)],
            logprobs=delta.logprobs[_half(scored, first=first)],
        )
        yield from cut(part, fits)


def _half(count: int, *, first: bool) -> slice:
    middle = (count + 1) // 2
    return slice(middle) if first else slice(middle, count)
