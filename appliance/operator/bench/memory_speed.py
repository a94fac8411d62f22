"""Measures how fast this machine reads memory: the bound of a decode step, which reads every weight once.

A program of its own, since nothing else of a measurement may load tensors: ``python -m
appliance.operator.bench.memory_speed`` prints one JSON object with bytes a second of one core and of all that it may
use, and the version of torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

PROBE_BYTES = 1 << 30
"""Memory that is read to find its speed: many times the largest cache."""

PROBE_ROUNDS = 5


def read_rates(*numbers_of_cores: int) -> list[float]:
    """Measure the best rate, in bytes a second, at which so many cores together read memory: each sums a part of its
    own. One rate for each number of cores; all read the same memory."""
    torch.set_num_threads(1)
    memory = torch.ones(PROBE_BYTES // 8, dtype=torch.int64)
    rates = []
    for cores in numbers_of_cores:
        parts, best = memory.chunk(cores), 0.0
        with ThreadPoolExecutor(cores) as pool:
            for _ in range(PROBE_ROUNDS):
                began = time.perf_counter()
                list(pool.map(torch.sum, parts))
                best = max(best, PROBE_BYTES / (time.perf_counter() - began))
        rates.append(best)
    return rates


def main() -> int:
    """Measure and print."""
    one, together = read_rates(1, len(os.sched_getaffinity(0)))
    found = {"one_core": one, "all_cores": together, "torch": str(torch.__version__)}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
