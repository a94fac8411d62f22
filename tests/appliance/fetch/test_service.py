"""The downloader as a service: orders over its socket, and who may give them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from appliance.common.errors import ModelCacheError
from appliance.common.model_cache.store import ModelCache
from appliance.fetch import service as fetch_service
from appliance.fetch.protocol import FetchOrder, read_order
from appliance.fetch.pull import PullOrder
from appliance.fetch.service import FetchService
from appliance.fetch.settings import FetchSettings
from appliance.operator.fetch_client import send_order
from tests.appliance.fetch.sample import make_model

MIB = 1 << 20
NOBODY = 65_534

CONNECT = """
import os, socket, sys
os.setgid({user}); os.setuid({user})
with socket.socket(socket.AF_UNIX) as connection:
    try:
        connection.connect(sys.argv[1])
    except PermissionError:
        sys.exit("no permission")
    try:
        connection.sendall(b'{{"version": 1, "do": "pin", "model": "x"}}\\n')
        print(connection.recv(4096))
    except ConnectionError:
        print("closed")
"""
"""Program that gives an order as another user."""


@contextmanager
def serving(settings: FetchSettings, path: Path) -> Iterator[None]:
    """Serve on a socket, in a thread."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def serve() -> None:
        server = await FetchService(lambda: settings).listen(path)
        ready.set()
        async with server:
            await server.serve_forever()

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(10)
        yield
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join()
        loop.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A short folder for a socket, passable for all."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def order(settings: FetchSettings, path: Path, wanted: FetchOrder, seen: list[str] | None = None) -> dict[str, object]:
    """Send an order as the command does."""
    told = [] if seen is None else seen
    return send_order(wanted, settings, path, lambda doing, done, total: told.append(doing), {})


def test_orders_are_carried_out(place: Path) -> None:
    """A pull with progress, a pin, a removal; an order for nothing is answered in words."""
    digest = make_model(place / "model", (3 * MIB,))
    settings = FetchSettings(directory=place / "cache")
    with serving(settings, place / "s"):
        seen: list[str] = []
        done = order(settings, place / "s", FetchOrder("pull", PullOrder(str(place / "model"), name="mine")), seen)
        assert (done["digest"], done["name"], done["hit"]) == (digest, "mine", False)
        assert "downloading" in seen
        order(settings, place / "s", FetchOrder("pin", model=digest))
        assert ModelCache(place / "cache").find("mine").notes.pinned
        order(settings, place / "s", FetchOrder("remove", model=digest))
        assert ModelCache(place / "cache").models() == ()
        with pytest.raises(ModelCacheError, match="there is no model"):
            order(settings, place / "s", FetchOrder("unpin", model=digest))


def test_a_model_that_the_configuration_names_stays(place: Path) -> None:
    """It is not removed by an order; positive control: another one is."""
    digests = [make_model(place / f"m{seed}", (100,), seed) for seed in range(2)]
    settings = FetchSettings(directory=place / "cache", kept=(digests[0],))
    with serving(settings, place / "s"):
        for seed in range(2):
            order(settings, place / "s", FetchOrder("pull", PullOrder(str(place / f"m{seed}"))))
        with pytest.raises(ModelCacheError, match=r"named by athanor\.yaml"):
            order(settings, place / "s", FetchOrder("remove", model=digests[0]))
        order(settings, place / "s", FetchOrder("remove", model=digests[1]))
    assert [one.digest for one in ModelCache(place / "cache").models()] == [digests[0]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_gives_no_orders(place: Path) -> None:
    """The socket's mode keeps other users out; with an open mode the kernel's word about the peer does."""
    settings = FetchSettings(directory=place / "cache")
    ModelCache(place / "cache").prepare()
    with serving(settings, place / "s"):
        argv = [sys.executable, "-c", CONNECT.format(user=NOBODY), str(place / "s")]
        assert "no permission" in subprocess.run(argv, capture_output=True, text=True, check=False).stderr
        (place / "s").chmod(0o666)
        assert subprocess.run(argv, capture_output=True, text=True, check=False).stdout in ("b''\n", "closed\n")
        argv[2] = CONNECT.format(user=0)
        assert "there is no model" in subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def test_the_end_of_a_connection_ends_its_pull(place: Path) -> None:
    """What has come is kept, and another connection goes on."""
    make_model(place / "model", (24 * MIB,))
    slow = FetchSettings(directory=place / "cache", max_rate=8 * MIB)
    with serving(slow, place / "s"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(place / "s"))
            connection.sendall(FetchOrder("pull", PullOrder(str(place / "model"))).line())
            text = b""
            # Some of it, and not all: the number of all of it begins with 25.
            while re.search(rb'"done": (?!25165)[1-9]', text) is None:
                text = connection.recv(4096)
        done = order(slow, place / "s", FetchOrder("pull", PullOrder(str(place / "model"))))
    assert 0 < int(str(done["fetched"])) < 24 * MIB


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{" * 10_000,
        b'{"version": 2, "do": "pull"}',
        b'{"version": 1, "do": "run", "model": "x"}',
        b'{"version": 1, "do": "pin", "model": 7}',
        b'{"version": 1, "do": "pull", "source": "s3://a/b"}',
    ],
)
def test_what_is_no_order_is_refused(line: bytes) -> None:
    """By its form; control: an order is read as it was written."""
    with pytest.raises(ModelCacheError, match="not an order of this release"):
        read_order(line)
    wanted = FetchOrder("pull", PullOrder("s3://a/b", digest="0" * 64, pin=True))
    assert read_order(wanted.line()) == wanted


def test_connections_are_bounded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than there may be is told so at once."""
    monkeypatch.setattr(fetch_service, "MAX_CONNECTIONS", 1)
    settings = FetchSettings(directory=place / "cache")
    with serving(settings, place / "s"), socket.socket(socket.AF_UNIX) as first:
        first.connect(str(place / "s"))
        with socket.socket(socket.AF_UNIX) as second:
            second.connect(str(place / "s"))
            answer = json.loads(second.recv(4096))
    assert answer["event"] == "failed"
    assert "wait for one to end" in answer["message"]
