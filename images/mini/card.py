"""Train athanor-mini on an accelerator: `python images/mini/card.py --rows FILE --out DIR [--device cuda]`.

Reads questions drawn in advance (`train.py --prepare FILE`) and needs numpy and torch, nothing else. Writes
DIR/weights.pt, bfloat16, every minute and at the end, which `train.py --finish DIR` makes a model of. The last lines
say how many questions that were never trained on are answered word for word.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from recipe import accelerated, drawn
from recipe.model import ModelShape

_PLAN = accelerated.Plan()


def main() -> None:
    """Train and say how good it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="file that train.py --prepare wrote")
    parser.add_argument("--out", type=Path, required=True, help="directory for the weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=ModelShape().hidden_size)
    parser.add_argument("--inner", type=int, default=ModelShape().intermediate_size, help="width inside the MLP")
    for name in ("steps", "seconds", "tokens", "dropout", "left_out", "topic_weight", "muon_rate", "seed"):
        value = getattr(_PLAN, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = parser.parse_args()
    known = {field.name for field in dataclasses.fields(_PLAN)}
    plan = dataclasses.replace(_PLAN, **{name: value for name, value in vars(arguments).items() if name in known})
    rows = drawn.load(arguments.rows)
    shape = ModelShape(
        vocab_size=rows.vocabulary,
        hidden_size=arguments.width,
        intermediate_size=arguments.inner,
        num_attention_heads=arguments.width // ModelShape().head_dim,
    )
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # more of them wait for each other where a machine is busy
    arguments.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "shape": dataclasses.asdict(shape),
        "plan": dataclasses.asdict(plan),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    (arguments.out / "plan.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def save(weights: dict[str, torch.Tensor]) -> None:
        """Whole or not at all: written beside, then renamed."""
        part = arguments.out / "weights.part"
        torch.save({name: weight.to(torch.bfloat16).cpu() for name, weight in weights.items()}, part)
        part.rename(arguments.out / "weights.pt")

    def say(line: str) -> None:
        print(f"{arguments.out.name}: {line}", flush=True)

    network = accelerated.train(rows, shape, plan, device, save, say)
    exact, total = accelerated.score(network, rows, device)
    count = sum(parameter.numel() for parameter in network.parameters())
    say(f"done: {count} parameters, held out {exact} of {total} exact")


if __name__ == "__main__":
    main()
