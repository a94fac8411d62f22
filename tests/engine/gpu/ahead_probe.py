"""An engine whose kernels were compiled ahead: ``python -m tests.engine.gpu.ahead_probe ROOT MODEL ROWS``.

The device backend runs whole requests on the processor, and its kernels are launched by Triton as on a GPU: found among
the compiled ones, given to the driver, started. The driver is one that starts nothing (``pretended_driver.c``), so the
answers mean nothing. No program can be started, as in a sandbox. Tells on standard output what reached the driver.
"""

import random
import subprocess
import sys
from pathlib import Path

import torch
import triton
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

from engine.config import EngineConfig
from engine.device.build import make_device_runner, without_spares
from engine.device.configuration import launch_configuration
from engine.errors import ConfigurationError
from engine.kernels.gpu import operations
from engine.kernels.gpu.cache import open_cache
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.load import layout_for, limits_for
from engine.loop import Engine
from engine.model.registry import build_model, load_model_config
from engine.offline import generate
from engine.scheduler.scheduler import Scheduler
from isolation.ipc.messages import Sampling
from tests.engine.support import submit

ARCHITECTURE = "sm_90"
REQUESTS = 6


class PretendedGpu(CudaDriver):
    """Triton's own driver, but for what it would ask torch about a GPU."""

    def __init__(self) -> None:
        self.utils = CudaUtils()
        self.launcher_cls = CudaLauncher
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda _device: 0
        self.get_device_capability = lambda _device: (9, 0)


def no_program(*_: object, **__: object) -> None:
    """Stands for a sandbox without any."""
    raise PermissionError("a program was to be started")


def start_with_zeros() -> None:
    """What no kernel writes is zero: logits without a peak, blocks without a fault, and ids that there are."""
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros


def main(root: Path, model_dir: str, rows: int) -> None:
    """Open the kernels as an engine does, and serve."""
    subprocess.Popen.__init__ = no_program
    start_with_zeros()
    config = EngineConfig(
        model_dir=model_dir, model_digest="00", dtype="bfloat16", block_size=4, kv_bytes=1 << 20, max_num_seqs=rows,
        max_num_batched_tokens=24, backend="device", max_context=100,
    )  # fmt: skip
    description = load_model_config(model_dir).within(config.max_context)
    layout = without_spares(layout_for(config, description, "bfloat16"), rows)
    limits = limits_for(config, description, layout)
    open_cache(root, ARCHITECTURE, launch_configuration(description, torch.bfloat16, layout.block_size, rows))
    triton.runtime.driver.set_active(PretendedGpu())
    model, _ = build_model(description, torch.bfloat16, torch.device("cpu"))
    heads = description.num_heads, description.num_kv_heads
    found = operations.kernel_operations(
        heads, description.head_dim, description.vocab_size, torch.device("cpu"), ARCHITECTURE
    )
    runner = make_device_runner(config, model, layout, limits, found, eager=True)
    pool = BlockPool(layout.num_blocks)
    cache = PrefixCache(pool, root=bytes(16), block_size=layout.block_size, caching=True)
    engine = Engine(Scheduler(limits, pool, cache), runner)
    engine.warm_up()
    draw = random.Random(1)
    submitted = []
    for number in range(1, REQUESTS + 1):
        prompt = [draw.randrange(description.vocab_size) for _ in range(draw.randint(1, 40))]
        sampling = Sampling(temperature=draw.choice((0.0, 1.0)), top_k=draw.choice((0, 3)), seed=number)
        submitted.append(submit(number, prompt, draw.randint(1, 9), sampling=sampling))
    answers = generate(engine, submitted)
    sys.stderr.write(f"{sum(len(one.token_ids) for one in answers.values())} tokens\n")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    except ConfigurationError as error:
        sys.exit(f"cannot start: {error}")
