"""Token buckets as pure arithmetic: the level is a value, the time an argument.

A bucket gains a sixtieth of its rate each second, up to its capacity, which is one minute's units unless the policy
gives it another burst. Before work runs, its largest possible use is
*reserved*; when its true use is known, it is *settled*: unused units flow back, and use beyond the reservation makes a
debt (a level below zero) that later gains pay off. Levels survive a reload of the policy: they are rescaled to the new
capacity and never refilled, so a reload cannot circumvent a limit.

Times are seconds of one monotonic clock. A clock that steps back adds nothing and takes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SECONDS_PER_MINUTE = 60.0

ROUNDING_S = 1e-6
"""Seconds of a bucket's gain that are ignored: float arithmetic is off by less after years of uptime at the highest
rate, so a caller who waited as told is admitted."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Rate in units a minute, and what a full bucket holds."""

    per_minute: int
    """At least 1."""
    burst: int | None = None
    """Units that a full bucket holds, at most an hour's; None: one minute's."""
    capacity: int = field(init=False, repr=False, compare=False)
    """Units that a full bucket holds."""
    per_second: float = field(init=False, repr=False, compare=False)
    """Units gained a second."""
    rounding: float = field(init=False, repr=False, compare=False)
    """Number of units that is ignored as rounding error."""

    def __post_init__(self) -> None:
        # Computed once: a decision asks for them some ten times.
        object.__setattr__(self, "capacity", self.per_minute if self.burst is None else self.burst)
        object.__setattr__(self, "per_second", self.per_minute / SECONDS_PER_MINUTE)
        object.__setattr__(self, "rounding", self.per_second * ROUNDING_S)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Level of a token bucket at one moment."""

    level: float
    """Units that may be taken; a negative level is debt."""
    updated_at: float
    """Seconds of the caller's monotonic clock."""


def full(rate: Rate, now: float) -> Bucket:
    """Return the bucket of a tenant seen for the first time."""
    return Bucket(float(rate.capacity), now)


def level(bucket: Bucket, rate: Rate, now: float) -> float:
    """Return the units in the bucket at ``now``."""
    elapsed = now - bucket.updated_at
    if elapsed <= 0.0:
        return bucket.level
    grown, most = bucket.level + elapsed * rate.per_second, rate.capacity
    return grown if grown < most else max(bucket.level, float(most))


def refill(bucket: Bucket, rate: Rate, now: float) -> Bucket:
    """Return the bucket at ``now``: it gains with the time passed, is full at most, and never loses."""
    return Bucket(level(bucket, rate, now), max(bucket.updated_at, now))


def reserve(bucket: Bucket, rate: Rate, amount: int, now: float) -> Bucket | None:
    """Return the bucket after taking ``amount``, or None when it holds less now."""
    current = refill(bucket, rate, now)
    if amount - current.level > rate.rounding:
        return None
    return Bucket(current.level - amount, current.updated_at)


def settle(bucket: Bucket, rate: Rate, *, reserved: int, used: int, now: float) -> Bucket:
    """Return the bucket after a reservation turned out to be ``used``: with a refund up to full, or a debt."""
    current = refill(bucket, rate, now)
    settled = current.level + reserved - used
    return Bucket(min(settled, max(current.level, float(rate.capacity))), current.updated_at)


def charge(bucket: Bucket, rate: Rate, amount: int, now: float) -> Bucket:
    """Return the bucket after ``amount`` was used that nobody had reserved. The debt is one minute's gain at most, so
    that a caller who sent several large requests at once by mistake is served again within a minute."""
    current = refill(bucket, rate, now)
    return Bucket(max(current.level - amount, min(current.level, -float(rate.per_minute))), current.updated_at)


def retry_after(bucket: Bucket, rate: Rate, amount: int, now: float, overdraft: int = 0) -> float | None:
    """Return the seconds until ``amount`` can be reserved if no other caller takes any; 0 for now, None for never.
    ``overdraft`` are the units that may be taken below zero; an amount beyond the burst is never available."""
    if amount > rate.capacity:
        return None
    missing = amount - level(bucket, rate, now) - overdraft
    return missing / rate.per_second if missing > rate.rounding else 0.0


def rescale(bucket: Bucket, old: Rate, new: Rate, now: float) -> Bucket:
    """Return the bucket under a new rate: filled to the same part, debt kept in units."""
    current = refill(bucket, old, now)
    if current.level <= 0:
        return current
    return Bucket(current.level * new.capacity / old.capacity, current.updated_at)
