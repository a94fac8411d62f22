"""What ``bench/door.py`` judges: the figures of one attack, the bars that they are held to, and the table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.door_ground import Sample
from bench.door_tenants import Asked

LEAST_NEW = 0.99
"""Share of the requests on new connections that is answered."""

MOST_TTFT_RATIO = 3.0
"""99th percentile of the time to first token against the one without an attack."""

MOST_MEMORY = 256 << 20
"""Bytes that the gateway may take during an attack beyond what it had before."""

MOST_MEMORY_AFTER = 32 << 20
"""Bytes of these that it may still have ``QUIET_S`` after the attack."""

QUIET_S = 60.0
"""Seconds after an attack, at most, until memory and descriptors are back."""

MOST_OTHERS = 0.1
"""Share of the two cores that other work may have had where times are judged: beyond it they are the machine's."""

LEAST_ASKED = 8
"""Requests of the tenants below which a row says nothing."""

LEAST_SHARES = 100
"""Requests below which a row is not held to a hundredth of them, and may have one failure: the row over all attacks is
held to it."""

LAST_SAMPLES = 10
"""Of the gateway, a second long: what it holds at the end."""

WHOLE = "all of them"
"""Name of that row."""


@dataclass(frozen=True, slots=True)
class Calm:
    """The appliance without an attack: before the first one and, for the row over all, behind the last one."""

    times: tuple[float, ...]
    """To the first token of each request, seconds."""
    memory: int
    """Bytes of the gateway before the first attack."""
    descriptors: int
    """The most that there were while the tenants worked."""
    others: float
    """Share of the cores that other work had, at most."""

    @property
    def ttft(self) -> float:
        """99th percentile of the times."""
        return quantile(self.times, 0.99)


@dataclass(frozen=True, slots=True)
class Reached:
    """What the attackers did."""

    rate: float
    """Units a second."""
    most_open: int
    refused: int
    cut: int
    cpu: float
    """Share of their core."""


@dataclass(frozen=True, slots=True)
class Row:
    """One attack: its name, what the attackers reached, what the tenants and the gateway had of it."""

    attack: str
    addresses: int
    named: float
    """Units a second that the attack is named for; 0 of a row without an attack of its own."""
    unit: str
    reached: Reached
    asked: int
    failed_open: int
    new: int
    failed_new: int
    answered: int
    """Requests that gave a time to first token during the attack."""
    ttft: float
    calm_ttft: float
    memory: tuple[int, int, int]
    """Before, at most, after."""
    descriptors: tuple[int, int, int]
    back_s: float | None
    """Seconds after the attack until memory and descriptors were back; None: they were not."""
    gateways: int
    """Processes that the gateway was; more than one: it ended."""
    others: float
    """Share of the cores that other work had, without an attack or during it, whichever was more."""
    failures: tuple[str, ...] = ()
    """The first few failures, in words."""

    @property
    def new_share(self) -> float:
        """Share of the requests on new connections that was answered."""
        return 1.0 - self.failed_new / self.new if self.new else 0.0

    @property
    def ttft_ratio(self) -> float:
        """Time to first token against the one without an attack."""
        return self.ttft / self.calm_ttft if self.calm_ttft else 0.0


def quantile(values: Iterable[float], share: float) -> float:
    """A quantile; infinite where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("inf")


def breaches(row: Row) -> list[str]:
    """The bars that do not hold, in words of the table's columns."""
    judged = row.attack == WHOLE
    start, most, after = row.memory
    found = {
        "tenants": row.asked < LEAST_ASKED,
        "attack": row.named > 0 and not (row.reached.rate and row.reached.most_open),
        "open": row.failed_open > 0,
        "new": row.new_share < LEAST_NEW and (judged or row.new >= LEAST_SHARES or row.failed_new > 1),
        "TTFT": row.ttft_ratio > MOST_TTFT_RATIO and judges_times(row),
        "memory": most - start > MOST_MEMORY,
        "memory after": after - start > MOST_MEMORY_AFTER,
        "descriptors": row.back_s is None and row.descriptors[2] > row.descriptors[0],
        "gateway ended": row.gateways != 1,
    }
    return [name for name, broken in found.items() if broken]


def judges_times(row: Row) -> bool:
    """Whether a row is held to its time to first token: its requests are enough, and the machine was its own."""
    return row.others <= MOST_OTHERS and (row.attack == WHOLE or row.answered >= LEAST_SHARES)


def is_back(sample: Sample, before: int, descriptors: int) -> bool:
    """Whether the gateway holds no more than it may after an attack."""
    return sample.memory - before <= MOST_MEMORY_AFTER and sample.descriptors <= descriptors


def row_of(  # noqa: PLR0913 - a row is of so many things
    attack: str,
    named: tuple[int, float, str],
    reached: Reached,
    calm: Calm,
    asked: Sequence[Asked],
    samples: Sequence[Sample],
    attacked: tuple[float, float],
    back_s: float | None,
    others: float,
) -> Row:
    """The row of an attack from all that was seen from its begin to the end of the quiet behind it. ``named``: its
    addresses, rate and unit; ``attacked``: when it began and ended. Failures count to the end, all else until the
    attack's."""
    begin, end = attacked
    meanwhile = [one for one in asked if begin <= one.due <= end]
    new = [one for one in meanwhile if not one.kept]
    times = [one.ttft for one in meanwhile if not one.failure]
    before = samples[0]
    most = max(sample.descriptors for sample in samples)
    failed = [one for one in asked if one.failure]
    return Row(
        attack,
        *named,
        reached,
        asked=len(asked),
        failed_open=sum(one.kept for one in failed),
        new=len(new),
        failed_new=sum(bool(one.failure) for one in new),
        answered=len(times),
        ttft=quantile(times, 0.99),
        calm_ttft=calm.ttft,
        memory=(before.memory, max(sample.memory for sample in samples), samples[-1].memory),
        descriptors=(calm.descriptors, most, left_over(samples)),
        back_s=back_s,
        gateways=len({sample.pid for sample in samples}),
        others=max(calm.others, others),
        failures=tuple(f"{one.api} {'open' if one.kept else 'new'}: {one.failure}" for one in failed[:6]),
    )


def left_over(samples: Sequence[Sample]) -> int:
    """Descriptors at the end: the fewest of the last samples, in which the tenants' new connections come and go."""
    return min(sample.descriptors for sample in samples[-LAST_SAMPLES:])


def whole_row(
    rows: Sequence[Row],
    asked: Sequence[Asked],
    times: Sequence[float],
    calm: Calm,
    samples: Sequence[Sample],
    back_s: float | None,
) -> Row:
    """The row over all attacks on an appliance. ``asked``: every request, those between two attacks as well; ``times``:
    every time to first token during one; ``samples``: the gateway's, to the end."""
    return Row(
        WHOLE,
        max(row.addresses for row in rows),
        0.0,
        f"{len(rows)} attacks",
        Reached(
            0.0,
            max(row.reached.most_open for row in rows),
            sum(row.reached.refused for row in rows),
            sum(row.reached.cut for row in rows),
            0.0,
        ),
        asked=len(asked),
        failed_open=sum(one.kept and bool(one.failure) for one in asked),
        new=sum(row.new for row in rows),
        failed_new=sum(row.failed_new for row in rows),
        answered=len(times),
        ttft=quantile(times, 0.99),
        calm_ttft=calm.ttft,
        memory=(calm.memory, max(row.memory[1] for row in rows), samples[-1].memory),
        descriptors=(calm.descriptors, max(row.descriptors[1] for row in rows), left_over(samples)),
        back_s=back_s,
        gateways=max(row.gateways for row in rows),
        others=max(calm.others, sum(row.others for row in rows) / len(rows)),
    )


def within(asked: Sequence[Asked], begin: float, end: float) -> list[Asked]:
    """Requests that were under way at some moment of a time."""
    return [one for one in asked if one.due <= end and one.ended >= begin]


HEAD = (
    f"{'attack':<18} {'addr':>4} {'reached / named rate':>34} {'open':>5} {'cut':>6} {'asked':>5} {'failed':>6}"
    f" {'new ok':>7} {'p99 TTFT ms':>17} {'memory MB':>17} {'descriptors':>17} {'back':>5}"
)


def line(row: Row) -> str:
    """One line of the table."""
    rate = f"{row.reached.rate:,.0f} / {row.named:,.0f} {row.unit}/s" if row.named else row.unit
    memory = " ".join(f"{size / (1 << 20):.0f}" for size in row.memory)
    descriptors = " ".join(map(str, row.descriptors))
    back = "never" if row.back_s is None else f"{row.back_s:.0f} s"
    ttft = f"{row.calm_ttft * 1e3:.0f} > {row.ttft * 1e3:.0f} {row.ttft_ratio:.1f}x"
    cut = row.reached.cut + row.reached.refused
    found = breaches(row)
    verdict = "pass" if not found else "FAIL: " + ", ".join(found)
    if row.others > MOST_OTHERS:
        verdict += f"; times not judged: other work had {row.others:.0%} of the cores"
    return (
        f"{row.attack:<18} {row.addresses:>4} {rate:>34} {row.reached.most_open:>5} {cut:>6} {row.asked:>5}"
        f" {row.failed_open:>6} {row.new_share:>7.1%} {ttft:>17} {memory:>17} {descriptors:>17} {back:>5}  {verdict}"
    )
