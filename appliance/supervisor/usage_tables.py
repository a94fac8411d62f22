"""The supervisor's answers to what all tenants have used, for the operator's page. The gateway cannot read the book.

A span is read once and then told for a while, the longer the more it cost: however many pages are open, reading takes a
twentieth of one core at most. Readings have numbers, so that a page can show what is from one reading alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import structlog

from appliance.common.config_places import HostConfig
from appliance.common.control_usage import Overview, OverviewQuery, UsageTable, UsageTableQuery
from appliance.common.errors import ConfigError, ControlError
from appliance.common.usage.report import (
    SECONDS_PER_HOUR,
    By,
    Filter,
    Sum,
    hours_awake,
    open_to_read,
    sums_together,
    total,
)
from appliance.common.usage.spans import Span, num_steps, step_of, step_s, times
from appliance.common.usage.tenant_tables import tenant_table
from appliance.common.usage.unusual import Unusual, unusual
from appliance.supervisor.usage_answers import MAX_TENANT_CHARS
from appliance.supervisor.usage_rows import OTHERS, bounded, first_lists, first_rows, numbers, row_bytes, told

log = structlog.get_logger()

FRESH_S = 5.0
"""Shortest time for which what was read is told again."""

TIMES_READ = 20
"""How many times as long as reading took it is told again."""

WITHIN_S = 30.0
"""Longest that a sum of the book may take, and half of what the two of a page may take together. 30 days of 10,000
tenants at work in each hour, seven million rows, take 8 to 12 seconds of processor time for each of the two."""

MAX_MODELS = 60
"""Models of an overview, those with the highest cost; all others are one row."""

MAX_SERIES = 5
"""Models with steps of their own: as many as colours that can be told from each other, beside one for all others."""

MAX_ROWS = 200
"""Rows of one part of a table."""

MAX_ROW_BYTES = 80_000
"""Bytes of the rows of one answer, so that it fits a datagram whatever the names are."""

STEPS_BYTES, MODELS_BYTES, UNUSUAL_BYTES = 80_000, 32_000, 8_000
"""Bytes of an overview's steps, models and unusual tenants, which leave 11 kB of a datagram for all else. With names
and sums as large as the policy and the book allow, all rows fit; fewer do where a gateway that was taken over invented
names."""

MAX_FIND_CHARS = 64
MAX_OFFSET = 1_000_000


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read of a span."""

    chosen: Filter
    tenants: Sequence[Sum]
    steps: Sequence[Sum]
    """By step and model."""
    unusual: Sequence[Unusual]
    hours: float
    number: int
    stale_at: float


@dataclass(frozen=True, slots=True)
class _Failed:
    """Why a span could not be read; told again as well, or one that takes too long would be read without end."""

    error: ConfigError
    stale_at: float


class UsageTables:
    """Answers questions about the usage of all tenants; one at a time."""

    def __init__(
        self,
        folder: Path | None,
        classes: Callable[[], Mapping[str, str]],
        host: HostConfig | None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``folder`` is the audit log's, None where none is kept; ``classes`` gives each tenant's class and may block;
        ``host`` has the price of an hour."""
        self._folder, self._classes, self._host = folder, classes, host
        self._clock, self._monotonic = clock, monotonic
        self._read: dict[Span, _Read | _Failed] = {}
        self._readings = 0
        self._epoch = 0
        """Times that what is kept was forgotten."""

    def check(self, message: OverviewQuery | UsageTableQuery) -> None:
        """Refuse what no gateway asks.

        Raises:
            ControlError: it is such a question.
        """
        if message.span not in tuple(Span):
            raise ControlError("a question about usage names no span")
        if isinstance(message, OverviewQuery):
            return
        if len(message.tenant) > MAX_TENANT_CHARS or len(message.find) > MAX_FIND_CHARS:
            raise ControlError("a question about usage has a name that is too long")
        if not 0 <= message.offset <= MAX_OFFSET:
            raise ControlError("a question about usage begins at no row")
        if message.by not in ((By.MODEL, By.USER) if message.tenant else (By.TENANT,)):
            raise ControlError("a question about usage is not summed so")

    def forget(self) -> None:
        """Forget what was read and what is being read, since the book has another name for a tenant now. May be called
        from any thread."""
        self._epoch += 1
        self._read = {}

    def answer(self, message: OverviewQuery | UsageTableQuery) -> Overview | UsageTable:
        """Return the sums, or why there are none. Blocks."""
        if self._folder is None:
            return _without(message, "this appliance keeps no audit log, and so no usage book")
        try:
            if isinstance(message, OverviewQuery):
                return self._overview(message, self._folder)
            return self._table(message, self._folder)
        except ConfigError as error:
            log.error("usage cannot be told to the operator's page", problem=str(error))
            slow = "took more than" in error.message
            return _without(message, error.message if slow else "the usage book cannot be read now")

    def _overview(self, message: OverviewQuery, folder: Path) -> Overview:
        span = Span(message.span)
        read = self._known(span, folder)
        begin, end = (round(one.timestamp()) for one in (read.chosen.since, read.chosen.until))
        by_model = _summed(read.steps, lambda one: one.keys[1])
        classes = self._classes()
        by_class = _summed(read.tenants, lambda one: classes.get(one.keys[0], OTHERS))
        odd = {one.tenant: [one.requests, one.usual_requests, one.tokens, one.usual_tokens] for one in read.unusual}
        return Overview(
            message.request,
            begin,
            end,
            step_s(span),
            numbers(total(read.tenants)),
            told(bounded(by_model, MAX_MODELS, MODELS_BYTES)),
            told(by_class),
            _fitting_steps(read.steps, by_model, span, begin),
            first_lists(odd, UNUSUAL_BYTES),
            read.hours,
            -1.0 if self._host is None else self._host.price_per_hour,
            "" if self._host is None else self._host.currency,
            "",
            read.number,
        )

    def _table(self, message: UsageTableQuery, folder: Path) -> UsageTable:
        span, reading = Span(message.span), 0
        if message.tenant:
            chosen = times(span, self._clock())
            rows: Sequence[Sum] = tenant_table(folder, message.tenant, By(message.by), chosen, WITHIN_S)
        else:
            found = message.find.casefold()
            read = self._known(span, folder)
            rows, reading = [one for one in read.tenants if found in one.keys[0].casefold()], read.number
        shown = first_rows(rows[message.offset :], MAX_ROWS, MAX_ROW_BYTES)
        return UsageTable(message.request, told(shown), len(rows), "", reading)

    def _known(self, span: Span, folder: Path) -> _Read:
        """What was read of a span lately, or now.

        Raises:
            ConfigError: it cannot be read, now or lately.
        """
        began, kept, epoch = self._monotonic(), self._read, self._epoch
        known = kept.get(span)
        if known is None or began >= known.stale_at:
            try:
                known = self._now(span, folder)
            except ConfigError as error:
                known = _Failed(error, 0.0)
            # In a table that is dropped, where all was forgotten meanwhile.
            kept[span] = known = replace(known, stale_at=self._stale_at(began))
            if epoch != self._epoch:
                return self._known(span, folder)
        if isinstance(known, _Failed):
            raise known.error
        return known

    def _now(self, span: Span, folder: Path) -> _Read:
        now = self._clock()
        chosen = times(span, now)
        groups = [By.TENANT], [step_of(span), By.MODEL]
        tenants, steps = sums_together(folder, groups, chosen, 2 * WITHIN_S)
        with open_to_read(folder, WITHIN_S) as book:
            odd = unusual(book, int(now // SECONDS_PER_HOUR))
        hours = hours_awake(folder, chosen, datetime.fromtimestamp(now, UTC))
        self._readings += 1
        return _Read(chosen, tenants, steps, odd, hours, self._readings, 0.0)

    def _stale_at(self, began: float) -> float:
        ended = self._monotonic()
        return ended + max(FRESH_S, TIMES_READ * (ended - began))


def _summed(rows: Iterable[Sum], key: Callable[[Sum], str]) -> list[Sum]:
    """Rows summed by a name, those with the highest cost first."""
    groups: dict[str, list[Sum]] = {}
    for one in rows:
        groups.setdefault(key(one), []).append(one)
    return sorted((total(group, name) for name, group in groups.items()), key=_order)


def _order(one: Sum) -> tuple[int, int, str]:
    return -one.cost, -one.tokens, one.keys[0]


def _fitting_steps(rows: Sequence[Sum], by_model: Sequence[Sum], span: Span, begin: int) -> dict[str, list[int]]:
    """Steps of the models with the most and of all others, of so many models as there is room for."""
    series = [one.keys[0] for one in by_model[:MAX_SERIES] if one.keys[0] != OTHERS]
    while True:
        shown = _steps(rows, series, span, begin)
        if not series or sum(row_bytes(*row) for row in shown.items()) <= STEPS_BYTES:
            return shown
        series.pop()


def _steps(rows: Iterable[Sum], models: Sequence[str], span: Span, begin: int) -> dict[str, list[int]]:
    """Requests, tokens and cost of each step by model, one after the other; all other models under no name."""
    shown = {name: [0] * (3 * num_steps(span)) for name in (*models, OTHERS)}
    places = {time_name(begin + number * step_s(span), span): number for number in range(num_steps(span))}
    for one in rows:
        amounts = shown.get(one.keys[1], shown[OTHERS])
        place = 3 * places[one.keys[0]]
        for column, amount in enumerate((one.requests, one.tokens, one.cost)):
            amounts[place + column] += amount
    if not any(shown[OTHERS]):
        del shown[OTHERS]
    return shown


def time_name(unix_s: int, span: Span) -> str:
    """Return the name that the book's sums have for the step that begins at a Unix time."""
    return time.strftime("%Y-%m-%dT%H:00Z" if step_of(span) is By.HOUR else "%Y-%m-%d", time.gmtime(unix_s))


def _without(message: OverviewQuery | UsageTableQuery, problem: str) -> Overview | UsageTable:
    if isinstance(message, UsageTableQuery):
        return UsageTable(message.request, {}, 0, problem)
    return Overview(message.request, 0, 0, 0, [], {}, {}, {}, {}, 0.0, -1.0, "", problem)
