"""The program inside an engine sandbox: ``python -m engine /ipc/host.sock``.

Order: import everything heavy, attach (which waits for the host), load and warm the model, say ready, serve. The
process speaks on stderr only when it ends, one line, and never repeats content. Exit status:

* 0: drained, or the host went away;
* 2: wrong arguments;
* 3: the configuration or the model cannot be used;
* 4: the channel broke;
* 1: a defect.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch

from engine.attach import attach
from engine.config import EngineConfig
from engine.errors import ConfigurationError, EngineError, ModelLoadError
from engine.load import load_engine
from engine.serve import serve
from isolation.ipc.errors import PeerGoneError, ProtocolError
from isolation.ipc.messages import Role

EXIT_DEFECT = 1
EXIT_USAGE = 2
EXIT_LOAD = 3
EXIT_CHANNEL = 4


def main(arguments: list[str]) -> int:
    """Run an engine on the host's socket; gives the exit status."""
    if len(arguments) != 1:
        return _end(EXIT_USAGE, "usage: python -m engine SOCKET")
    torch.set_num_interop_threads(1)
    try:
        channel, config_bytes = attach(arguments[0], Role.ENGINE)
        engine = load_engine(EngineConfig.from_json(config_bytes))
        channel.send(engine.ready())
        serve(engine, channel)
    except PeerGoneError:
        return 0
    except (ConfigurationError, ModelLoadError) as error:
        return _end(EXIT_LOAD, f"engine cannot start: {error}")
    except (ProtocolError, EngineError) as error:
        return _end(EXIT_CHANNEL, f"engine stops: {error}")
    except Exception as error:  # noqa: BLE001 - the process boundary: told once, by place and kind, never by content
        return _end(EXIT_DEFECT, f"engine defect: {type(error).__name__} at {_place(error)}")
    return 0


def _place(error: Exception) -> str:
    """File and line that raised, of our own code where there is some on the stack."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/engine/" in frame.filename or "/isolation/" in frame.filename]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _end(status: int, line: str) -> int:
    sys.stderr.write(line + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
