"""Headers of the HTTP front end, both ways; pure.

Request: ``authorization``, ``traceparent`` (W3C Trace Context), ``x-request-timeout-ms`` (whole milliseconds, 1 to
3,600,000, after which the request is ended with 504), ``x-prefiller-host-port`` (``front.prefiller``).
Response: ``x-request-id``, ``openai-processing-ms``, ``x-ratelimit-*`` in OpenAI's spelling, ``x-athanor-ignored``
(fields without effect), and on errors ``retry-after``, ``retry-after-ms``, ``x-should-retry``, ``www-authenticate``,
``x-athanor-rule`` and ``x-athanor-policy`` (what of the policy denied, and the policy's digest).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence

from appliance.common.errors import (
    ApplianceError,
    InvalidRequestError,
    MethodNotAllowedError,
    UnauthenticatedError,
    UnavailableError,
)
from appliance.gateway.generate_request import RateState

Headers = list[tuple[str, str]]

MAX_TIMEOUT_MS = 3_600_000
"""An hour: longer than any answer takes."""

MAX_IGNORED_NAMES = 32
"""Names in ``x-athanor-ignored``; what is beyond is counted."""

_OF_POLICY = (("x-athanor-rule", "rule"), ("x-athanor-policy", "policy"))
"""Headers of a denial by their names in the error's details."""

_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TIMEOUT = re.compile(r"[0-9]{1,7}")


def deadline(values: Sequence[str]) -> float | None:
    """Return the deadline that the caller sets, in seconds of ``time.monotonic``; None without one.

    Raises:
        InvalidRequestError: the header is there and not one whole number of milliseconds in its range.
    """
    if not values:
        return None
    text = values[0] if len(values) == 1 and _TIMEOUT.fullmatch(values[0]) else "0"
    if not 1 <= int(text) <= MAX_TIMEOUT_MS:
        raise InvalidRequestError(
            f"x-request-timeout-ms must be a whole number from 1 to {MAX_TIMEOUT_MS}", param="x-request-timeout-ms"
        )
    return time.monotonic() + int(text) / 1_000


def ignored(names: Sequence[str]) -> Headers:
    """Return the header that reports fields without effect; a name that could not stand in a header is only counted."""
    if not names:
        return []
    shown = [name for name in names if _FIELD_NAME.fullmatch(name)][:MAX_IGNORED_NAMES]
    rest = len(names) - len(shown)
    return [("x-athanor-ignored", ", ".join([*shown, f"+{rest}"] if rest else shown))]


def rates(state: RateState) -> Headers:
    """Return the headers that show what is left of the tenant's rates; a limit of 0 or less is none and not shown."""
    rows: Headers = []
    for what, limit, remaining, reset_s in (
        ("requests", state.limit_requests, state.remaining_requests, state.reset_requests_s),
        ("tokens", state.limit_tokens, state.remaining_tokens, state.reset_tokens_s),
    ):
        if limit > 0:
            rows.append((f"x-ratelimit-limit-{what}", str(limit)))
            rows.append((f"x-ratelimit-remaining-{what}", str(max(0, remaining))))
            rows.append((f"x-ratelimit-reset-{what}", duration(reset_s)))
    return rows


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes one: ``600ms``, ``1s``, ``6m0s``, ``1h0m0s``; rounded up to its unit."""
    if seconds < 1:
        return f"{math.ceil(max(0.0, seconds) * 1_000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def of_error(error: ApplianceError) -> Headers:
    """Return the headers that tell a client whether and when to try again, and by which rule it was denied."""
    rows: Headers = []
    after = error.retry_after_s
    if after is not None:
        rows.append(("retry-after", str(max(1, math.ceil(after)))))
        rows.append(("retry-after-ms", str(max(1, math.ceil(after * 1_000)))))
    again = after is not None or isinstance(error, UnavailableError)
    rows.append(("x-should-retry", "true" if again else "false"))
    if isinstance(error, UnauthenticatedError):
        rows.append(("www-authenticate", "Bearer"))
    if isinstance(error, MethodNotAllowedError) and "allow" in error.details:
        rows.append(("allow", error.details["allow"]))
    rows += [(header, error.details[name]) for header, name in _OF_POLICY if name in error.details]
    return rows
