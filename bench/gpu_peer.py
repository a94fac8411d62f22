"""The engine on the device backend beside ``transformers``' continuous batching, on the same memory of weights."""

from __future__ import annotations

import random
import statistics
import time

import torch

from bench.gpu_engines import published
from bench.gpu_report import Meter, synchronise
from bench.gpu_serving import Driver, World


def beside_transformers(world: World) -> None:
    """The same requests on the same weights: ours, theirs, theirs, ours."""
    report, streams = world.report, max(world.streams)
    theirs = _Theirs(world)
    engine, meter = world.engine(), Meter()
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    try:
        for name in ("ours", "theirs", "theirs", "ours"):
            report.check()
            synchronise(report.device)
            began = time.perf_counter()
            if name == "ours":
                driver = Driver(world, engine, meter)
                for _ in range(streams):
                    driver.add(world.prompt, world.output)
                while driver.live:
                    report.check()
                    driver.step()
                made = streams * world.output
            else:
                made = theirs.run(streams)
            rates[name].append(made / (time.perf_counter() - began))
            report.put("beside transformers", who=name, streams=streams, tokens_per_s=rates[name][-1])
    finally:
        theirs.stop()
    ours, other = (statistics.fmean(values) for values in rates.values())
    report.figure("over_transformers_256", ours / other)


class _Theirs:
    """``transformers``' continuous batching around the same memory of weights."""

    def __init__(self, world: World) -> None:
        import transformers
        from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

        transformers.utils.logging.set_verbosity_error()
        self._world = world
        settings = {key: value for key, value in published(world.sizes).items() if key != "rope_theta"}
        config = LlamaConfig(**settings, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.load_state_dict(world.tensors, assign=True)
        # What is computed from the description is not in a checkpoint, and was made without memory.
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(world.report.device)
        model = model.eval()
        gpu = world.report.device.type == "cuda"
        blocks = 4 * (world.prompt + world.output) // 32 + max(world.streams) * (world.prompt + world.output) // 32
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=world.output),
            ContinuousBatchingConfig(
                num_blocks=None if gpu else max(64, blocks),
                max_batch_tokens=4_096 if gpu else 64,
                max_memory_percent=0.8 if gpu else None,
                max_requests_per_batch=max(world.streams),
                allow_block_sharing=False,
                use_cuda_graph=gpu,
            ),
        )
        self._manager.start()
        self.run(1)

    def run(self, streams: int) -> int:
        """Answer so many requests; gives the tokens made."""
        world = self._world
        draw = random.Random(0)
        prompts = [[draw.randrange(world.sizes["vocab_size"]) for _ in range(world.prompt)] for _ in range(streams)]
        left = len(self._manager.add_requests(prompts, max_new_tokens=world.output))
        made = 0
        while left:
            world.report.check()
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                left -= 1
                made += len(result.generated_tokens)
            elif result is None and not self._manager.is_running():
                raise RuntimeError("continuous batching ended by itself")
        return made

    def stop(self) -> None:
        """End its thread."""
        self._manager.stop(block=True)
