"""Spreads the large counts of a release over the machine's cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

LEAST = 50_000
"""Count from which processes of their own are worth their start."""

_T = TypeVar("_T")


def spread(work: Callable[[int, int], _T], count: int, seed: int) -> list[_T]:
    """Do ``work(count, seed)`` in parts, a process and a seed for each core; a small count at once and here.

    ``work`` is a function of a module. The parts' counts sum to at least ``count``.
    """
    cores = len(os.sched_getaffinity(0)) if count >= LEAST else 1
    if cores == 1:
        return [work(count, seed)]
    parts = [-(-count // cores)] * cores
    seeds = [seed + number * 1_000 for number in range(cores)]
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(work, parts, seeds))
