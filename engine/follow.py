"""The program of every rank of an engine but the first: load a part of the model, do what rank 0 tells, for good.

It has no socket and no ring: what it knows it has from rank 0, over the memory that they share (``engine.ranks``). Exit
statuses are those of ``engine.__main__``.
"""

from __future__ import annotations

import gc
import sys
from functools import partial

import numpy.random  # noqa: F401 - as in the first rank
import torch

from engine.backends.common.ranked import FollowingRunner
from engine.config import EngineConfig
from engine.errors import ConfigurationError, EngineError, LockdownError, ModelLoadError, RankGoneError
from engine.sandbox.allowed_calls import RankBells, rank_calls
from engine.sandbox.lockdown import generates_code, lock_down, read_maps
from engine.sandbox.rank_link import EXIT_RANK_GONE, RankLink
from engine.sandbox.rank_place import RankPlace
from engine.sandbox.reseed import reseed
from engine.startup.ranks import load_follower

EXIT_DEFECT, EXIT_LOAD, EXIT_RANKS = 1, 3, 4


def follow(link: RankLink) -> int:
    """Run until rank 0 ends; gives the exit status."""
    torch.set_num_interop_threads(1)
    gc.collect()
    gc.freeze()
    try:
        link.everyone.meet(0)  # All have imported what they need: what is saved now is the same at each start.
        config = EngineConfig.from_json(bytes(link.everyone.hear()))
        reseed()
        runner = load_follower(config, RankPlace.of(link, config.pipeline_parallel))
        gc.disable()
        runner.follow(partial(_lock_down, link, config.threads, runner))
    except (ConfigurationError, LockdownError, ModelLoadError) as error:
        return _end(EXIT_LOAD, f"rank {link.rank} cannot start: {error}")
    except RankGoneError:
        return EXIT_RANK_GONE
    except EngineError as error:
        return _end(EXIT_RANKS, f"rank {link.rank} stops: {error}")
    except Exception as error:  # noqa: BLE001 - the process boundary: told once, by kind, never by content
        return _end(EXIT_DEFECT, f"rank {link.rank} defect: {type(error).__name__}")


def _lock_down(link: RankLink, threads: int, runner: FollowingRunner) -> None:
    writes_code = runner.writes_code or generates_code(read_maps())
    lock_down(rank_calls(RankBells(*link.bells), threads=threads, generates_code=writes_code))


def _end(status: int, line: str) -> int:
    sys.stderr.write(line + "\n")
    return status
