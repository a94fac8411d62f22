"""Web servers that break off, lie about ranges or send other bytes: what a pull makes of them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from appliance.common.errors import ModelDigestError, ModelSourceError, SourceUnavailableError
from appliance.fetch import download
from appliance.fetch.pull import PullOrder
from tests.appliance.fetch.sample import make_model
from tests.appliance.fetch.test_pull import pull, visible

MIB = 1 << 20

Answer = Callable[[int, bytes], tuple[int, bytes]]
"""From the number of the request for weights and the bytes of its range to the status and the bytes that are sent."""


@contextmanager
def serving(folder: Path, answer: Answer) -> Iterator[str]:
    """Serve a folder with ranges; requests for weights are answered as ``answer`` says, under the range's length."""
    count, lock = 0, threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            nonlocal count
            path = folder / self.path.removeprefix("/m/")
            if not path.is_file():
                self.send_error(404)
                return
            data, status = path.read_bytes(), 200
            total, length = len(data), len(data)
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
            if asked:
                first, last = int(asked[1]), min(int(asked[2]), total - 1)
                data, status, length = data[first : last + 1], 206, last + 1 - first
            if path.suffix == ".safetensors":
                with lock:
                    count += 1
                    number = count
                status, data = answer(number, data) if asked else (status, data)
            self.send_response(status)
            self.send_header("content-length", str(length if len(data) <= length else len(data)))
            self.send_header("last-modified", "Wed, 25 Nov 2026 12:00:00 GMT")
            if status == 206 and asked:
                self.send_header("content-range", f"bytes {first}-{last}/{total}")
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = len(data) < length

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/m"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries are short here; how they grow is shown by themselves."""
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.001)


def test_a_range_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    """Two of three answers break off in the middle, some are a 503: the model arrives, and no byte comes twice."""
    digest = make_model(tmp_path / "m", (20 * MIB,))

    def answer(number: int, data: bytes) -> tuple[int, bytes]:
        if number % 5 == 0:
            return 503, b""
        return 206, data[: len(data) // 2] if number % 3 and len(data) > MIB else data

    with serving(tmp_path / "m", answer) as address:
        done = pull(tmp_path / "cache", PullOrder(address))
    assert (done.digest, done.fetched) == (digest, done.size)


def test_a_source_that_never_recovers_is_given_up(tmp_path: Path) -> None:
    """After eight tries of a piece, with words; what had come is gone on with by a pull from a sound server."""
    digest = make_model(tmp_path / "m", (20 * MIB,))
    with (
        serving(tmp_path / "m", lambda number, data: (206, data if number == 1 else b"")) as address,
        pytest.raises(SourceUnavailableError, match="tried 8 times. What has come is kept"),
    ):
        pull(tmp_path / "cache", PullOrder(address))
    assert visible(tmp_path / "cache") == []
    with serving(tmp_path / "m", lambda _, data: (206, data)) as address:
        done = pull(tmp_path / "cache", PullOrder(address))
    assert done.digest == digest
    assert done.fetched < done.size


def test_a_server_without_ranges_is_refused(tmp_path: Path) -> None:
    """A 200 with the whole file in answer to a range is no range."""
    make_model(tmp_path / "m", (3 * MIB,))
    whole = (tmp_path / "m" / "model-00000.safetensors").read_bytes()
    with serving(tmp_path / "m", lambda _, data: (200, whole)) as address, pytest.raises(ModelSourceError):
        pull(tmp_path / "cache", PullOrder(address))
    assert visible(tmp_path / "cache") == []


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    """One bit changed on the way, in one answer; control: unchanged they are taken."""
    make_model(tmp_path / "m", (3 * MIB,))

    def answer(number: int, data: bytes) -> tuple[int, bytes]:
        return 206, bytes([data[0] ^ 1]) + data[1:]

    with serving(tmp_path / "m", answer) as address, pytest.raises(ModelDigestError):
        pull(tmp_path / "cache", PullOrder(address))
    with serving(tmp_path / "m", lambda _, data: (206, data)) as address:
        assert not pull(tmp_path / "cache", PullOrder(address)).hit


def test_pauses_double_up_to_half_a_minute() -> None:
    """Between half and all of 0.5 s, 1 s, 2 s and so on; never more than 30 s."""
    longest = [download.pause(number, lambda: 1.0) / 0.001 for number in range(1, 12)]
    shortest = [download.pause(number, lambda: 0.0) / 0.001 for number in range(1, 12)]
    assert longest[:4] == pytest.approx([1, 2, 4, 8])
    assert shortest[:4] == pytest.approx([0.5, 1, 2, 4])
    assert download.pause(100, lambda: 1.0) == download.LONGEST_PAUSE_S
