"""Decision as text for the operator; it names the rule."""

from __future__ import annotations

from policy.decision import Decision, Effect, Reason
from policy.model import Namespace, Route
from policy.prices import MILLION, amount_text
from policy.route_text import route_text
from policy.routes import RouteChoice

DIGEST_CHARACTERS = 12
"""Leading characters of the policy digest that are shown: enough to distinguish two loads."""


def explain(decision: Decision, origin: str = "") -> str:
    """Describe a decision in a few lines: outcome, rule, numbers and obligations.

    Args:
        decision: the decision.
        origin: where the rule's value is written, if that is not at the rule.
    """
    lines = [f"{decision.effect}: {decision.message}", f"  rule: {decision.rule}"]
    if origin:
        lines.append(f"  from: {origin}")
    if decision.limit is not None and decision.actual is not None:
        number = amount_text if decision.reason is Reason.SPEND else str
        lines.append(f"  limit: {number(decision.limit)}, found: {number(decision.actual)}")
    if decision.obligations is not None:
        granted = decision.obligations
        lines.append(
            f"  granted: {granted.max_output_tokens} output tokens, weight {granted.weight}, "
            f"{granted.priority.value} priority"
        )
        lines.append(f"  isolation class: {granted.isolation_class}, retention: {granted.retention}")
        lines.append(f"  deterministic: {granted.deterministic}")
        if granted.external:
            lines.append("  external: allowed, so nothing that the class promises is promised of an external model")
        if granted.namespace is Namespace.USER:
            lines.append("  namespace: user, so cached prefixes are found by the same end user alone")
        if granted.downgraded:
            lines.append(f"  downgraded: beyond {granted.downgraded}")
        if granted.public_prefixes:
            lines.append(f"  public prefixes: {', '.join(granted.public_prefixes)}")
        if granted.bounds_spend:
            price = [amount_text(each * MILLION) for each in (granted.price.input, granted.price.output)]
            lines.append(f"  price: {price[0]} for a million prompt tokens, {price[1]} for output; spend is limited")
    elif decision.effect is Effect.WAIT:
        lines.append(f"  waits: {decision.retry_after_s:.1f} s if nothing else changes, and is then decided on again")
    elif decision.retry_after_s is not None:
        lines.append(f"  retry after: {decision.retry_after_s:.1f} s")
    else:
        lines.append("  retry: will not help until the request or the policy changes")
    lines.append(f"  policy: {decision.policy_digest[:DIGEST_CHARACTERS]}")
    return "\n".join(lines)


def explain_route(route: Route, choice: RouteChoice) -> str:
    """Describe where a route leads, and which model was chosen, in two lines."""
    return (
        f"  route: requests for {route.id} go to {route_text(route)}\n  chosen: {choice.model} ({choice.reason.value})"
    )
