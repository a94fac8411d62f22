"""Collectives between two ranks: shared memory against raw gloo, in turn, in the same processes.

``python -m bench.rank_collectives [ROUNDS]`` prints one JSON line a size, with the time of ours as a part of gloo's.
One thread a rank; gloo by way of loopback. Inside a sandbox without a network, as root: ``.venv/bin/runsc
--ignore-cgroups --network=none do --cwd=$PWD -- /usr/bin/env PYTHONPATH=$PWD $PWD/.venv/bin/python -m
bench.rank_collectives``.

``experts_reduce`` and ``experts_exchange`` are two ways to bring the results of dealt experts together, of which the
engine takes the first. Reduce: every rank has every row, computes its own experts' share of each, and all sum up.
Exchange (all-to-all): each rank routes half of the rows and sends each to the ranks of its experts, gets the results
back, and all gather their halves, for attention needs every row on every rank. Times are of moving the numbers alone.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from statistics import median

from engine.sandbox.rank_link import RankLink, RankRoom

SIZES = ((1, 4096), (64, 4096))
"""Rows and columns of float32: a decode step of one request, and of many."""

EXPERT_SIZES = ((1, 2048), (16, 2048), (64, 2048), (512, 2048))
"""Rows and columns of float32 that go through a layer of experts: decode steps, and a chunk of a prompt."""

TOP = 4
"""Experts of a token."""

KINDS = "all_reduce", "all_gather"
ROUNDS = 5
CALLS = 100
"""Calls of one kind in a round."""


def measure(link: RankLink, store: str, rounds: int) -> list[dict[str, float]]:
    """Median microseconds of an all-reduce and of an all-gather, by kind and size."""
    import torch
    import torch.distributed as dist

    from engine.model.layers.process_group import ProcessGroup
    from engine.model.layers.shared_group import SharedGroup

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=link.rank, world_size=link.size)
    groups = {"shared": SharedGroup(link.everyone), "gloo": ProcessGroup()}
    found = []
    for rows, columns in SIZES:
        x = torch.full((rows, columns), float(link.rank + 1))
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, group in groups.items():
                for kind in KINDS:
                    call = getattr(group, kind)
                    for _ in range(CALLS):
                        x.fill_(link.rank + 1)
                        dist_wait(link)
                        begun = time.perf_counter()
                        call(x)
                        times.setdefault(f"{name}_{kind}", []).append(time.perf_counter() - begun)
                        assert kind == "all_gather" or x[0, 0] == 3
        micros = {name: round(median(values) * 1e6, 1) for name, values in times.items()}
        ratios = {f"{kind}_of_gloo": round(micros[f"shared_{kind}"] / micros[f"gloo_{kind}"], 2) for kind in KINDS}
        found.append({"rows": rows, "columns": columns, **micros, **ratios})
    dist.destroy_process_group()
    return found


def measure_experts(link: RankLink, rounds: int) -> list[dict[str, float]]:
    """Median microseconds of both ways, by rows, for a model of ``TOP`` experts a token."""
    import torch

    from engine.model.layers.shared_group import SharedGroup

    group = SharedGroup(link.everyone)
    found = []
    for rows, columns in EXPERT_SIZES:
        x = torch.ones(rows, columns)
        own = torch.ones(-(-rows // 2), columns)
        # Of the rows that a rank routes, half of the choices fall on experts of the other.
        sent = torch.ones(-(-len(own) * TOP // 2), columns)

        def reduce(x: torch.Tensor = x) -> None:
            group.all_reduce(x)

        def exchange(sent: torch.Tensor = sent, own: torch.Tensor = own) -> None:
            group.all_gather(sent)
            group.all_gather(sent)
            torch.cat(group.all_gather(own))

        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            for way in (reduce, exchange):
                for _ in range(CALLS):
                    x.fill_(1.0)
                    dist_wait(link)
                    begun = time.perf_counter()
                    way()
                    times.setdefault(f"experts_{way.__name__}", []).append(time.perf_counter() - begun)
        micros = {name: round(median(values) * 1e6, 1) for name, values in times.items()}
        found.append({"rows": rows, "columns": columns, **micros})
    return found


def dist_wait(link: RankLink) -> None:
    """Begin together."""
    link.everyone.meet(0)


def main(arguments: list[str]) -> None:
    """Fork two ranks, of which the first prints."""
    rounds = int(arguments[0]) if arguments else ROUNDS
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    room = RankRoom.create(2)
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in (0, 1):
            child = os.fork()
            if child == 0:
                link = room.link(rank)
                found = measure(link, f"{folder}/store", rounds) + measure_experts(link, rounds)
                for line in found if rank == 0 else ():
                    print(json.dumps(line), flush=True)
                os._exit(0)
            children.append(child)
        room.close()
        for child in children:
            assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main(sys.argv[1:])
