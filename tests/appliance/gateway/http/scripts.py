"""Scripts of sessions that tests of several APIs play."""

from __future__ import annotations

from appliance.gateway.generate_request import CallDelta, Delta, Finished, FinishReason, Started
from tests.appliance.gateway.front.support import Step

CALLING: list[Step] = [
    Started(7, 3),
    Delta("", (1,), reasoning="I need "),
    Delta("So: ", (2,), reasoning="both."),
    Delta("", (3,), calls=(CallDelta(0, "weather", "call_a", '{"city"'),)),
    Delta("", (4,), calls=(CallDelta(0, arguments=': "Paris"}'), CallDelta(1, "now", "call_b", "{"))),
    Delta("", (5,), calls=(CallDelta(1, arguments="}"),)),
    Finished(FinishReason.TOOL_CALLS, 7, 3, 5, reasoning_tokens=2),
]
"""Reasoning, text, and two calls."""

CALLS = [("call_a", "weather", '{"city": "Paris"}'), ("call_b", "now", "{}")]
"""Ids, names and arguments of its calls."""

REFUSING: list[Step] = [
    Started(1, 0),
    Delta("", (1,), calls=(CallDelta(0, "now", "call_a", "{"),)),
    Delta("<call>{]", (2,), calls=(CallDelta(0, refused=True),)),
    Finished(FinishReason.STOP, 1, 0, 2, refused="the call is not JSON"),
]
"""A call that turns out to be none."""

CUT: list[Step] = [
    Started(1, 0),
    Delta("", (1,), calls=(CallDelta(0, "now", "call_a", '{"a'),)),
    Finished(FinishReason.LENGTH, 1, 0, 1),
]
"""A call that is cut off."""
