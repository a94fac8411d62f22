"""One process of ``transformers`` with ``tp_plan="auto"``, which decodes as many rows as ``bench.rank_peer`` asks for.

Started by torchrun: ``python -m torch.distributed.run --standalone --nproc-per-node 2 -m bench.rank_peer_child FOLDER
DTYPE ASKED ANSWERS``. The first process reads numbers of rows from the pipe ASKED and tells the others; it writes
tokens per second to the pipe ANSWERS, after a first line that says how it computes.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from bench.ranks import CONTEXT, STEPS

WARM = 4
"""Steps before those that are timed, as of ``bench.ranks``."""


def stretch(model: LlamaForCausalLM, rows: int) -> float:
    """Tokens per second of so many rows that only decode, greedily, with the cache that the library has by itself."""
    ids = torch.tensor(
        [[(row * 31 + place) % model.config.vocab_size for place in range(CONTEXT)] for row in range(rows)]
    )
    cache, begun = None, 0.0
    with torch.inference_mode():
        for step in range(1 + WARM + STEPS):
            if step == 1 + WARM:
                begun = time.perf_counter()
            # The head computes what is sampled from alone, as in the engine.
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
    return rows * STEPS / (time.perf_counter() - begun)


def main(folder: str, dtype: str, asked: str, answers: str) -> None:
    """Answer until the pipe ends."""
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=getattr(torch, dtype)).eval()
    first = dist.get_rank() == 0
    part = model.model.layers[0].self_attn.q_proj.weight
    assert part.to_local().shape[0] * dist.get_world_size() == part.shape[0], "the model is not divided"
    with ExitStack() as files:
        lines = files.enter_context(open(asked)) if first else None
        out = files.enter_context(open(answers, "w")) if first else None
        if out is not None:
            print(f"{dist.get_world_size()} processes over {dist.get_backend()}", file=out, flush=True)
        while True:
            rows = torch.tensor([int((lines.readline() if lines is not None else "") or 0)])
            dist.broadcast(rows, 0)
            if not rows.item():
                break
            rate = stretch(model, int(rows.item()))
            if out is not None:
                print(rate, file=out, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
