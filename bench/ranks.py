"""One rank against two: tokens per second of a step at several numbers of rows, and collectives against raw gloo.

``python -m bench.ranks [ROUNDS [SHAPE [ROWS...]]]`` prints a JSON line for each number of rows: one rank with two
threads, and two ranks with one thread each that share every layer (tp2), have some of the layers each (pp2) or deal
experts (ep2, for a mixture), run the same decode steps in turn, in processes that live through the run. ``native`` is
one rank with two threads of compiled kernels, where ATHANOR_KERNELS names their folder: what an engine of one rank
takes by itself. SHAPE is ``dense``, ``mixture``, ``mini`` (that of athanor-mini) or ``half``
(that of a 0.5B model). The collectives, for ``dense``, are those of ``bench.rank_collectives``. On a processor a second
rank is a proof and no speed-up (two cores are two cores): what is shown is what it costs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from engine.sandbox.rank_link import RankLink, RankRoom
from engine.sandbox.rank_place import RankPlace

ROWS = (1, 16, 64)
ROUNDS = 5
STEPS = 32
"""Tokens of each row in a measured stretch."""
CONTEXT = 64
"""Tokens of each row before the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model whose weights are drawn at random, in float32."""

    hidden: int = 768
    inner: int = 2048
    """Of an MLP, or of one expert."""
    layers: int = 8
    heads: int = 12
    kv_heads: int = 4
    head_dim: int = 64
    vocab: int = 4096
    experts: int = 0
    top: int = 2
    """Experts of a token."""


SHAPES = {
    "dense": Shape(),
    "mixture": Shape(inner=1024, experts=8),
    "mini": Shape(hidden=384, inner=768, layers=5, heads=12, kv_heads=2, head_dim=32),
    "half": Shape(hidden=896, inner=4864, layers=24, heads=14, kv_heads=2, vocab=151_936),
}
"""The first has some 55 million weights, the last some 500 million."""

LAYOUTS = {
    "tp1": ({}, 2),
    "tp2": ({"tensor_parallel": 2}, 1),
    "pp2": ({"pipeline_parallel": 2}, 1),
    "ep2": ({"expert_parallel": 2}, 1),
    "bfloat16 tp2": ({"tensor_parallel": 2, "dtype": "bfloat16"}, 1),
    "native": ({"kernels": os.environ.get("ATHANOR_KERNELS", ""), "backend": "auto"}, 2),
}
"""By name: the configuration beside the common part, and threads of each rank."""

OWN = ("tp1", "tp2", "pp2", "ep2", "native")
"""Those that ``main`` compares; ``bench.rank_peer`` has the other."""


def _mlp(begin: str, shape: Shape) -> dict[str, tuple[int, int]]:
    wide, narrow = (shape.inner, shape.hidden), (shape.hidden, shape.inner)
    if not shape.experts:
        sizes = {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
        return {f"{begin}mlp.{name}.weight": size for name, size in sizes.items()}
    below = f"{begin}block_sparse_moe"
    maps = {"w1": wide, "w3": wide, "w2": narrow}
    experts = {f"{below}.experts.{n}.{name}.weight": size for n in range(shape.experts) for name, size in maps.items()}
    return {f"{below}.gate.weight": (shape.experts, shape.hidden), **experts}


def save(folder: Path, shape: Shape) -> None:
    """The model on disk."""
    import torch
    from safetensors.torch import save_file

    hidden, heads, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(shape.layers):
        begin = f"model.layers.{layer}."
        sizes |= {
            f"{begin}self_attn.q_proj.weight": (heads, hidden),
            f"{begin}self_attn.k_proj.weight": (kv, hidden),
            f"{begin}self_attn.v_proj.weight": (kv, hidden),
            f"{begin}self_attn.o_proj.weight": (hidden, heads),
            **_mlp(begin, shape),
            f"{begin}input_layernorm.weight": (hidden,),
            f"{begin}post_attention_layernorm.weight": (hidden,),
        }
    save_file({name: torch.randn(size) * 0.02 for name, size in sizes.items()}, folder / "model.safetensors")
    description = {
        "architectures": ["MixtralForCausalLM" if shape.experts else "LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    if shape.experts:
        description |= {"num_local_experts": shape.experts, "num_experts_per_tok": shape.top, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(description))


def make_config(folder: Path, layout: dict[str, object], threads: int) -> object:
    """The engine's configuration."""
    from engine.config import EngineConfig

    values = {"backend": "plain", "dtype": "float32", **layout}
    return EngineConfig(
        model_dir=str(folder),
        model_digest="00",
        threads=threads,
        kv_bytes=256 << 20,
        max_num_seqs=max(ROWS),
        max_num_batched_tokens=512,
        max_context=1024,
        **values,
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
            prompt = array(
                "I", [(number * 31 + place) % min(shape.vocab for shape in SHAPES.values()) for place in range(CONTEXT)]
            )
            key = bytes([number % 251]) * 32
            greedy = Sampling(temperature=0.0)
            engine.add(Submit(number, key, prompt, STEPS * 4, greedy, ignore_eos=True, retain=False))
        while engine.scheduler.num_running < rows or engine.scheduler.num_waiting:
            engine.step()
        self._tokens(rows * 4)
        begun = time.perf_counter()
        tokens = self._tokens(rows * STEPS)
        took = time.perf_counter() - begun
        for number in mine:
            engine.abort(number)
        while engine.has_work:
            engine.step()
        return tokens / took

    def _tokens(self, count: int) -> int:
        """Step until there are so many tokens."""
        tokens = 0
        while tokens < count:
            output = self._engine.step()
            tokens += 0 if output is None else len(output.token_ids)
        return tokens


def serve(link: RankLink | None, folder: Path, name: str, asked: int, answer: int) -> None:
    """One rank of a layout: rank 0 measures each number of rows that it is asked for, the others follow."""
    import torch

    from engine.startup.load import load_engine
    from engine.startup.ranks import lead_parallel, load_follower

    layout, threads = LAYOUTS[name]
    config = make_config(folder, layout, threads)
    torch.set_num_threads(threads)
    if link is None:
        engine = load_engine(config)
    else:
        place = RankPlace.of(link, config.pipeline_parallel)
        if link.rank:
            load_follower(config, place).follow(lambda: os._exit(0))
        engine = load_engine(config, parallel=lead_parallel(place, config), place=place)
    measured = Measured(engine)
    os.write(answer, f"{engine.runner.description}\n".encode())
    with os.fdopen(asked) as rows:
        for line in rows:
            os.write(answer, f"{measured.stretch(int(line))}\n".encode())


@dataclass(frozen=True, slots=True)
class Arm:
    """A layout in processes of its own."""

    children: tuple[int, ...]
    ask: int
    answers: Callable[[], str]

    @classmethod
    def start(cls, folder: Path, name: str) -> Arm:
        """Fork its ranks."""
        ranks = 2 if name.endswith("2") else 1
        asked, ask = os.pipe()
        answer, told = os.pipe()[::-1]
        room = RankRoom.create(ranks) if ranks > 1 else None
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os.close(ask)
                try:
                    serve(None if room is None else room.link(rank), folder, name, asked, answer)
                finally:
                    os._exit(0 if sys.exc_info()[0] is None else 1)
            children.append(child)
        if room is not None:
            room.close()
        os.close(asked)
        os.close(answer)
        return cls(tuple(children), ask, os.fdopen(told).readline)

    def rate(self, rows: int) -> float:
        """Tokens per second of so many rows."""
        os.write(self.ask, f"{rows}\n".encode())
        return float(self.answers())

    def end(self) -> None:
        """End its processes."""
        for child in self.children:
            os.kill(child, 9)
            os.waitpid(child, 0)


def main(arguments: list[str]) -> None:
    """Measure the layouts in turn; then the collectives."""
    rounds = int(arguments[0]) if arguments else ROUNDS
    shape = arguments[1] if len(arguments) > 1 else "dense"
    deals = SHAPES[shape].experts > 0
    names = [name for name in OWN if (deals or name != "ep2") and (name != "native" or LAYOUTS[name][0]["kernels"])]
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        maker = os.fork()
        if maker == 0:
            save(folder, SHAPES[shape])
            os._exit(0)
        assert os.waitpid(maker, 0)[1] == 0
        arms: dict[str, Arm] = {}
        try:
            for name in names:  # one after the other: a pipeline times its layers at the start
                arms[name] = Arm.start(folder, name)
                print(json.dumps({name: arms[name].answers().strip()}), flush=True)
            for rows in tuple(map(int, arguments[2:])) or ROWS:
                rates: dict[str, list[float]] = {}
                for _ in range(rounds):
                    for name, arm in arms.items():
                        rates.setdefault(name, []).append(arm.rate(rows))
                found = {name: round(median(values), 1) for name, values in rates.items()}
                ratios = {
                    f"{name}/tp1": round(median(b / a for a, b in zip(rates["tp1"], values, strict=True)), 2)
                    for name, values in rates.items()
                    if name != "tp1"
                }
                print(json.dumps({"rows": rows, **found, **ratios}), flush=True)
        finally:
            for arm in arms.values():
                arm.end()
    from bench.rank_collectives import main as collectives

    if shape == "dense":
        collectives([str(rounds)])


if __name__ == "__main__":
    main(sys.argv[1:])
