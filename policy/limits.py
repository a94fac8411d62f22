"""Token buckets as pure arithmetic: the level is a value, the time an argument.

A bucket of capacity ``C`` gains ``C / 60`` units a second up to ``C``. Work is *reserved* before
it runs, at the most it may use, and *settled* when its true use is known: what was not used flows
back, what was used beyond the reservation makes a debt (a level below zero) that later time pays
off. Levels outlive a reload of the policy: they are rescaled to the new capacity and never
refilled, so that reloading is no way round a limit.

Times are seconds of one monotonic clock. A clock that steps back adds nothing and takes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_PER_MINUTE = 60.0

ROUNDING_S = 1e-6
"""Seconds of a bucket's gain that count as nothing: float arithmetic is off by less after years of
uptime at the highest rate, so that who waited as told gets through."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Units a minute, which are also the burst: a full bucket holds them all."""

    per_minute: int
    """At least 1."""

    @property
    def per_second(self) -> float:
        """Units gained a second."""
        return self.per_minute / SECONDS_PER_MINUTE

    @property
    def rounding(self) -> float:
        """Units too few to matter."""
        return self.per_second * ROUNDING_S


@dataclass(frozen=True, slots=True)
class Bucket:
    """A level at a moment."""

    level: float
    """Units that may be taken; below zero is debt."""
    updated_at: float
    """Seconds of the caller's monotonic clock."""


def full(rate: Rate, now: float) -> Bucket:
    """The bucket of a tenant seen for the first time."""
    return Bucket(float(rate.per_minute), now)


def refill(bucket: Bucket, rate: Rate, now: float) -> Bucket:
    """The bucket at ``now``: more by the time passed, at most full, never less."""
    elapsed = max(0.0, now - bucket.updated_at)
    grown = min(float(rate.per_minute), bucket.level + elapsed * rate.per_second)
    return Bucket(max(bucket.level, grown), max(bucket.updated_at, now))


def reserve(bucket: Bucket, rate: Rate, amount: int, now: float) -> Bucket | None:
    """The bucket after taking ``amount``, or None when it does not hold that much now."""
    current = refill(bucket, rate, now)
    if amount - current.level > rate.rounding:
        return None
    return Bucket(current.level - amount, current.updated_at)


def settle(bucket: Bucket, rate: Rate, *, reserved: int, used: int, now: float) -> Bucket:
    """The bucket after a reservation turned out to be ``used``: a refund up to full, or a debt."""
    current = refill(bucket, rate, now)
    level = current.level + reserved - used
    return Bucket(min(level, max(current.level, float(rate.per_minute))), current.updated_at)


def retry_after(bucket: Bucket, rate: Rate, amount: int, now: float) -> float | None:
    """Seconds until ``amount`` can be reserved if nobody else takes any; 0 when it can now, None
    when it never can."""
    if amount > rate.per_minute:
        return None
    missing = amount - refill(bucket, rate, now).level
    return missing / rate.per_second if missing > rate.rounding else 0.0


def rescale(bucket: Bucket, old: Rate, new: Rate, now: float) -> Bucket:
    """The bucket under a new rate: filled to the same part, debt kept in units."""
    current = refill(bucket, old, now)
    if current.level <= 0:
        return current
    return Bucket(current.level * new.per_minute / old.per_minute, current.updated_at)
