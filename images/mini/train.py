"""Make athanor-mini: `python images/mini/train.py --out DIR [--steps N]`; judge one: `--evaluate [DIR]`; or `--corpus`.

On an accelerator it is made in minutes: `--prepare FILE` draws the questions, `card.py` trains on them where torch and
an accelerator are, and `--finish FILE WEIGHTS --out DIR` writes the model from what card.py left in WEIGHTS.

Trains the tokenizer and the network from the help desk's corpus beside this file (desk/ over desk/reference/ over
corpus/), writes a Hugging Face model directory with MODEL.json into DIR and prints what was measured. It takes about
three hours on one core; a second run on one machine gives the same weights. The network so far is written into
DIR/unfinished every 200 steps.

`--evaluate` trains nothing: it asks the model in DIR the hundred questions of questions.yaml and prints the judge's
table with every answer that is not right. `--corpus` does the same for a bag of words that chooses among the answers of
the corpus, trained in two minutes: what it cannot tell apart, a network hardly will.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import judge
import safetensors
import tokenizers
import torch
from recipe import bpe, corpus, drawing, drawn, embeddings, export, measure, training
from recipe.model import MiniLlama, ModelShape

HERE = Path(__file__).resolve().parent
_EVERY = 25  # of the texts trained on, one in so many is measured
_LATE_TOKENS = 3500  # how much conversation comes before a question asked late


def main() -> None:
    """Train, write, measure, record; or judge what is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="directory for the model")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--evaluate", type=Path, nargs="?", const=HERE / "athanor-mini", metavar="DIR", help="judge a model's answers"
    )
    action.add_argument("--corpus", action="store_true", help="judge what a bag of words makes of the corpus")
    action.add_argument("--prepare", type=Path, metavar="FILE", help="draw the questions for card.py")
    action.add_argument("--finish", type=Path, nargs=2, metavar=("FILE", "WEIGHTS"), help="write what card.py trained")
    parser.add_argument("--steps", type=int, default=training.Schedule().steps)
    parser.add_argument("--questions", type=int, default=drawing.Amount().questions, help="how many --prepare draws")
    arguments = parser.parse_args()
    asked = judge.load()
    if arguments.evaluate is not None:
        print(judge.table(asked, answers(arguments.evaluate, asked)))
        return
    topics = corpus.load_desk(HERE)
    if arguments.corpus:
        tokenizer = bpe.train_tokenizer(topics, training.SEED)
        told = _bag(topics, tokenizer).tell(tokenizer, [question.ask for question in asked])
        print(judge.table(asked, [topics[i].answer for i in told]))
    elif arguments.prepare is not None:
        _prepare(arguments.prepare, topics, arguments.questions)
    elif arguments.out is None:
        parser.error("--out is needed")
    else:
        made = _finish(*arguments.finish) if arguments.finish else _train(arguments.out, topics, arguments.steps)
        export.write_model(arguments.out, made.network, made.tokenizer)
        facts = made.facts | evaluate(arguments.out, topics)
        export.write_record(arguments.out, facts)
        print(json.dumps(facts, indent=2))


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A trained network with its tokenizer, and what MODEL.json says about the training."""

    network: MiniLlama
    tokenizer: tokenizers.Tokenizer
    facts: dict[str, Any]


def _train(out: Path, topics: tuple[corpus.Topic, ...], steps: int) -> Made:
    """Train on one core."""
    schedule = dataclasses.replace(training.Schedule(), steps=steps)
    tokenizer = bpe.train_tokenizer(topics, training.SEED)
    bag = _bag(topics, tokenizer)

    def keep(network: training.MiniLlama, _step: int) -> bool:
        export.write_model(out / "unfinished", network, tokenizer)
        return True

    outcome = training.train(topics, tokenizer, schedule, start=bag.start(), refused=refusal(), keep=keep)
    return Made(outcome.network, tokenizer, _facts(outcome, schedule))


def _bag(topics: tuple[corpus.Topic, ...], tokenizer: tokenizers.Tokenizer) -> embeddings.Bag:
    """The bag of words with which training on one core begins."""
    torch.set_num_threads(training.THREADS)
    width = training.ModelShape().hidden_size
    return embeddings.train_bag(topics, tokenizer, width, training.SEED, refused=refusal())


def _prepare(path: Path, topics: tuple[corpus.Topic, ...], questions: int) -> None:
    """Draw what card.py trains on."""
    tokenizer = bpe.train_tokenizer(topics, training.SEED)
    amount = dataclasses.replace(drawing.Amount(), questions=questions)
    found = drawing.draw(topics, tokenizer, seed=training.SEED, amount=amount, refused=refusal())
    drawn.save(found, path)
    print(f"{questions} questions, {len(found.texts.tokens)} tokens, {path.stat().st_size} bytes")


def _finish(rows: Path, weights: Path) -> Made:
    """The network that card.py left, with the tokenizer of its questions."""
    plan = json.loads((weights / "plan.json").read_text(encoding="utf-8"))
    network = MiniLlama(ModelShape(**plan["shape"]))
    network.load_state_dict(torch.load(weights / "weights.pt", weights_only=True))
    tokenizer = tokenizers.Tokenizer.from_str(drawn.load(rows).tokenizer)
    facts = {
        "parameters": sum(p.numel() for p in network.parameters()),
        "seed": plan["plan"]["seed"],
        "plan": plan["plan"],
        "made_with": {"torch": plan["torch"], "tokenizers": tokenizers.__version__, "device": plan["device"]},
    }
    return Made(network, tokenizer, facts)


def refusal() -> Callable[[str], bool]:
    """Tell whether a drawn question is, or shares eight words in a row with, one of the hundred: never trained on."""
    asked = [judge.words(question.ask) for question in judge.load()]
    whole, runs = frozenset(asked), {run for words in asked for run in judge.runs(words)}
    return lambda text: (words := judge.words(text)) in whole or not runs.isdisjoint(judge.runs(words))


def answers(folder: Path, asked: Sequence[judge.Question]) -> list[str]:
    """Greedy answers of the model in `folder`, each question opening a conversation of its own."""
    from expect import Reference  # transformers takes seconds to import, and training does without

    reference = Reference(folder)
    prompts = (reference.prompt([{"role": "user", "content": question.ask}]) for question in asked)
    return [reference.text(reference.answer(prompt)) for prompt in prompts]


def evaluate(folder: Path, topics: tuple[corpus.Topic, ...]) -> dict[str, Any]:
    """Measure the model in `folder` as it was written, in float32 from its bfloat16 weights."""
    network, tokenizer = export.read_model(folder)
    questions = measure.held_out(topics)
    first = measure.score(network, tokenizer, questions)
    late = measure.score_late(network, tokenizer, questions[::6], tokens=_LATE_TOKENS)
    known = measure.score(network, tokenizer, measure.trained_on(topics)[::_EVERY])
    asked = judge.load()
    return {
        "evaluation_loss": round(first.loss, 6),
        "held_out": {"exact": first.exact, "of": first.total, "wrong": first.wrong},
        "held_out_late": {"exact": late.exact, "of": late.total, "loss": round(late.loss, 6)},
        "trained_phrasings": {"exact": known.exact, "of": known.total},
        "questions": judge.counts(asked, answers(folder, asked)),
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
