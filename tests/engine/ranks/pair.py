"""Ranks outside of a sandbox: ``python -m tests.engine.ranks.pair RANKS JOBS OUT`` plays each job's schedules on all.

JOBS is a JSON list of jobs (folder, seeds, vocab, layout of ranks, fields of the configuration and of the requests,
``batches``: of deterministic requests, compared with each alone, and ``fault``: a row is given another's block); OUT
gets a JSON list with the answers of each schedule. Unlike ``engine.ranks``, tensors are imported before the fork, once
for all ranks: on one thread nothing is lost by it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from engine.sandbox.rank_link import RankLink, RankRoom


class Over(Exception):
    """Rank 0 has played all schedules of a job."""


def over() -> None:
    """Ends following where the program would lock down."""
    raise Over


def configured(job: dict, size: int) -> object:
    """The configuration of a job's engine."""
    from engine.config import EngineConfig
    from tests.engine.ranks.schedules import LIMITS

    layout = {} if size == 1 else job.get("layout", {"tensor_parallel": size})
    values = {"dtype": "float32", **LIMITS, **layout, **job.get("config", {})}
    return EngineConfig(model_dir=job["folder"], model_digest="00", **values)


def play_job(engine: object, job: dict) -> list[dict]:
    """Answers of each of a job's schedules, one after the other in one engine."""
    from tests.engine.ranks.batches import play_batches
    from tests.engine.ranks.schedules import draw, play, play_fault, told

    if job.get("batches"):
        return [asdict(play_batches(engine, seed, job["vocab"], job["batches"])) for seed in job["seeds"]]
    found = []
    if job.get("fault"):
        answers = play_fault(engine, job["vocab"])
        found.append({**told(answers), "failures": [answer.failure for answer in answers.values()]})
    for seed in job["seeds"]:
        submits = draw(seed, job["vocab"], **job.get("fields", {}))
        if job.get("alone"):
            found.append(told({k: v for one in submits for k, v in play(engine, seed, [one]).items()}))
        else:
            found.append(told(play(engine, seed, submits)))
    return found


def run(link: RankLink, jobs: list[dict], out: Path) -> None:
    """Play as one rank."""
    import torch

    from engine.sandbox.rank_place import RankPlace
    from engine.startup.load import load_engine
    from engine.startup.ranks import check_ranks, lead_parallel, load_follower

    torch.set_num_threads(1)
    results, places = [], {}
    for job in jobs:
        config = configured(job, link.size)
        stages = config.pipeline_parallel
        place = places[stages] = places.get(stages) or RankPlace.of(link, stages)
        if link.rank:
            runner = load_follower(config, place)
            try:
                runner.follow(over)
            except Over:
                place.hear()
                place.meet()
            continue
        check_ranks(config, link.size)
        engine = load_engine(config, warm=False, parallel=lead_parallel(place, config), place=place)
        engine.runner.prove()
        engine.runner.touch()
        deterministic = engine.ready().deterministic
        results.append({"deterministic": deterministic, "played": play_job(engine, job)})
        engine.runner.lock_down()
    if link.rank == 0:
        out.write_text(json.dumps(results))


def main(size: int, jobs: Path, out: Path) -> int:
    """Fork the ranks; gives 0 when all ended well."""
    import engine.startup.load  # noqa: F401 - seconds of processor, which each rank would spend again

    room = RankRoom.create(size)
    children = set()
    for rank in range(size):
        child = os.fork()
        if child == 0:
            run(room.link(rank), json.loads(jobs.read_text()), out)
            os._exit(0)
        children.add(child)
    room.close()
    while children:
        ended, status = os.waitpid(-1, 0)
        children.discard(ended)
        if status:
            for child in children:
                os.kill(child, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
