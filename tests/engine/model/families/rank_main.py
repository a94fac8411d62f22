"""One rank of two: runs each job's model with its part of the weights, steps as the leader broadcasts them.

``python rank_main.py RANK SIZE STORE JOBS OUT``: JOBS is a JSON list of model folders and OUT gets a file a job with
this rank's logits. Rank 0 plans; a plan travels as one flat tensor of ints.
"""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from engine.backends.common.host_runner import HostRunner
from engine.core.scheduler.plan import Admission, Chunk, StepPlan
from engine.model.layers.parallel import Parallel
from engine.model.layers.process_group import ProcessGroup
from isolation.ipc.sampling import Sampling
from tests.engine.model.families.harness import load_runner, random_tokens, run_mixed

PROMPTS = {0: 5, 1: 1, 2: 30}
OUTPUT = 16
VOCAB = 131
LENGTHS = {row: prompt + OUTPUT - 1 for row, prompt in PROMPTS.items()}


def flatten(plan: StepPlan) -> list[int]:
    """A plan as ints: each list behind its length."""
    flat = [len(plan.admissions)]
    for one in plan.admissions:
        flat += [one.row, one.num_prompt, len(one.token_ids), *one.token_ids, len(one.blocks), *one.blocks]
    flat += [len(plan.decode_rows), *plan.decode_rows, len(plan.prefills)]
    for chunk in plan.prefills:
        flat += [chunk.row, chunk.start, chunk.length, int(chunk.last)]
    return flat


def unflatten(flat: list[int]) -> StepPlan:
    """The plan again."""
    numbers = iter(flat)

    def take() -> list[int]:
        return [next(numbers) for _ in range(next(numbers))]

    plan = StepPlan()
    for _ in range(next(numbers)):
        row, num_prompt, token_ids = next(numbers), next(numbers), take()
        plan.admissions.append(Admission(row, array("I", token_ids), num_prompt, Sampling(), -1, tuple(take())))
    plan.decode_rows = take()
    for _ in range(next(numbers)):
        plan.prefills.append(Chunk(next(numbers), next(numbers), next(numbers), bool(next(numbers))))
    return plan


def lead(runner: HostRunner, plan: StepPlan) -> None:
    """Broadcast a step and run it."""
    flat = torch.tensor(flatten(plan))
    dist.broadcast(torch.tensor([len(flat)]), 0)
    dist.broadcast(flat, 0)
    runner.execute(plan)


def follow(runner: HostRunner) -> None:
    """Run what is broadcast, until a step of no ints."""
    length = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.broadcast(length, 0)
        if not length:
            return
        flat = torch.zeros(int(length), dtype=torch.int64)
        dist.broadcast(flat, 0)
        runner.execute(unflatten(flat.tolist()))


def main(rank: int, size: int, store: str, jobs: Path, out: Path) -> None:
    """Run all jobs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for number, folder in enumerate(json.loads(jobs.read_text())):
        parallel = Parallel(rank=rank, size=size, group=ProcessGroup())
        runner, recorder = load_runner(Path(folder), parallel=parallel)
        if rank == 0:
            tokens = random_tokens(PROMPTS, VOCAB)
            run_mixed(lambda plan, runner=runner: lead(runner, plan), tokens, PROMPTS, 7, LENGTHS)
            dist.broadcast(torch.tensor([0]), 0)
        else:
            follow(runner)
        logits = {f"{row}.{position}": value for (row, position), value in recorder.logits.items()}
        save_file(logits, out / f"{number}.{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
