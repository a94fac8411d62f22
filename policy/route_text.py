"""Where routes lead, as people read it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from policy.model import Choose, Route, Target
from policy.routes import shares


def route_text(route: Route) -> str:
    """Return where a route leads: ``mini 95%, next 5%; when unready to backup``."""
    when = " or ".join(state.value for state in reversed(route.fall_back_when))
    if route.choose is Choose.CHEAPEST:
        text = f"the cheapest of {', '.join(target.model for target in route.to)}"
    else:
        text = targets_text(route.to)
    return f"{text}; when {when} to {', '.join(route.fallback)}" if route.fallback else text


def targets_text(targets: Sequence[Target]) -> str:
    """Return targets with their shares: ``mini 95%, next 5%``."""
    if len(targets) == 1:
        return targets[0].model
    return ", ".join(f"{name} {share * 100:.4g}%" for name, share in shares(targets))
