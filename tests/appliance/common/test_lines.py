"""Lines of refused requests: bounded for each caller, and what was left out is counted."""

from __future__ import annotations

from appliance.common.errors import UnauthenticatedError
from appliance.common.lines import BURST_LINES, LINES_A_SECOND, RefusedLines
from appliance.gateway.generate_request import CallContext
from appliance.gateway.telemetry.tracer import TelemetrySettings, open_telemetry
from tests.appliance.captured_logs import capture_logs


def test_a_flood_has_few_lines_and_is_counted() -> None:
    """After a burst there is a line now and then, which says how many there were besides; another caller has lines of
    its own, and a clock that steps back gives none."""
    lines = RefusedLines(100.0)
    assert [lines.take("loud", 100.0) for _ in range(BURST_LINES + 500)] == [0] * BURST_LINES + [None] * 500
    assert lines.take("loud", 50.0) is None
    assert lines.take("quiet", 100.0) == 0
    assert lines.take(None, 100.0) == 0
    later = 100.0 + 1.5 / LINES_A_SECOND
    assert [lines.take("loud", later), lines.take("loud", later)] == [501, None]
    assert [lines.take("loud", 1e9) for _ in range(2)] == [1, 0]


def test_strangers_cannot_fill_the_log_and_every_refusal_counts() -> None:
    """A thousand calls without a key have some dozens of lines; store and metrics have them all."""
    telemetry = open_telemetry(TelemetrySettings(version="0"))
    with capture_logs() as lines:
        for number in range(1_000):
            trace = telemetry.start(CallContext(route="POST *", front_end="http"), f"req_{number:024x}", None)
            trace.finish(error=UnauthenticatedError("no valid credential"))
    said = [line for line in lines if line["event"] == "request"]
    assert BURST_LINES <= len(said) < 2 * BURST_LINES
    assert telemetry.store.newest(1).recorded == 1_000
    assert 'outcome="refused"' in telemetry.metrics.render()[1].decode()
    telemetry.close()
