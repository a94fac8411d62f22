"""The process of the operator's API, started as its unit starts it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from appliance.common.config_loader import load_config
from appliance.common.errors import StartError
from appliance.operator.api import server
from appliance.operator.api.generated import admin_pb2 as pb
from appliance.operator.api.service import run_service
from tests.appliance.operator.api.place import OWN_POOL, Client, Place, a_place

ROOT = Path(__file__).parents[4]
SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]


def start(place: Place, notify: Path) -> subprocess.Popen[bytes]:
    """The process."""
    argv = [
        sys.executable,
        "-m",
        "appliance.operator.cli",
        "serve",
        "--role",
        "operator",
        "--config",
        str(place.config),
    ]
    environment = {"NOTIFY_SOCKET": str(notify), "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


async def test_the_process_serves_until_sigterm() -> None:
    """It says that it is ready when its socket answers, ends with status 0, and its socket is gone. Without the section
    it has nothing to do, and that is no failure (control)."""
    with a_place("127.0.0.1:9") as place, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(place.folder / "notify"))
        told.settimeout(60)
        with start(place, place.folder / "notify") as process:
            assert b"READY=1" in await asyncio.to_thread(told.recv, 4_096)
            async with grpc.aio.insecure_channel(f"unix:{place.socket}", OWN_POOL) as channel:
                assert (await Client(channel)(SERVICE, "GetServerInfo")).version
            process.send_signal(signal.SIGTERM)
            _, said = await asyncio.to_thread(process.communicate, None, 60)
            assert process.returncode == 0, said
        assert not place.socket.exists()
        values = json.loads(place.config.read_text())
        del values["operator_api"]
        place.config.write_text(json.dumps(values))
        with start(place, place.folder / "notify") as process:
            _, said = await asyncio.to_thread(process.communicate, None, 60)
            assert process.returncode == 0, said


async def test_the_process_ends_when_what_it_needs_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in the look at its connections ends the process with an error that names it, and the service manager
    starts another. Without one it serves until SIGTERM (control: the test above)."""

    async def dies(_listener: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(server, "_tick", dies)
    with a_place("127.0.0.1:9") as place, pytest.raises(StartError, match=r"connections of operators failed.*a defect"):
        async with asyncio.timeout(20):
            await run_service(place.config, lambda: load_config(place.config))
