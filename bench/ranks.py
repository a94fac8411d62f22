"""One rank against two: tokens per second of a step at several numbers of rows, and collectives against raw gloo.

``python -m bench.ranks [ROUNDS]`` prints a JSON line for each number of rows: one rank with two threads and two ranks
with one thread each run the same decode steps in turn, in processes that live through the whole run. The collectives
are those of ``bench.rank_collectives``. On a processor a second rank is a proof and no speed-up (two cores are two
cores): what is shown is what it costs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from engine.sandbox.rank_link import RankLink, RankRoom

ROWS = (1, 16, 64)
ROUNDS = 5
STEPS = 16
"""Steps of a measured stretch."""
CONTEXT = 64
"""Tokens of each row before the steps."""

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 768, 2048, 4, 12, 4, 64, 4096
"""A model of some 30 million weights, in float32, drawn at random."""


def save(folder: Path) -> None:
    """The model on disk."""
    import torch
    from safetensors.torch import save_file

    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        begin = f"model.layers.{layer}."
        shapes |= {
            f"{begin}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{begin}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{begin}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{begin}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{begin}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{begin}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{begin}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{begin}input_layernorm.weight": (HIDDEN,),
            f"{begin}post_attention_layernorm.weight": (HIDDEN,),
        }
    save_file({name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}, folder / "model.safetensors")
    description = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(description))


def make_config(folder: Path, ranks: int, threads: int) -> object:
    """The engine's configuration."""
    from engine.config import EngineConfig

    return EngineConfig(
        model_dir=str(folder),
        model_digest="00",
        dtype="float32",
        threads=threads,
        kv_bytes=256 << 20,
        max_num_seqs=max(ROWS),
        max_num_batched_tokens=512,
        max_context=1024,
        tensor_parallel=ranks,
        backend="plain",
    )


class Measured:
    """An engine whose decode steps are timed."""

    def __init__(self, engine: object) -> None:
        self._engine = engine
        self._next = 1

    def stretch(self, rows: int) -> float:
        """Tokens per second of so many rows that only decode."""
        from array import array

        from isolation.ipc.engine import Submit
        from isolation.ipc.sampling import Sampling

        engine = self._engine
        mine = range(self._next, self._next + rows)
        self._next += rows
        for number in mine:
            prompt = array("I", [(number * 31 + place) % VOCAB for place in range(CONTEXT)])
            key = bytes([number % 251]) * 32
            greedy = Sampling(temperature=0.0)
            engine.add(Submit(number, key, prompt, STEPS * 4, greedy, ignore_eos=True, retain=False))
        while engine.scheduler.num_running < rows or engine.scheduler.num_waiting:
            engine.step()
        for _ in range(CONTEXT * rows // 512 + 3):
            engine.step()
        begun = time.perf_counter()
        tokens = 0
        for _ in range(STEPS):
            output = engine.step()
            tokens += 0 if output is None else len(output.token_ids)
        took = time.perf_counter() - begun
        for number in mine:
            engine.abort(number)
        while engine.has_work:
            engine.step()
        return tokens / took


def measure(link: RankLink, folder: Path, rounds: int) -> None:
    """Rank 0 measures both engines in turn and prints; the other follows."""
    import torch

    from engine.startup.load import load_engine
    from engine.startup.ranks import load_follower, parallel_of

    config = make_config(folder, 2, 1)
    if link.rank:
        load_follower(config, link).follow(link, lambda: os._exit(0))
    two = load_engine(config, parallel=parallel_of(link), link=link)
    one = load_engine(make_config(folder, 1, 2))
    measured = {"tp1": (Measured(one), 2), "tp2": (Measured(two), 1)}
    for rows in ROWS:
        rates: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, (engine, threads) in measured.items():
                torch.set_num_threads(threads)
                rates.setdefault(name, []).append(engine.stretch(rows))
        found = {name: round(median(values), 1) for name, values in rates.items()}
        ratio = median(two_ / one_ for one_, two_ in zip(rates["tp1"], rates["tp2"], strict=True))
        print(json.dumps({"rows": rows, **found, "tp2/tp1": round(ratio, 2)}), flush=True)
    two.runner.lock_down()


def main(arguments: list[str]) -> None:
    """Fork two ranks, of which the first prints; then the collectives."""
    rounds = int(arguments[0]) if arguments else ROUNDS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        maker = os.fork()
        if maker == 0:
            save(folder)
            os._exit(0)
        os.waitpid(maker, 0)
        room = RankRoom.create(2)
        children = []
        for rank in (0, 1):
            child = os.fork()
            if child == 0:
                link = room.link(rank)
                try:
                    measure(link, folder, rounds)
                finally:
                    os._exit(0 if sys.exc_info()[0] is None else 1)
            children.append(child)
        room.close()
        ended = {os.waitpid(child, 0)[0] for child in children}
        assert ended == set(children)
    from bench.rank_collectives import main as collectives

    collectives([str(rounds)])


if __name__ == "__main__":
    main(sys.argv[1:])
