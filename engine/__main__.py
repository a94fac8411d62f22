"""The program inside an engine sandbox: ``python -m engine /ipc/host.sock [CONFIGURATION]``.

Order: import everything heavy, attach (which waits for the host; a checkpoint is taken there), load and warm the model,
lock down, say ready, serve. With a configuration the model is loaded before it attaches: a checkpoint then holds the
prepared weights, and a copy of it serves at once a host that sends that very configuration. CUDA is never started
before the program attaches, since no checkpoint holds what the driver has: on a GPU no model is loaded ahead. From
lock-down on one system call beyond the list ends the process. It speaks on stderr twice, one line each, and never
repeats content: what it computes with, and why it ended. Exit status:

* 0: drained, or the host went away;
* 2: wrong arguments;
* 3: the configuration or the model cannot be used, or the kernel takes no lock-down;
* 4: the channel broke;
* 1: a defect.
"""

from __future__ import annotations

import gc
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy.random  # noqa: F401 - warm-up needs it, and a copy of a checkpoint shall find it imported
import torch

from engine.backends.common.host_runner import HostRunner
from engine.backends.common.pipelined import PipelinedRunner
from engine.backends.common.ranked import LeadingRunner
from engine.backends.cuda.load import import_kernels, may_use_device
from engine.backends.native.program import NativeModel
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.errors import ConfigurationError, EngineError, LockdownError, ModelLoadError, RankGoneError
from engine.model.layers.parallel import ALONE
from engine.sandbox.allowed_calls import Bells, RankBells, engine_calls
from engine.sandbox.allowed_calls_gpu import find_descriptors, gpu_engine_calls, hold_management, open_descriptors
from engine.sandbox.attach import attach, attach_spill
from engine.sandbox.lockdown import generates_code, leave, lock_down, read_maps
from engine.sandbox.rank_link import EXIT_RANK_GONE, RankLink
from engine.sandbox.rank_place import RankPlace
from engine.sandbox.weights_mapping import move_weights
from engine.serve import serve
from engine.startup.load import load_engine, release_free_memory
from engine.startup.ranks import check_ranks, lead_parallel
from isolation.ipc.channel import Channel
from isolation.ipc.errors import PeerGoneError, ProtocolError
from isolation.ipc.messages import Role

MOST_ARGUMENTS = 2

EXIT_DEFECT = 1
EXIT_USAGE = 2
EXIT_LOAD = 3
EXIT_CHANNEL = 4


def main(arguments: list[str], link: RankLink | None = None) -> int:
    """Run an engine on the host's socket, with the other ranks behind ``link``; gives the exit status."""
    if len(arguments) not in (1, 2) or (len(arguments) == MOST_ARGUMENTS and link is not None):
        return _end(EXIT_USAGE, "usage: python -m engine SOCKET [CONFIGURATION]")
    torch.set_num_interop_threads(1)
    # What was imported stays: the collector need not look at it again, neither here nor in a copy of this.
    gc.collect()
    gc.freeze()
    try:
        import_kernels()
        if link is not None:
            link.everyone.meet(0)  # All have imported what they need: a checkpoint holds that too.
        ahead = _Ahead.load(arguments[1], arguments[0]) if len(arguments) == MOST_ARGUMENTS else None
        channel, config_bytes = attach(arguments[0], Role.ENGINE)
        config = EngineConfig.from_json(config_bytes)
        check_ranks(config, 1 if link is None else link.size)
        place, parallel = None, ALONE
        if link is not None:
            link.everyone.tell(config_bytes)
            place = RankPlace.of(link, config.pipeline_parallel)
            parallel = lead_parallel(place, config)
        spill = attach_spill(arguments[0]) if config.spill else None
        if ahead is None:
            engine = load_engine(config, spill=spill, parallel=parallel, place=place, say=_say)
        else:
            engine = ahead.engine_for(config)
        _lock_down(engine, channel, spill, config, link)
        channel.send(engine.ready())
        gc.disable()
        serve(engine, channel, spill if engine.spill is not None else None)
    except PeerGoneError:
        return 0
    except RankGoneError:
        return EXIT_RANK_GONE
    except (ConfigurationError, LockdownError, ModelLoadError) as error:
        return _end(EXIT_LOAD, f"engine cannot start: {error}")
    except (ProtocolError, EngineError) as error:
        return _end(EXIT_CHANNEL, f"engine stops: {error}")
    except Exception as error:  # noqa: BLE001 - the process boundary: told once, by place and kind, never by content
        return _end(EXIT_DEFECT, f"engine defect: {type(error).__name__} at {_place(error)}")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """An engine that was loaded before it met its host."""

    config: EngineConfig
    engine: Engine
    said: list[str]
    """What it said of itself, for each host to hear."""

    @classmethod
    def load(cls, text: str, socket: str) -> Self:
        """Load an engine by this configuration; its weights go into a file where the host of a template has one.

        Raises:
            ConfigurationError: of a second channel or of ranks, which need the host, or of an engine that may start
                CUDA; or as ``load_engine``.
            ModelLoadError: as ``load_engine``.
        """
        config, said = EngineConfig.from_json(text.encode()), list[str]()
        if config.spill or config.ranks > 1:
            raise ConfigurationError("an engine with a second channel or with ranks is not loaded ahead")
        if may_use_device(config):
            raise ConfigurationError("an engine on a GPU is not loaded ahead: a checkpoint cannot hold what CUDA has")
        engine = load_engine(config, say=said.append)
        if isinstance(engine.runner, HostRunner) and isinstance(engine.runner.forward, NativeModel):
            move_weights(engine.runner.forward.constant, socket)
        release_free_memory()  # What warm-up has left there would be in each checkpoint.
        return cls(config, engine, said)

    def engine_for(self, config: EngineConfig) -> Engine:
        """The engine, for a host that sends its configuration.

        Raises:
            ConfigurationError: the host sends another one.
        """
        if config != self.config:
            raise ConfigurationError("it was loaded ahead by another configuration")
        for line in self.said:
            _say(line)
        return self.engine


def _lock_down(
    engine: Engine, channel: Channel, spill: Channel | None, config: EngineConfig, link: RankLink | None = None
) -> None:
    """Allow what a warm engine does. Code that is written while it runs needs executable memory: the backend declares
    it, or warm-up has left code without a file. On a GPU another list holds, with what the driver has opened."""
    bells, second = _bells(channel), None if spill is None else _bells(spill)
    capabilities = engine.runner.capabilities
    if capabilities.gpu:
        hold_management()
        ours = tuple(fd for one in (channel, spill) if one is not None for fd in one.fds())
        lock_down(gpu_engine_calls(find_descriptors(open_descriptors(), ours), bells, second))
        return
    writes_code = capabilities.writes_code or generates_code(read_maps())
    ranks = None if link is None else RankBells(*link.bells)
    if isinstance(engine.runner, LeadingRunner | PipelinedRunner):
        engine.runner.lock_down()
    lock_down(engine_calls(bells, threads=config.threads, generates_code=writes_code, spill=second, ranks=ranks))


def _bells(channel: Channel) -> Bells:
    _memory, inbound, outbound = channel.fds()
    return Bells(inbound, outbound)


def _place(error: Exception) -> str:
    """File and line that raised, of our own code where there is some on the stack; no source is opened for it."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in places if "/engine/" in place[0] or "/isolation/" in place[0]]
    filename, line = (own or places)[-1]
    return f"{Path(filename).name}:{line}"


def _end(status: int, line: str) -> int:
    sys.stderr.write(line + "\n")
    return status


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
