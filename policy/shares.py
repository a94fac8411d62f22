"""Shares of the KV pool in policy files: their values, and whether they can be. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from policy.errors import Problem
from policy.model import WHOLE_POOL, KvShare
from policy.positions import Path
from policy.schema import KvSchema
from policy.written import WrittenFile

SHOWN_SUM = 200
"""Characters repeated in a message from the end of a sum that is too large."""


def share_of(content: KvSchema) -> KvShare:
    """Return the share that is written."""
    reservation = _parts(content.reservation)
    whole = WHOLE_POOL if content.borrow else reservation
    cap = whole if content.cap is None else _parts(content.cap)
    return KvShare(reservation=reservation, cap=cap, borrow=content.borrow)


@lru_cache(maxsize=1_024)
def _parts(percent: str) -> int:
    """Convert a percentage with at most two decimals to parts of ``WHOLE_POOL``."""
    return round(float(percent.removesuffix("%")) * WHOLE_POOL / 100)


def check_share(file: WrittenFile, path: Path, content: KvSchema, problems: list[Problem]) -> None:
    """Check the share of a tenant or a sharing group at ``path``."""
    share = share_of(content)
    if share.reservation > WHOLE_POOL or share.cap > WHOLE_POOL:
        key = "reservation" if share.reservation > WHOLE_POOL else "cap"
        problems.append(file.problem((*path, "kv", key), "there is no more than 100% of the pool"))
    elif not share.borrow and not share.reservation:
        problems.append(file.problem((*path, "kv", "borrow"), "without borrowing a reservation is needed"))
    elif not share.borrow and share.cap != share.reservation:
        message = "without borrowing the cap is the reservation; leave cap out"
        problems.append(file.problem((*path, "kv", "cap"), message))
    elif share.cap < max(share.reservation, 1):
        message = f"the cap, {content.cap}, is below the reservation, {content.reservation}, or nothing"
        problems.append(file.problem((*path, "kv", "cap"), message))


def check_partition(file: WrittenFile, path: Path, content: KvSchema, problems: list[Problem]) -> None:
    """Check what the isolation class requires of the share, and what every share must satisfy."""
    if not _parts(content.reservation):
        message = "class strict needs a part of the KV pool for itself: write kv: {reservation: 20%} or the like"
        problems.append(file.problem((*path, "class"), message))
    elif content.borrow and "borrow" in content.model_fields_set:
        problems.append(file.problem((*path, "kv", "borrow"), "class strict neither lends nor borrows; leave it out"))
    else:
        check_share(file, path, content.model_copy(update={"borrow": False}), problems)


def check_reservations(files: Sequence[WrittenFile], problems: list[Problem]) -> None:
    """Check that all reservations fit the pool; report the first that does not, with the sum."""
    total, told = 0, ""
    for file in files:
        shares: list[tuple[Path, KvSchema]] = [
            (("tenants", name), tenant.kv) for name, tenant in file.content.tenants.items()
        ]
        shares += [(("sharing_groups", name), group.kv) for name, group in file.content.sharing_groups.items()]
        for path, content in shares:
            parts = _parts(content.reservation)
            if not parts:
                continue
            total += parts
            told += f" + {path[1]} {content.reservation}" if told else f"{path[1]} {content.reservation}"
            if total > WHOLE_POOL:
                message = f"more is reserved than there is: {told[-SHOWN_SUM:]} = {total * 100 / WHOLE_POOL:g}%"
                problems.append(file.problem((*path, "kv", "reservation"), message))
                return
