"""The downloader of one command: ``python -m appliance.fetch DESCRIPTOR SETTINGS`` serves one connection and ends."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import signal
import socket
import sys

from pydantic import ValidationError

from appliance.common.log import configure
from appliance.fetch.service import FetchService
from appliance.fetch.settings import FetchSettings

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38


def main(argv: list[str]) -> int:
    """Serve the connection of an inherited descriptor; gives the exit status."""
    descriptor, text = argv
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # A credential would be in a core file, and files are for the sandboxes' user as well.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o022)
    configure(level=logging.ERROR)
    try:
        settings = FetchSettings.model_validate_json(text)
    except ValidationError:
        return 2
    asyncio.run(_serve(int(descriptor), settings))
    return 0


async def _serve(descriptor: int, settings: FetchSettings) -> None:
    connection = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    await FetchService(lambda: settings).serve(reader, writer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
