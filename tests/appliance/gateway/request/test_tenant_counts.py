"""What status shows of each tenant: requests, tokens and refusals since the start."""

from __future__ import annotations

import pytest

from appliance.common.errors import (
    ApplianceError,
    CancelledError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    PermissionDeniedError,
    QuarantinedError,
    RateLimitedError,
    UnauthenticatedError,
)
from appliance.common.outcomes import OUTCOMES, outcome_of
from appliance.common.status import Counts
from appliance.gateway.request.tenant_counts import STRANGER, TenantCounts, Tokens


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (UnauthenticatedError("who?"), "refused"),
        (PermissionDeniedError("no"), "refused"),
        (RateLimitedError("slow down"), "refused"),
        (QuarantinedError("never again"), "refused"),
        (InvalidRequestError("what?"), "invalid"),
        (ModelNotFoundError("which?"), "invalid"),
        (CancelledError("left"), "cancelled"),
        (InternalError("ours"), "failed"),
    ],
)
def test_an_outcome_says_whose_doing_it_was(error: ApplianceError | None, outcome: str) -> None:
    """A rule, a limit or a credential refuses; a caller's mistake is invalid, and no refusal."""
    assert outcome in OUTCOMES
    assert outcome_of(error) == outcome


def test_requests_are_counted_by_how_they_ended() -> None:
    """Each under its outcome, with its tokens; callers without a credential are in the sum alone."""
    counts = TenantCounts()
    counts.add(Tokens("a", "m", 7, 2, 5), None)
    counts.add(Tokens("a", "m"), RateLimitedError("slow down"))
    counts.add(Tokens("a", "m"), InvalidRequestError("what?"))
    counts.add(Tokens("a", "m", 1, 0, 2), CancelledError("left"))
    counts.add(Tokens("a", "m"), InternalError("ours"))
    counts.add(Tokens(STRANGER, ""), UnauthenticatedError("who?"))
    found = Counts(ok=1, refused=1, invalid=1, cancelled=1, failed=1, input_tokens=8, cached_tokens=2, output_tokens=7)
    assert counts.of("a") == found
    assert (found.requests, found.tokens) == (5, 15)
    assert counts.of("b") == Counts()
    tenants, total = counts.now()
    assert tenants["a"] == found
    assert (total.requests, total.refused) == (6, 2)


def test_tokens_count_while_their_request_runs_and_once() -> None:
    """A running request's tokens are seen as they flow; its end adds none a second time."""
    live = [Tokens("a", "m", 7, 2, 5)]
    counts = TenantCounts(lambda: live)
    assert (counts.of("a").output_tokens, counts.of("a").requests) == (5, 0)
    assert counts.moved() == {("a", "m", "input"): 7, ("a", "m", "cached"): 2, ("a", "m", "output"): 5}
    live[0] = Tokens("a", "m", 7, 2, 9)
    assert counts.moved()["a", "m", "output"] == 9
    counts.add(live.pop(), None)
    assert (counts.of("a").output_tokens, counts.of("a").requests) == (9, 1)
    assert counts.moved()["a", "m", "output"] == 9
    assert counts.moved() == {}
