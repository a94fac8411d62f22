"""An operator ends the appliance in the middle of an answer."""

from __future__ import annotations

import http.client
import signal
import time

import httpx
import pytest

from tests.system.conftest import PLAIN, Appliance
from tests.system.test_deaths import leftovers

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

TOLD_S = 0.8
"""Within which the connections that are open as a drain begins ask for the appliance's health; they end after a second
without a request (``servers.LINGER_S``)."""


def health(connection: http.client.HTTPConnection, path: str) -> tuple[int, str | None]:
    """Status of a health route over a connection that is open, and whether the connection ends behind the answer."""
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    return answer.status, answer.getheader("connection")


@pytest.mark.clock
def test_a_clean_stop_is_unready_finishes_what_runs_and_leaves_nothing(ending: Appliance) -> None:
    """SIGTERM in the middle of an answer. While it drains, ``/health`` and ``/health/ready`` say 503 over connections
    that a balancer holds, and ``/health/live`` says 200; each connection ends behind its answer, and no new one is
    taken. The operator is told the reason, and the answer that runs comes to its end. The status is 0, and no process,
    mount or file remains. Before the drain all three routes say 200 (control).

    In a whole run it is the demo whose sandboxes and both host processes the tests before have killed, and whose policy
    they have changed.
    """
    appliance = ending
    paths = {"/health": 503, "/health/ready": 503, "/health/live": 200}
    _, _, address = appliance.ready["http"].partition("://")
    stream = iter(
        appliance.openai().completions.create(
            model="athanor-mini",
            prompt="Count:",
            max_tokens=1_000,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
    )
    next(stream)
    held = {path: http.client.HTTPConnection(address, timeout=10) for path in paths}
    assert [health(held[path], path) for path in paths] == [(200, None)] * 3
    ready = appliance.ready["admin"] + "/health/ready"
    with httpx.Client(verify=PLAIN, timeout=10) as operator:
        assert operator.get(ready).status_code == 200
        appliance.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while (answer := operator.get(ready)).status_code == 200:
            assert time.monotonic() < deadline
        began = time.monotonic()
        told = {path: health(held[path], path) for path in paths}
        assert time.monotonic() - began < TOLD_S, "the machine is too busy for this test"
        assert told == {path: (code, "close") for path, code in paths.items()}
        assert (answer.status_code, answer.json()["reason"]) == (503, "draining")
        with pytest.raises(OSError):
            health(http.client.HTTPConnection(address, timeout=10), "/health")
    rest = list(stream)
    assert rest[-1].choices[0].finish_reason == "length"
    assert appliance.process.wait(60) == 0
    assert leftovers(appliance.state) == []
