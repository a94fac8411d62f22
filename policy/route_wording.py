"""Words for changes of routes between two policies. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from policy.model import Choose, ModelState, Target
from policy.route_text import targets_text
from policy.told import Direction, Sides, Told, Wording, listed, more


def _reach(old: Iterable[str], new: Iterable[str]) -> Direction:
    """Return the direction of a change of the models that a route leads to."""
    before, after = set(old), set(new)
    if before == after or (before - after and after - before):
        return Direction.OTHER
    return more(before < after)


def _targets(old: Sequence[Target], new: Sequence[Target], sides: Sides) -> list[Told]:
    direction = _reach((one.model for one in old), (one.model for one in new))
    return [Told(direction, f"sends requests to {targets_text(new)} instead of {targets_text(old)}")]


def _choose(old: Choose, new: Choose, _sides: Sides) -> list[Told]:
    words = {Choose.WEIGHT: "by weight", Choose.CHEAPEST: "by price, the cheapest first"}
    return [Told(Direction.OTHER, f"chooses {words[new]}, instead of {words[old]}")]


def _fallback(old: Sequence[str], new: Sequence[str], _sides: Sides) -> list[Told]:
    before, after = (listed(names) if names else "nothing" for names in (old, new))
    return [Told(_reach(old, new), f"falls back to {after} instead of {before}")]


def _fall_back_when(old: Sequence[ModelState], new: Sequence[ModelState], _sides: Sides) -> list[Told]:
    before, after = (" or ".join(state.value for state in reversed(states)) for states in (old, new))
    return [Told(Direction.OTHER, f"falls back when a model is {after}, instead of {before}")]


def _told_at_routes(_old: object, _new: object, _sides: Sides) -> list[Told]:
    """Tell nothing: ``Route.to`` tells all targets together."""
    return []


ROUTE_WORDINGS: Mapping[str, Wording] = {
    "to": _targets,
    "choose": _choose,
    "fallback": _fallback,
    "fall_back_when": _fall_back_when,
}
"""Field of a route to what is told of a change."""

TARGET_WORDINGS: Mapping[str, Wording] = {"model": _told_at_routes, "weight": _told_at_routes}
"""Field of a target likewise."""
