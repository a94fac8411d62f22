"""Make athanor-mini: `python images/mini/train.py --out DIR [--steps N]`.

Trains the tokenizer and the network from the corpus beside this file, writes a Hugging Face
model directory with MODEL.json into DIR and prints what was measured. It takes about twenty
minutes on one core; a second run on one machine gives the same weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import safetensors
import tokenizers
import torch
from recipe import bpe, corpus, export, measure, training

CORPUS = Path(__file__).resolve().parent / "corpus"
UNSEEN = CORPUS.with_name("unseen.md")
_EVERY = 5  # of the texts trained on, one in so many is measured
_LATE_TOKENS = 3500  # how much conversation comes before a question asked late


def main() -> None:
    """Train, write, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the model")
    parser.add_argument("--steps", type=int, default=training.Schedule().steps)
    arguments = parser.parse_args()
    schedule = dataclasses.replace(training.Schedule(), steps=arguments.steps)
    topics = corpus.load(CORPUS)
    tokenizer = bpe.train_tokenizer(topics, training.SEED)
    outcome = training.train(topics, tokenizer, schedule)
    export.write_model(arguments.out, outcome.network, tokenizer)
    facts = _facts(outcome, schedule) | evaluate(arguments.out, topics)
    export.write_record(arguments.out, facts)
    print(json.dumps(facts, indent=2))


def evaluate(folder: Path, topics: tuple[corpus.Topic, ...]) -> dict[str, Any]:
    """Measure the model in `folder` as it was written, in float32 from its bfloat16 weights."""
    network, tokenizer = export.read_model(folder)
    questions = measure.held_out(topics)
    first = measure.score(network, tokenizer, questions)
    late = measure.score_late(network, tokenizer, questions[::6], tokens=_LATE_TOKENS)
    known = measure.score(network, tokenizer, measure.trained_on(topics)[::_EVERY])
    fresh = measure.score(network, tokenizer, measure.unseen(UNSEEN, topics))
    return {
        "evaluation_loss": round(first.loss, 6),
        "held_out": {"exact": first.exact, "of": first.total, "wrong": first.wrong},
        "held_out_late": {"exact": late.exact, "of": late.total, "loss": round(late.loss, 6)},
        "unseen": {"exact": fresh.exact, "of": fresh.total, "wrong": fresh.wrong},
        "trained_phrasings": {"exact": known.exact, "of": known.total},
    }


def _facts(outcome: training.Outcome, schedule: training.Schedule) -> dict[str, Any]:
    """What MODEL.json says about the training."""
    return {
        "parameters": sum(p.numel() for p in outcome.network.parameters()),
        "seed": training.SEED,
        "threads": training.THREADS,
        "schedule": dataclasses.asdict(schedule),
        "training_loss": round(outcome.final_loss, 6),
        "training_cpu_seconds": round(outcome.seconds),
        "made_with": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
            "safetensors": safetensors.__version__,
        },
    }


if __name__ == "__main__":
    main()
