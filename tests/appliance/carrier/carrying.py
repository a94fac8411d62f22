"""A real carrier: the program of its own on a Unix socket, for the time of a block."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

START_S = 60.0

PROGRAM = """
import json, sys
from pathlib import Path
from appliance.carrier.service import CarrierService, listen
from appliance.common.kv_store_config import KvStoreConfig
CarrierService(KvStoreConfig.model_validate(json.loads(sys.argv[2]), strict=False), listen(Path(sys.argv[1]))).run()
"""


def _listens(path: Path) -> bool:
    """Whether somebody takes connections there: a socket has its name a moment before."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@contextlib.contextmanager
def carrier(path: Path, store: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A carrier that listens on ``path``; ``more``: further keys of ``kv_store``."""
    config = json.dumps({"store": store, "size": 1 << 30, **more})
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path), config])
    try:
        until = time.monotonic() + START_S
        while not _listens(path):
            assert process.poll() is None and time.monotonic() < until, "the carrier did not start"
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()
