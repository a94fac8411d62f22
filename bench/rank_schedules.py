"""Fuzzed schedules on every layout of ranks against one rank, and the deterministic class in many batches.

``python -m bench.rank_schedules --out FILE [--layouts NAME ...] [--seeds FROM TO]`` plays each seed in each case of each
family on each layout, in float32, and appends one JSON line for each layout, case and seed. ``--batches N`` plays
batches of deterministic requests in place of them: N of each seed in each case. What FILE has already is not played
again, so a run that was cut off goes on. ``--sum`` adds up what is in FILE. Ends with 1 where something differs that
may not: greedy tokens where the two best logits are 1e-4 apart or more, any bit of the deterministic class.
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

from tests.engine.ranks.comparison import LAYOUTS, alone, cases_of, differences, play_on, ranks_of, saved

CASES = 12
"""Cases that are played in one set of processes: each loads tensors first, and results come when all have ended."""

Key = tuple[str, str, str, int, int]
"""Layout, family, case, seed, and batches; 0: a schedule against one rank."""


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


def play(
    layout: str, chunk: list[tuple[str, str]], jobs: dict[tuple[str, str], dict], seed: int, batches: int, folder: Path
) -> Iterator[dict]:
    """Play one seed in some cases; gives a line for each."""
    more = {"batches": batches, "config": {"prefix_caching": bool(seed % 2)}} if batches else {}
    asked = [{**jobs[case], "seeds": [seed], "layout": LAYOUTS[layout], **more} for case in chunk]
    found = play_on(ranks_of(LAYOUTS[layout]), asked, Path.cwd(), folder)
    for (family, case), job, one in zip(chunk, asked, found, strict=True):
        line = {"layout": layout, "family": family, "case": case, "seed": seed}
        if batches:
            yield {**line, "promised": one["deterministic"], **one["played"][0], "batches": batches}
        else:
            tokens, ties, wrong = differences(alone(job), one["played"])
            yield {**line, "tokens": tokens, "ties": ties, "wrong": wrong}


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
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 15), metavar=("FROM", "TO"))
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--sum", action="store_true")
    options = parser.parse_args(arguments)
    lines = read(options.out)
    if options.sum:
        return int(not add_up(lines))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as where, options.out.open("a") as out:
        folder = Path(where)
        cases = list(dict.fromkeys(case for layout in options.layouts for case in cases_of(LAYOUTS[layout])))
        made = saved(folder / "models", cases, [[0]] * len(cases))
        jobs = dict(zip(cases, made, strict=True))
        for seed in range(*options.seeds):
            for layout in options.layouts:
                names = cases_of(LAYOUTS[layout])
                left = [case for case in names if (layout, *case, seed, options.batches) not in lines]
                for start in range(0, len(left), CASES):
                    chunk = left[start : start + CASES]
                    for line in play(layout, chunk, jobs, seed, options.batches, folder):
                        lines[key_of(line)] = line
                        out.write(json.dumps(line) + "\n")
                out.flush()
            print(f"seed {seed} at load {os.getloadavg()[0]:.1f}", flush=True)
    return int(not add_up(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
