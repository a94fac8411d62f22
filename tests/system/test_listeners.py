"""What the whole appliance listens on, and whether it ever connects to what a request names."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from appliance.selftest.processes import tree
from tests.system.conftest import Appliance

pytestmark = pytest.mark.runsc

LISTENING = "0A"
"""TCP_LISTEN as /proc/net/tcp has it (proc(5))."""


def listening(pid: int) -> set[int]:
    """Ports that this very process listens on, over either version of IP, in its own network namespace."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING and f"socket:[{words[9]}]" in inodes:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def test_nobody_listens_but_on_the_declared_addresses(appliance: Appliance) -> None:
    """Of all processes the gateway alone listens, on the three addresses that the ready line told."""
    declared = {urlsplit(appliance.ready[name]).port for name in ("http", "admin")}
    declared.add(int(appliance.ready["grpc"].rpartition(":")[2]))
    by_process = {pid: ports for pid in tree(appliance.process.pid) if (ports := listening(pid))}
    assert len(by_process) == 1, by_process
    assert set().union(*by_process.values()) == declared


def test_no_url_of_a_request_is_fetched(appliance: Appliance) -> None:
    """A server of ours stands ready; requests name it in every place where others have fetched; nobody comes."""
    came: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x.png"
        stop = threading.Event()

        def watch() -> None:
            while not stop.is_set():
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    continue
                with peer:
                    came.append(peer.recv(100))

        watcher = threading.Thread(target=watch)
        watcher.start()
        part = [{"type": "image_url", "image_url": {"url": url}}]
        bodies = [
            {"messages": [{"role": "user", "content": content}]}
            for content in (url, f"![x]({url})", part, [{"type": "text", "text": url}])
        ] + [
            {"messages": [{"role": "user", "content": "x"}], name: value}
            for name, value in (
                ("image", url),
                ("tools", [{"url": url}]),
                ("documents", [url]),
                ("chat_template", url),
                ("user", url),
                ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": url}}}),
                ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$schema": url}}}),
            )
        ]
        for body in bodies:
            answer = httpx.post(
                appliance.ready["http"] + "/v1/chat/completions",
                timeout=30,
                headers={"authorization": f"Bearer {appliance.key('alpha')}"},
                content=json.dumps({"model": "athanor-mini", "max_tokens": 1, **body}).encode(),
            )
            assert answer.status_code in (200, 400)
        assert came == []
        with socket.create_connection(server.getsockname()) as control:
            control.sendall(b"control")
            until = time.monotonic() + 30
            while not came and time.monotonic() < until:
                time.sleep(0.01)
        stop.set()
        watcher.join()
    assert came == [b"control"], "the control: whoever comes is seen"
