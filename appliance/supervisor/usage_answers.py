"""The supervisor's answers to what a tenant has used, from the usage book, which the gateway cannot read."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from appliance.common.control_usage import UsageQuery, Used
from appliance.common.errors import ConfigError, ControlError
from appliance.common.usage.pseudonyms import DIGEST_BYTES
from appliance.common.usage.tenant_sums import MAX_MODELS, MAX_USERS, tenant_sums
from appliance.supervisor.usage_rows import bounded, told

log = structlog.get_logger()

MAX_TENANT_CHARS = 63
"""Longest name of a tenant (``policy.schema``)."""

MODELS_BYTES, USERS_BYTES = 46_000, 18_000
"""Bytes of the models and of the end users of a day or a month: both fit a datagram twice. All rows fit where names are
those that a policy allows; fewer do where a gateway that was taken over invented names."""


class UsageAnswers:
    """Answers questions about usage, each some milliseconds of work at the end of a month."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        """``folder`` is the audit log's; None where none is kept, and so no book."""
        self._folder = folder
        self._clock = clock

    def check(self, message: UsageQuery) -> None:
        """Refuse what no gateway asks.

        Raises:
            ControlError: it is such a question.
        """
        if len(message.tenant) > MAX_TENANT_CHARS:
            raise ControlError("a question about usage names no tenant")
        if len(message.user) > 2 * DIGEST_BYTES:
            raise ControlError("a question about usage names no end user by its digest")

    def answer(self, message: UsageQuery) -> Used:
        """Return the sums, or why there are none. Blocks."""
        if self._folder is None:
            return _without(message, "this appliance keeps no audit log, and so no usage book")
        try:
            found = tenant_sums(self._folder, message.tenant, self._clock(), message.user)
        except ConfigError as error:
            log.error("usage cannot be told to a tenant", problem=str(error))
            return _without(message, "the usage book cannot be read now")
        return Used(
            message.request,
            found.day,
            found.month,
            told(bounded(found.in_day, MAX_MODELS, MODELS_BYTES)),
            told(bounded(found.in_month, MAX_MODELS, MODELS_BYTES)),
            told(bounded(found.users_in_day, MAX_USERS, USERS_BYTES)),
            told(bounded(found.users_in_month, MAX_USERS, USERS_BYTES)),
            "",
        )


def _without(message: UsageQuery, problem: str) -> Used:
    return Used(message.request, 0, 0, {}, {}, {}, {}, problem)
