"""One engine in one process, told what to run line by line:
``python bench/peer_worker.py ENGINE MODEL DTYPE THREADS [KERNELS]``.

Each line on standard input is a JSON object with ``prompts`` (lists of token ids) and ``output_tokens``; each answer
one with the seconds it took by the clock, the processor time of the whole process, and the first answer's ids. All
prompts are given at once, decoding is greedy, and no answer ends early. Loading and one small round are done before the
first line, so that only the work is timed. KERNELS is a directory of compiled kernels for this project's engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]
Extra = dict[str, Any]
"""More of ``EngineConfig``, for this project's engine alone."""

KV_BYTES = 512 << 20
"""KV memory of engines that ask for it beforehand."""

MAX_SEQUENCES = 64


def ours(model: Path, dtype: str, threads: int, extra: Extra) -> Generate:
    """This project's engine, in its own process and without a channel."""
    from array import array

    from engine.config import EngineConfig
    from engine.core.offline import generate
    from engine.startup.load import load_engine
    from isolation.ipc.engine import Submit
    from isolation.ipc.sampling import Sampling

    config = EngineConfig(
        model_dir=str(model),
        model_digest="00",
        dtype=dtype,
        threads=threads,
        kv_bytes=KV_BYTES,
        max_context=1_024,
        max_num_seqs=MAX_SEQUENCES,
        max_num_batched_tokens=512,
        prefix_caching=False,
        **extra,
    )
    engine = load_engine(config)
    last = 0

    def run(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        nonlocal last
        submits = [
            Submit(last + place, bytes(32), array("I", ids), output_tokens, Sampling(temperature=0.0), ignore_eos=True)
            for place, ids in enumerate(prompts, 1)
        ]
        last += len(prompts)
        answers = generate(engine, submits)
        return [answers[one.request].token_ids for one in submits]

    return run


def transformers_model(model: Path, dtype: str, threads: int) -> Any:
    """The model as transformers loads it."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval()


def transformers_generate(model: Path, dtype: str, threads: int, extra: Extra) -> Generate:
    """``generate`` on one padded batch; all prompts of a round have one length here."""
    import torch

    loaded = transformers_model(model, dtype, threads)
    loaded.generation_config.eos_token_id = None

    def run(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return [row[len(prompts[0]) :] for row in out.tolist()]

    return run


def transformers_continuous(model: Path, dtype: str, threads: int, extra: Extra) -> Generate:
    """The continuous-batching manager, kept between rounds as its server keeps it."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    loaded = transformers_model(model, dtype, threads)
    wanted = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1_024)
    manager = loaded.init_continuous_batching(
        wanted,
        ContinuousBatchingConfig(
            num_blocks=128,
            max_batch_tokens=512,
            max_requests_per_batch=MAX_SEQUENCES,
            allow_block_sharing=False,
            use_cuda_graph=False,
        ),
    )
    manager.start()

    def run(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        names = manager.add_requests(prompts, max_new_tokens=output_tokens)
        done: dict[str, list[int]] = {}
        while len(done) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
            elif not manager.is_running():
                raise RuntimeError("continuous batching ended by itself")
        return [done[name] for name in names]

    return run


def openvino(model: Path, dtype: str, threads: int, extra: Extra) -> Generate:
    """openvino-genai's continuous batching: weights as exported, KV and arithmetic in the dtype asked for."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    # Without bfloat16 products it has to be told to compute in float32: its KV cache refuses bfloat16 there.
    limited = os.environ.get("ONEDNN_MAX_CPU_ISA", "").startswith("AVX2")
    products = "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="ascii").split()
    precision = "bf16" if dtype == "bfloat16" and products and not limited else "f32"
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_seqs = MAX_SEQUENCES
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = False
    pipe = genai.ContinuousBatchingPipeline(
        model,
        scheduler,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": threads,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        },
    )

    def run(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens = wanted.min_new_tokens = output_tokens
        wanted.ignore_eos, wanted.do_sample = True, False
        tensors = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = pipe.generate(tensors, [wanted] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    return run


ENGINES: dict[str, Callable[[Path, str, int, Extra], Generate]] = {
    "ours": ours,
    "transformers generate": transformers_generate,
    "transformers continuous batching": transformers_continuous,
    "openvino-genai": openvino,
}


def main(arguments: list[str]) -> int:
    """Load, warm, then answer lines until standard input ends."""
    name, model, dtype, threads, *kernels = arguments
    # Libraries print what they like; answers go to the real standard output only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = ENGINES[name](Path(model), dtype, int(threads), {"kernels": kernels[0]} if kernels else {})
    run([[5, 6, 7, 8]] * 2, 4)
    answers.write(json.dumps({"ready": name}) + "\n")
    answers.flush()
    for line in sys.stdin:
        task = json.loads(line)
        cpu, wall = time.process_time(), time.perf_counter()
        result = run(task["prompts"], task["output_tokens"])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        answer = {"wall_s": wall, "cpu_s": cpu, "first": result[0], "tokens": sum(map(len, result))}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    # Threads of some libraries outlive their owner; nothing is left to save.
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(sys.argv[1:]))
