"""Numbers of a request that say how tokens are chosen, from what either front end was sent."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front.request_builder import MAX_TOKEN_ID, Stamp, check_most, check_range
from isolation.ipc.logit_bias import MAX_LOGIT_BIAS, MAX_LOGIT_BIASES, LogitBias
from isolation.ipc.sampling import PARAMETERS, Number, Sampling


def sampling_of(given: Mapping[str, Number | None], stamp: Stamp, prefix: str = "") -> Sampling:
    """Return the sampling numbers, from those that the caller sent.

    Args:
        given: by name; None and absent ones take their defaults.
        stamp: has the seed for a caller that sends none.
        prefix: stands before each name in the caller's spelling.

    Raises:
        InvalidRequestError: a number is out of its range.
    """
    values: dict[str, Any] = {"seed": stamp.seed}
    for one in PARAMETERS:
        value, param = given.get(one.name), prefix + one.name
        if value is None:
            continue
        if one.above and value == one.low:
            raise InvalidRequestError(f"{param} must be above {one.low:g}; {one.hint}", param=param)
        check_range(value, one.low, one.high, param)
        values[one.name] = one.convert(value)
    return Sampling(**values)


def logit_bias_of(given: Mapping[int, float], param: str) -> LogitBias | None:
    """Return the biases of token ids; None where there is none that changes a score.

    Raises:
        InvalidRequestError: too many, or an id or a bias out of its range.
    """
    check_most(len(given), MAX_LOGIT_BIASES, param, "entries")
    for token_id, bias in given.items():
        check_range(token_id, 0, MAX_TOKEN_ID, param)
        check_range(bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, param)
    told = sorted((token_id, bias) for token_id, bias in given.items() if bias)
    if not told:
        return None
    return LogitBias(array("I", [one for one, _ in told]), array("f", [bias for _, bias in told]))


def sent(given: Mapping[str, Number | None]) -> frozenset[str]:
    """Return the names of sampling numbers that the caller sent."""
    return frozenset(name for name, value in given.items() if value is not None)
