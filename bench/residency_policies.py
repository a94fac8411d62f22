"""Which models stay awake where not all fit: hit rates of the appliance's rules by simulation, beside those of others.

A sequence of requests is drawn from a seed: times of a Poisson process, models by Zipf's law, whose ranks are dealt
anew every so many requests where popularity shifts. Each policy sees the sequence alone:

``lru``     the least recently used model goes
``fixed``   the best six of the whole sequence, kept for good; others need no place, so it may exceed Belady's
``belady``  the model that is needed last goes, which takes knowledge of what comes
``uses``    the least used one goes, by the appliance's counts (``appliance.common.model_uses``)
``served``  the appliance's own control, with time: wakes that take seconds and get longer where several run, requests
            that are answered meanwhile, the queue of wakes and their bounds (``bench/residency_host.py``); refusals
            count as misses

Run: ``python bench/residency_policies.py [--seeds 20] [--rate 2] [--minutes 10] [--wake 1.2]``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.common.model_uses import HALF_LIFE, ModelUses
from bench.residency_host import Host, Request, Speed

MODELS, PLACES = 20, 6
TENANTS = 20
EXPONENTS = (0.8, 1.0, 1.2)
SHIFTS = (0, 600, 300)
"""Requests after which popularity is dealt anew; 0: never."""


def draw(seed: int, exponent: float, *, count: int, rate: float, shift: int = 0, models: int = MODELS) -> list[Request]:
    """Draw a sequence of ``count`` requests, ``rate`` a second."""
    dice = random.Random(seed)
    names = [f"model-{number:02}" for number in range(models)]
    weights = [1 / rank**exponent for rank in range(1, models + 1)]
    dice.shuffle(names)
    now, found = 0.0, list[Request]()
    for number in range(count):
        if shift and number and number % shift == 0:
            dice.shuffle(names)
        now += dice.expovariate(rate)
        found.append((now, dice.choices(names, weights)[0], f"tenant-{dice.randrange(TENANTS):02}"))
    return found


def names_of(requests: Iterable[Request]) -> list[str]:
    """Models in the order in which they are asked for."""
    return [name for _, name, _ in requests]


def lru(sequence: Sequence[str], places: int = PLACES) -> float:
    """Hit rate of the least recently used."""
    kept: list[str] = []
    hits = 0
    for name in sequence:
        if name in kept:
            hits += 1
            kept.remove(name)
        elif len(kept) >= places:
            kept.pop(0)
        kept.append(name)
    return hits / len(sequence)


def belady(sequence: Sequence[str], places: int = PLACES) -> float:
    """Hit rate of who knows what comes: what is needed last goes. Every model that is asked for has to be there."""
    never, then, after = len(sequence), dict[str, int](), [0] * len(sequence)
    for at in range(len(sequence) - 1, -1, -1):
        after[at] = then.get(sequence[at], never)
        then[sequence[at]] = at
    kept: dict[str, int] = {}
    hits = 0
    for at, name in enumerate(sequence):
        if name in kept:
            hits += 1
        elif len(kept) >= places:
            del kept[max(sorted(kept), key=kept.__getitem__)]
        kept[name] = after[at]
    return hits / len(sequence)


def fixed(sequence: Sequence[str], places: int = PLACES) -> float:
    """Hit rate of the best models kept for good, as if the others needed no place: it may exceed Belady's. Their own
    first loads are misses."""
    best = Counter(sequence).most_common(places)
    return (sum(count for _, count in best) - len(best)) / len(sequence)


def least_used(requests: Sequence[Request], places: int = PLACES, half_life: float = HALF_LIFE) -> float:
    """Hit rate where the least used one goes, by the appliance's counts, and nothing takes time."""
    kept: dict[str, float] = {}
    uses, hits = ModelUses(half_life), 0
    for now, name, tenant in requests:
        uses.note(name, tenant, now)
        if name in kept:
            hits += 1
        elif len(kept) >= places:
            del kept[min(kept, key=lambda one: (uses.of(one), kept[one]))]
        kept[name] = now
    return hits / len(requests)


def compare(
    exponent: float, shift: int, seeds: Iterable[int], *, count: int, rate: float, speed: Speed
) -> dict[str, object]:
    """One line of the table: means over seeds in percent, and in how many of them the appliance misses its bars."""
    policies: dict[str, Callable[[list[Request]], float]] = {
        "lru": lambda one: lru(names_of(one)),
        "fixed": lambda one: fixed(names_of(one)),
        "belady": lambda one: belady(names_of(one)),
        "uses": least_used,
    }
    drawn = [draw(seed, exponent, count=count, rate=rate, shift=shift) for seed in seeds]
    rates = {name: [policy(one) for one in drawn] for name, policy in policies.items()}
    served = [Host(PLACES, speed).serve(one) for one in drawn]
    rates["served"] = [one.hit_rate for one in served]
    line: dict[str, object] = {"exponent": exponent, "shift": shift}
    line |= {name: round(100 * statistics.mean(found), 1) for name, found in rates.items()}
    line["refused"] = round(100 * statistics.mean(one.refused for one in served), 1)
    line["wakes_a_minute"] = round(statistics.mean(one.wakes_a_minute for one in served), 1)
    line["most_wakes"] = max(one.most_wakes for one in served)
    waits = sorted(wait for one in served for wait in one.waits_s)
    line["median_wait_s"] = round(statistics.median(waits), 1) if waits else 0.0
    line["longest_wait_s"] = round(max(one.longest_wait_s for one in served), 1)
    for name in ("uses", "served"):
        pairs = list(zip(rates[name], rates["fixed"], rates["lru"], strict=True))
        line[f"{name}_below_fixed"] = sum(mine < best - 0.03 for mine, best, _ in pairs)
        line[f"{name}_not_above_lru"] = sum(mine <= other for mine, _, other in pairs)
    return line


def main() -> int:
    """Print a line of JSON for each exponent and shift."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--wake", type=float, default=1.2, help="seconds of a wake on an idle machine")
    options = parser.parse_args()
    speed = Speed(options.wake, answer_s=options.wake / 6)
    count = round(options.rate * options.minutes * 60)
    for shift in SHIFTS:
        for exponent in EXPONENTS:
            line = compare(exponent, shift, range(options.seeds), count=count, rate=options.rate, speed=speed)
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
