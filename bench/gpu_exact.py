"""Deterministic rows on a card: the same bits alone and in any batch, however prompts are cut; and what they cost.

    python bench/gpu_exact.py [--layers 8] [--batches 100]

Random weights of Llama 8B's widths. Some requests are answered alone by one engine; then, batch after batch, beside
drawn others of both classes, by engines with other budgets of a step. Tokens and log-probabilities of the deterministic
ones have to be equal bit by bit. Control: ordinary ones among them differ now and then.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from array import array
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.gpu_engines import EIGHT_B, build_model, make_engine
from engine.core.engine import Engine
from engine.core.offline import Answer, generate
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

VOCAB = EIGHT_B["vocab_size"]
BUDGETS = (256, 300, 1_024, 4_096)
"""Tokens of a step, by engine: prompts are cut in other places."""
ROWS = 256


def drawn(draw: random.Random, number: int, *, exact: bool) -> Submit:
    """One request; every third is greedy."""
    return Submit(
        number,
        bytes(32),
        array("I", [draw.randrange(VOCAB) for _ in range(draw.choice((1, 5, 100, 127, 128, 129, 700)))]),
        draw.randint(1, 24),
        Sampling(temperature=draw.choice((0.0, 0.8, 1.0)), top_p=draw.choice((1.0, 0.9)), seed=number),
        ignore_eos=True,
        logprobs=2,
        deterministic=exact,
        retain=False,
    )


def bits(answer: Answer) -> tuple[object, ...]:
    """All that an answer says, floats as they are."""
    logprobs = tuple((one.logprob, one.top_ids, one.top_logprobs) for one in answer.logprobs)
    return tuple(answer.token_ids), logprobs, answer.failure


def engines(layers: int) -> list[Engine]:
    """Engines around the same weights, with other budgets."""
    model = build_model(EIGHT_B | {"num_layers": layers}, torch.device("cuda"), torch.bfloat16)
    made = []
    for budget in BUDGETS:
        engine = make_engine(model, kv_bytes=6 << 30, rows=min(ROWS, budget), budget=budget, context=1_024)
        engine.runner.prove()
        engine.runner.touch()
        made.append(engine)
    return made


def main() -> None:
    """Compare, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU")
    began = time.monotonic()
    made = engines(options.layers)
    promised = [engine.runner.capabilities.deterministic for engine in made]
    draw = random.Random(1)
    watched = [drawn(draw, number, exact=True) for number in range(1, 9)]
    ordinary = [replace(one, request=one.request + 100, deterministic=False) for one in watched]
    alone = {one.request: bits(generate(made[-1], [one])[one.request]) for one in watched + ordinary}
    counts = {"compared": 0, "differ": 0, "ordinary_compared": 0, "ordinary_differ": 0, "batches": 0, "largest": 0}
    while counts["batches"] < options.batches and time.monotonic() - began < options.seconds:
        others = [
            drawn(draw, 1_000 + number, exact=draw.random() < 0.3) for number in range(draw.choice((0, 3, 20, 90, 240)))
        ]
        asked = [*watched, *ordinary, *others]
        draw.shuffle(asked)
        answers = generate(made[counts["batches"] % len(made)], asked)
        for kind, requests in (("", watched), ("ordinary_", ordinary)):
            for one in requests:
                counts[f"{kind}compared"] += 1
                counts[f"{kind}differ"] += bits(answers[one.request]) != alone[one.request]
        counts["batches"] += 1
        counts["largest"] = max(counts["largest"], len(asked))
    steps = {}
    for exact in (False, True):
        one = replace(watched[0], max_tokens=60, request=9_000 + exact, deterministic=exact)
        generate(made[-1], [one])
        start = time.perf_counter()
        generate(made[-1], [replace(one, request=9_100 + exact)])
        steps["exact_s" if exact else "ordinary_s"] = (time.perf_counter() - start) / 60
    print(json.dumps({"section": "exact rows", "promised": promised, **counts, **steps, "layers": options.layers}))


if __name__ == "__main__":
    main()
