"""An engine whose kernels were compiled ahead: ``python -m tests.engine.backends.cuda.kernels.ahead_probe ROOT MODEL
ROWS``.

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

from engine.backends.common.loading import layout_for, limits_for
from engine.backends.cuda.kernels import operations, steps
from engine.backends.cuda.kernels.cache import open_cache
from engine.backends.cuda.load import make_device_runner, without_spares
from engine.backends.cuda.runtime import simulated_steps
from engine.backends.cuda.runtime.launch_digest import launch_configuration
from engine.backends.cuda.runtime.loop_state import LoopState, StepRows
from engine.backends.cuda.runtime.operations import Sampled
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.offline import Answer, collect
from engine.core.scheduler.plan import RowMask
from engine.core.scheduler.scheduler import Scheduler
from engine.errors import ConfigurationError
from engine.model.checkpoint.registry import build_model, load_model_config
from engine.startup.warmup import warm_up
from isolation.ipc.sampling import Sampling
from tests.engine.support import submit

ARCHITECTURE = "sm_90"
FORMS = (
    {},
    {"sampling": Sampling(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4)},
    {"logprobs": 3},
    {"structured": True},
    {"prompt_logprobs": 2, "logprobs": 0},
    {"sampling": Sampling(top_k=3, top_p=0.9, min_p=0.1, frequency_penalty=0.4), "structured": True, "logprobs": 20},
    {"sampling": Sampling(seed=1), "choices": 2},
)
"""What requests ask for: everything by itself, and together."""


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


def advance_rows() -> None:
    """Launch the kernels around a step, and do beside them what they would: without it no row would ever advance."""
    launched = steps.begin_step, steps.end_step
    begun: list[StepRows] = []

    def begin_step(state: LoopState, bucket: int) -> StepRows:
        begun.append(launched[0](state, bucket))

        def none(tables: torch.Tensor, *_: object) -> torch.Tensor:
            return torch.zeros(len(tables), dtype=torch.int32)

        return simulated_steps.begin_step(none, state, bucket)

    def end_step(state: LoopState, rows: StepRows, sampled: Sampled) -> None:
        launched[1](state, begun.pop(), sampled)
        simulated_steps.end_step(state, rows, sampled)

    steps.begin_step, steps.end_step = begin_step, end_step


def main(root: Path, model_dir: str, rows: int) -> None:
    """Open the kernels as an engine does, and serve."""
    subprocess.Popen.__init__ = no_program
    start_with_zeros()
    advance_rows()
    config = EngineConfig(
        model_dir=model_dir,
        model_digest="00",
        dtype="bfloat16",
        block_size=4,
        kv_bytes=1 << 20,
        max_num_seqs=rows,
        max_num_batched_tokens=24,
        backend="device",
        max_context=100,
    )
    description = load_model_config(model_dir).within(config.max_context)
    layout = without_spares(layout_for(config, description, "bfloat16"), rows)
    limits = limits_for(config, description, layout)
    open_cache(root, ARCHITECTURE, launch_configuration(description, torch.bfloat16, layout.block_size, rows))
    triton.runtime.driver.set_active(PretendedGpu())
    model, _ = build_model(description, torch.bfloat16, torch.device("cpu"))
    # As on a card: matrices stay as they are published.
    model.packed = True
    heads = description.num_heads, description.num_kv_heads
    found = operations.kernel_operations(
        heads, description.head_dim, description.vocab_size, torch.device("cpu"), ARCHITECTURE
    )
    runner = make_device_runner(config, model, layout, limits, found, eager=True)
    pool = BlockPool(layout.num_blocks)
    cache = PrefixCache(pool, root=bytes(16), block_size=layout.block_size, caching=True)
    engine = Engine(Scheduler(limits, pool, cache, Fairness(limits, pool)), runner)
    warm_up(engine)
    answers = serve(engine, description.vocab_size)
    assert not any(one.failure for one in answers.values()), "a request has failed"
    tokens = sum(len(one.token_ids) for one in answers.values())
    reports = sum(len(one.logprobs) + sum(len(part.logprobs) for part in one.prompts) for one in answers.values())
    sys.stderr.write(f"{tokens} {reports}\n")


def serve(engine: Engine, vocab_size: int) -> dict[int, Answer]:
    """Requests of every form, all at once, short prompts and some of several chunks; whoever waits for a mask gets one
    that allows everything."""
    draw = random.Random(1)
    answers: dict[int, Answer] = {}
    structured = []
    for place, form in enumerate(FORMS * 2):
        number = 1 + 2 * place
        prompt = [draw.randrange(vocab_size) for _ in range(draw.choice((1, 3, 40)))]
        engine.add(submit(number, prompt, draw.randint(4, 9), **form))
        if "structured" in form:
            structured.append(number)
    every = RowMask(b"\xff" * (vocab_size // 8 + 1), accepting=True)
    while engine.has_work:
        for number in structured:
            engine.scheduler.set_mask(number, len(answers[number].token_ids) if number in answers else 0, every)
        collect(engine, answers)
    return answers


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    except ConfigurationError as error:
        sys.exit(f"cannot start: {error}")
