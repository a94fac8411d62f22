"""Fuzzed schedules on every layout of ranks against one rank, and the deterministic class in many batches.

``python -m bench.rank_schedules --models DIR --out FILE [--layouts NAME ...] [--seeds FROM TO]`` plays the seeds in
each case of each family on each layout, in float32, and appends one JSON line for each layout, case and seed.
``--together N`` has each set of processes play so many seeds of all cases. ``--batches N`` plays batches of
deterministic requests in place of them: N of each seed in each case. What FILE has already is not played again, so a
run that was cut off goes on. ``--sum`` adds up what is in FILE. Ends with 1 where something differs that may not:
greedy tokens where the two best logits are 1e-4 apart or more, any bit of the deterministic class.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.engine.model.families.table import RANK_CASES
from tests.engine.ranks.comparison import LAYOUTS, alone, cases_of, differences, play_on, ranks_of, saved

TOGETHER = 2
"""Seeds of all cases that are played in one set of processes: each loads tensors first, and results come when all have
ended."""

SET_S = 3600
"""Seconds in which such a set has to end; beside other work it takes many times as long as alone."""

APART = 1000
"""Between the seeds of one case and those of the next, so that no two cases have the same schedules."""

Key = tuple[str, str, str, int, int]
"""Layout, family, case, seed, and batches; 0: a schedule against one rank."""

Missing = dict[tuple[str, str], list[int]]
"""Seeds to play, by family and case."""


def key_of(line: dict) -> Key:
    """What a line is about."""
    return line["layout"], line["family"], line["case"], line["seed"], line.get("batches", 0)


def read(path: Path) -> dict[Key, dict]:
    """Lines of a file, those of a broken-off write left out."""
    found = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found[key_of(line)] = line
    return found


def play(layout: str, jobs: dict[tuple[str, str], dict], missing: Missing, batches: int) -> Iterator[dict]:
    """Play some seeds of each case in one set of processes; gives a line for each."""
    asked = []
    for case, seeds in missing.items():
        # Blocks that were computed in one batch serve the next in every second case.
        cached = bool(seeds[0] % 2)
        more = {"batches": batches, "config": {"prefix_caching": cached}} if batches else {}
        asked.append({**jobs[case], "seeds": seeds, "layout": LAYOUTS[layout], **more})
    with tempfile.TemporaryDirectory() as folder:
        found = play_on(ranks_of(LAYOUTS[layout]), asked, Path.cwd(), Path(folder), timeout_s=SET_S)
    for (family, case), job, ranks in zip(missing, asked, found, strict=True):
        line = {"layout": layout, "family": family, "case": case}
        for place, seed in enumerate(job["seeds"]):
            if batches:
                own = {**ranks["played"][place], "promised": ranks["deterministic"], "batches": batches}
            else:
                tokens, ties, wrong = differences([alone(job)[place]], [ranks["played"][place]])
                own = {"tokens": tokens, "ties": ties, "wrong": wrong}
            yield {**line, "seed": seed, **own}


def add_up(lines: dict[Key, dict]) -> bool:
    """Print a line for each layout and kind; whether nothing differs that may not."""
    sums: dict[tuple[str, bool], Counter[str]] = {}
    for line in lines.values():
        batches = line.get("batches", 0)
        total = sums.setdefault((line["layout"], bool(batches)), Counter())
        if batches and not line["promised"]:
            total["cases without the class"] += 1
            continue
        wrong = line["wrong"] if isinstance(line["wrong"], int) else len(line["wrong"])
        total["batches" if batches else "schedules"] += batches or 1
        for name in ("tokens", "ties", "ordinary", "ordinary_other"):
            total[name] += line.get(name, 0)
        total["wrong"] += wrong
    for (layout, _), total in sorted(sums.items()):
        print(json.dumps({"layout": layout, **{name: count for name, count in total.items() if count}}))
    return not any(total["wrong"] for total in sums.values())


def main(arguments: list[str]) -> int:
    """Play what is missing; 0 when nothing differs that may not."""
    parser = argparse.ArgumentParser(prog="bench.rank_schedules")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True, help="kept for the next run")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 15), metavar=("FROM", "TO"))
    parser.add_argument("--together", type=int, default=TOGETHER, help="seeds of one set of processes")
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--sum", action="store_true")
    options = parser.parse_args(arguments)
    lines = read(options.out)
    if options.sum:
        return int(not add_up(lines))
    torch.set_num_threads(1)
    jobs = load_jobs(options.models)
    with options.out.open("a") as out:
        for start in range(options.seeds[0], options.seeds[1], options.together):
            stop = min(start + options.together, options.seeds[1])
            for layout in options.layouts:
                missing: Missing = {}
                for number, case in enumerate(jobs):
                    seeds = [number * APART + one for one in range(start, stop)]
                    left = [one for one in seeds if (layout, *case, one, options.batches) not in lines]
                    if left and case in cases_of(LAYOUTS[layout]):
                        missing[case] = left
                for line in play(layout, jobs, missing, options.batches) if missing else ():
                    lines[key_of(line)] = line
                    out.write(json.dumps(line) + "\n")
                out.flush()
                print(f"{layout} from seed {start}, load {os.getloadavg()[0]:.1f}", flush=True)
    return int(not add_up(lines))


def load_jobs(folder: Path) -> dict[tuple[str, str], dict]:
    """A job for each case of ``RANK_CASES``, with its model in the folder; made where it is not there yet."""
    listed = folder / "jobs.json"
    if not listed.exists():
        jobs = saved(folder, RANK_CASES, [[]] * len(RANK_CASES))
        listed.write_text(json.dumps(jobs))
    return dict(zip(RANK_CASES, json.loads(listed.read_text()), strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
