"""The engine on the device backend beside ``transformers``: its continuous batching, and one stream with its static
cache; on the same weights, with as much memory for keys and values, in turns.

``python bench/gpu_peer.py [--toy] [--streams 64]`` alone, or as a section of ``bench/gpu.py``. All of it is measured in
a process of its own, part after part, each with its limit: a part that stands still ends that process, and what was
measured before is told. What is slow without a package for attention is theirs as it is installed; nothing is fetched.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.gpu_child import PartError, begin, told
from bench.gpu_engines import make_engine, published
from bench.gpu_report import Meter, Report, synchronise
from bench.gpu_serving import Driver, World, make_world
from engine.core.engine import Engine

PAGE = 256
"""Tokens of a page of theirs, which is what they have by default."""

FIRST_S = 40.0
"""Seconds until a process has imported everything."""

WHOLE_S = 92.0
"""Seconds of all parts on a card."""

LIMITS = {"weights": 20.0, "our engine": 40.0, "their engine": 40.0, "ours": 15.0, "theirs": 25.0, "one stream": 20.0}
"""Seconds of each part on a card."""

PATIENCE = 8.0
"""So many times longer on a processor, which others may use too."""

WATCH_S = 0.5
"""Seconds between two rows of what a job has made."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""A missing kernel is not looked for in a network, which on a machine without one takes minutes."""


def beside_transformers(report: Report, streams: int = 64) -> None:
    """Run it in a process of its own, and take down what it tells."""
    arguments = [str(Path(__file__).resolve()), "--measure", "--streams", str(streams)]
    patience = PATIENCE if report.toy else 1.0
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    asked: tuple[str, float] | None = None
    lines = told(
        arguments + (["--toy"] if report.toy else []),
        first_s=FIRST_S * patience,
        whole_s=min(WHOLE_S * patience, report.left()),
        environment=OFFLINE,
    )
    try:
        for line in lines:
            report.put(line.pop("section"), **{key: value for key, value in line.items() if key != "at_s"})
            if "turn_of" in line:
                asked = line["turn_of"], line["tokens"] / line["limit_s"]
            if "tokens_per_s" in line:
                asked = None
                rates[line["who"]].append(line["tokens_per_s"])
                _compare(report, rates)
    except PartError as error:
        report.failures["peer"] = str(error)
        if asked is not None and asked[0] == "theirs" and rates["ours"] and not rates["theirs"]:
            # They had not ended: their rate is below that of the limit.
            report.put("beside transformers", who="theirs", streams=streams, below_tokens_per_s=asked[1])
            report.figure("over_transformers", rates["ours"][0] / asked[1])


def _compare(report: Report, rates: dict[str, list[float]]) -> None:
    if rates["ours"] and rates["theirs"]:
        ours, other = (statistics.fmean(values) for values in rates.values())
        report.figure("over_transformers", ours / other)


def measure(report: Report, streams: int) -> None:
    """All parts, in this process."""
    toy = report.toy
    _begin(toy, "weights")
    import transformers  # Not at the top: it is measured what there is without it as well.

    transformers.utils.logging.set_verbosity_error()
    world = make_world(report, {})
    world = replace(world, prompt=20, output=8, streams=(4,)) if toy else replace(world, prompt=500, output=128)
    streams = 4 if toy else streams
    pages = streams * -(-(world.prompt + world.output) // PAGE) + 2
    _begin(toy, "our engine")
    engine = our_engine(world, streams, pages)
    _begin(toy, "their engine")
    theirs = Theirs(world, streams, pages)
    meter = Meter()
    runs: dict[str, Callable[[], int]] = {
        "ours": lambda: _ours(world, engine, meter, streams),
        "theirs": lambda: theirs.run(streams, world.output),
    }
    try:
        for name in ("ours", "theirs", "theirs", "ours"):
            limit = _begin(toy, name)
            report.put("beside transformers", turn_of=name, tokens=streams * world.output, limit_s=limit)
            synchronise(report.device)
            began = time.perf_counter()
            made = runs[name]()
            rate = made / (time.perf_counter() - began)
            report.put("beside transformers", who=name, streams=streams, attention=theirs.attention, tokens_per_s=rate)
    finally:
        theirs.stop()
    _begin(toy, "one stream")
    one_stream(world, engine, meter)


def _begin(toy: bool, part: str) -> float:
    limit = LIMITS[part] * (PATIENCE if toy else 1.0)
    begin(part, limit)
    return limit


def our_engine(world: World, streams: int, pages: int) -> Engine:
    """A warm engine with as much room for keys and values as theirs."""
    sizes = world.sizes
    token_bytes = 2 * sizes["num_layers"] * sizes["num_kv_heads"] * sizes["head_dim"] * world.model.dtype.itemsize
    context, budget = 2 * (world.prompt + world.output), 64 if world.report.toy else 4_096
    kv_bytes = max(pages * PAGE * token_bytes, 1 << 22)
    engine = make_engine(world.model, kv_bytes=kv_bytes, rows=streams, budget=budget, context=context)
    engine.runner.prove()
    world.report.put("our engine", kv_bytes=kv_bytes)
    return engine


def _ours(world: World, engine: Engine, meter: Meter, streams: int) -> int:
    driver = Driver(world, engine, meter)
    for _ in range(streams):
        driver.add(world.prompt, world.output)
    while driver.live:
        driver.step()
    return streams * world.output


def their_model(world: World, attention: str) -> Any:
    """``transformers``' model around the same memory of weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {key: value for key, value in published(world.sizes).items() if key != "rope_theta"}
    config = LlamaConfig(**settings, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    config._attn_implementation = attention
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(world.tensors, assign=True)
    # What is computed from the description is not in a checkpoint, and was made without memory.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(world.report.device)
    return model.eval()


class Theirs:
    """``transformers``' continuous batching, with what it has by default for the attention that is installed."""

    def __init__(self, world: World, streams: int, pages: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._world = world
        flash = world.report.device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
        # Named with its prefix, so that no other is looked for.
        self.attention = "paged|flash_attention_2" if flash else "paged|sdpa"
        self._manager = their_model(world, self.attention).init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=world.output),
            ContinuousBatchingConfig(
                num_blocks=pages,
                max_batch_tokens=64 if world.report.toy else 4_096,
                max_requests_per_batch=streams,
                allow_block_sharing=False,
            ),
        )
        self._manager.start()
        # The first requests also make what they keep, and find kernels.
        self.run(min(2, streams), 4)

    def run(self, streams: int, output: int) -> int:
        """Answer so many requests; gives the tokens made."""
        left = len(self._manager.add_requests(self._prompts(streams), max_new_tokens=output))
        made = 0
        while left:
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(f"continuous batching failed: {result.error}")
                left -= 1
                made += len(result.generated_tokens)
            elif result is None and not self._manager.is_running():
                raise RuntimeError("continuous batching ended by itself")
        return made

    def watch(self, streams: int, output: int, limit_s: float) -> list[tuple[float, int]]:
        """Answer so many requests for so long; gives seconds since the begin and tokens made until then."""
        prompts = self._prompts(streams)
        began, made, total = time.perf_counter(), {}, 0
        rows = [(0.0, 0)]
        for name, prompt in enumerate(prompts):
            made[str(name)] = 0
            self._manager.add_request(prompt, request_id=str(name), max_new_tokens=output, streaming=True)
        while total < streams * output and (now := time.perf_counter() - began) < limit_s:
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("continuous batching ended by itself")
                continue
            if result.error:
                raise RuntimeError(f"continuous batching failed: {result.error}")
            total += len(result.generated_tokens) - made[result.request_id]
            made[result.request_id] = len(result.generated_tokens)
            if now - rows[-1][0] >= WATCH_S:
                rows.append((now, total))
        return [*rows, (time.perf_counter() - began, total)]

    def _prompts(self, streams: int) -> list[list[int]]:
        draw = random.Random(0)
        vocabulary = self._world.sizes["vocab_size"]
        return [[draw.randrange(vocabulary) for _ in range(self._world.prompt)] for _ in range(streams)]

    def stop(self) -> None:
        """End its thread."""
        self._manager.stop(block=True, timeout=5.0)


@torch.no_grad()
def one_stream(world: World, engine: Engine, meter: Meter) -> None:
    """Tokens a second of one stream: ours, their ``generate`` with a static cache, and their step as a graph."""
    report, count = world.report, 4 if world.report.toy else 64
    driver = Driver(world, engine, meter)
    driver.add(world.prompt, count + 2)
    while driver._asked:
        driver.step()
    began = time.perf_counter()
    while driver.live:
        driver.step()
    report.put("one stream", who="ours", step_s=(time.perf_counter() - began) / (count + 1))
    model = their_model(world, "sdpa")
    prompt = torch.arange(world.prompt, device=report.device)[None] % world.sizes["vocab_size"]
    for name, run in (("generate, static cache", _generated), ("static cache, graph", _captured)):
        try:
            report.put("one stream", who=name, step_s=run(model, prompt, count))
        except (RuntimeError, TypeError, AttributeError, ValueError) as error:
            report.put("one stream", who=name, failed=f"{type(error).__name__}: {str(error)[:300]}")


def _generated(model: Any, prompt: torch.Tensor, count: int) -> float:
    """Seconds of a step of ``generate``, without its compilation, which takes longer than this whole section."""

    def run(tokens: int) -> float:
        began = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
            pad_token_id=0,
        )
        synchronise(prompt.device)
        return time.perf_counter() - began

    run(2)
    return (run(count + 1) - run(1)) / count


def _captured(model: Any, prompt: torch.Tensor, count: int) -> float:
    """Seconds of a greedy step that is replayed as one graph, as an engine would do it; on a processor, called."""
    step = StaticStep.after(model, prompt, length=prompt.shape[1] + count + 8)
    step.run()
    synchronise(prompt.device)
    began = time.perf_counter()
    for _ in range(count):
        step.run()
    synchronise(prompt.device)
    return (time.perf_counter() - began) / count


class StaticStep:
    """A greedy step of their model with a static cache, captured as one graph on a card."""

    def __init__(self, world: World, rows: int, *, at: int, length: int) -> None:
        """Rows of equal length ``at``, in a cache of ``length`` that nothing was written to."""
        from transformers import StaticCache

        model = their_model(world, "sdpa")
        device = world.report.device
        token = torch.ones((rows, 1), dtype=torch.int64, device=device)
        self._build(model, StaticCache(config=model.config, max_cache_len=length), token, at, length)

    @classmethod
    def after(cls, model: Any, prompt: torch.Tensor, *, length: int) -> StaticStep:
        """The step that follows a prompt, shape [rows, tokens]."""
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=length)
        token = model(input_ids=prompt, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        step = cls.__new__(cls)
        step._build(model, cache, token, prompt.shape[1], length)
        return step

    def _build(self, model: Any, cache: Any, token: torch.Tensor, at: int, length: int) -> None:
        device = token.device
        place = torch.full((1, 1), at, device=device)
        places = torch.arange(length, device=device)

        def step() -> None:
            mask = (places <= place)[None, None].expand(len(token), 1, 1, length)
            given = {"input_ids": token, "position_ids": place.expand(len(token), 1), "attention_mask": mask}
            logits = model(**given, past_key_values=cache, use_cache=True).logits
            token.copy_(logits[:, -1:].argmax(-1))
            place.add_(1)

        self.run: Callable[[], object] = step
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            self.run = graph.replay


def main() -> int:
    """Measure, in this process or in one of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("gpu-peer.jsonl"))
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cpu" if options.toy else "cuda")
    if options.measure:
        report = Report(Path(os.devnull), options.toy, device)
        report.deadline = report.began + WHOLE_S * PATIENCE
        measure(report, options.streams)
        sys.stdout.flush()
        # Their thread may stand still; everything is told.
        os._exit(0)
    if not options.toy and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; --toy runs everything at toy size on the CPU")
    options.out.unlink(missing_ok=True)
    report = Report(options.out, options.toy, device)
    report.deadline = report.began + (WHOLE_S + 5.0) * (PATIENCE if options.toy else 1.0)
    beside_transformers(report, options.streams)
    for reason in report.failures.values():
        print(f"failed: {reason}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
