"""Headers: deadlines, durations, retries, reports."""

from __future__ import annotations

import time

import pytest

from appliance.common.errors import (
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    RateLimitedError,
    UnauthenticatedError,
    UnavailableError,
)
from appliance.gateway.front.request_builder import traceparent
from appliance.gateway.generate_request import RateState
from appliance.gateway.http import header_fields


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (-1, "0ms"),
        (0.0001, "1ms"),
        (0.6, "600ms"),
        (1, "1s"),
        (59.2, "1m0s"),
        (360, "6m0s"),
        (3661, "1h1m1s"),
    ],
)
def test_durations_read_as_openais(seconds, text):
    """Milliseconds under a second, then hours, minutes, seconds; rounded up."""
    assert header_fields.duration(seconds) == text


def test_rates_leave_out_what_is_unlimited():
    """A limit of zero is none and gives no header."""
    rows = dict(header_fields.rates(RateState(10, 3, 1.5, 0, 0, 0.0)))
    assert rows == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "2s",
    }


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RateLimitedError("x", retry_after_s=0.25),
            {"retry-after": "1", "retry-after-ms": "250", "x-should-retry": "true"},
        ),
        (RateLimitedError("budget used up"), {"x-should-retry": "false"}),
        (UnavailableError("x"), {"x-should-retry": "true"}),
        (InternalError("x"), {"x-should-retry": "false"}),
        (UnauthenticatedError("x"), {"x-should-retry": "false", "www-authenticate": "Bearer"}),
        (MethodNotAllowedError("x", details={"allow": "GET"}), {"x-should-retry": "false", "allow": "GET"}),
    ],
)
def test_errors_say_whether_and_when_to_try_again(error, expected):
    """A retry is promised only where one can help."""
    assert dict(header_fields.of_error(error)) == expected


@pytest.mark.parametrize(
    "values", [["0"], ["-5"], ["1.5"], ["x"], ["99999999"], ["3600001"], ["5", "5"], [""], ["\u0665"]]
)
def test_a_bad_deadline_is_refused(values):
    """One whole number of milliseconds within the hour, or a 400."""
    with pytest.raises(InvalidRequestError):
        header_fields.deadline(values)


def test_a_deadline_counts_from_now():
    """Milliseconds become a point on the monotonic clock; none is none."""
    assert header_fields.deadline([]) is None
    before = time.monotonic()
    found = header_fields.deadline(["2000"])
    assert found is not None
    assert before + 2.0 <= found <= time.monotonic() + 2.0


@pytest.mark.parametrize(
    ("values", "taken"),
    [
        (["00-" + "a" * 32 + "-" + "b" * 16 + "-01"], True),
        (["00-" + "0" * 32 + "-" + "b" * 16 + "-01"], False),
        (["00-" + "a" * 32 + "-" + "0" * 16 + "-01"], False),
        (["ff-" + "a" * 32 + "-" + "b" * 16 + "-01"], False),
        (["00-" + "A" * 32 + "-" + "b" * 16 + "-01"], False),
        (["garbage"], False),
        ([], False),
    ],
)
def test_only_a_well_formed_traceparent_is_passed_on(values, taken):
    """A bad one is dropped, not an error (W3C Trace Context, section 4.3)."""
    assert (traceparent(values) is not None) is taken


def test_ignored_names_cannot_forge_headers():
    """Names with other characters, and names beyond the limit, are only counted."""
    names = ["user", "a\r\nset-cookie: x=1", "b" * 65, *[f"f{i}" for i in range(40)]]
    (row,) = header_fields.ignored(names)
    assert row[0] == "x-athanor-ignored"
    shown = row[1].split(", ")
    assert shown[0] == "user"
    assert len(shown) == header_fields.MAX_IGNORED_NAMES + 1
    assert shown[-1] == f"+{len(names) - header_fields.MAX_IGNORED_NAMES}"
    assert "cookie" not in row[1]
    assert header_fields.ignored([]) == []
