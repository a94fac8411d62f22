"""A trusted proxy in front of a real appliance: whose request a trace says that it was."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.system.conftest import PLAIN, PROXY, Appliance

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

CLIENT, FORGED = "203.0.113.5", "198.51.100.1"
TRACES = {PROXY: "4bf92f3577b34da6a3ce929d0e0e4736", "127.0.0.1": "4bf92f3577b34da6a3ce929d0e0e4737"}


def ask(appliance: Appliance, address: str, **headers: str) -> int:
    """One request from this address; gives the status."""
    headers["authorization"] = f"Bearer {appliance.key('alpha')}"
    headers["traceparent"] = f"00-{TRACES[address]}-00f067aa0ba902b7-01"
    body = {"model": "athanor-mini", "prompt": "The sandbox", "max_tokens": 4}
    url = f"{appliance.ready['http']}/v1/completions"
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=60) as client:
        return client.post(url, json=body, headers=headers).status_code


def client_of(appliance: Appliance, address: str) -> Any:
    """The client's address in the stored trace of the request from this address."""
    trace = httpx.get(f"{appliance.ready['admin']}/traces/{TRACES[address]}", timeout=10, verify=PLAIN).json()
    return next(
        span["attributes"]["client.address"] for span in trace["spans"] if "client.address" in span["attributes"]
    )


def test_traces_name_the_client_behind_a_trusted_proxy(appliance: Appliance) -> None:
    """A request of the proxy has the address that the proxy saw; another one, with the same headers, its own."""
    headers = {"x-forwarded-for": f"{FORGED}, {CLIENT}", "forwarded": f"for={FORGED}"}
    assert [ask(appliance, address, **headers) for address in TRACES] == [200, 200]
    assert {address: client_of(appliance, address) for address in TRACES} == {PROXY: CLIENT, "127.0.0.1": "127.0.0.1"}
