"""Policy and keys behind links that are swapped, as the kubelet swaps those of a ConfigMap and a Secret (``test_pods``
has them in a pod)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.system.commands import athanor
from tests.system.conftest import PLAIN, Appliance
from tests.system.pods import put

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(120)]

IN_FORCE_S = 20.0
"""Until changed keys are in force, on a busy machine."""

FILES = ("policy.yaml", "credentials.json")


def swap(appliance: Appliance, files: dict[str, str]) -> None:
    """A new folder with these files, and a rename of the link."""
    put(appliance.state, files, os.getgid(), 0o600)


@pytest.fixture
def linked(appliance: Appliance) -> Iterator[tuple[Appliance, dict[str, str]]]:
    """The shared demo with its policy and keys behind links, and their texts; afterwards in files again."""
    before = {name: (appliance.state / name).read_text() for name in FILES}
    swap(appliance, before)
    yield appliance, before
    for name, text in before.items():
        (appliance.state / f"{name}.file").write_text(text)
        (appliance.state / f"{name}.file").chmod(0o600)
        os.replace(appliance.state / f"{name}.file", appliance.state / name)
    httpx.post(appliance.ready["admin"] + "/reload", timeout=30, verify=PLAIN).raise_for_status()
    becomes(appliance, "alpha", 200)


def asked(appliance: Appliance, tenant: str) -> int:
    """Status of a request."""
    headers = {"authorization": f"Bearer {appliance.key(tenant)}"}
    return httpx.get(appliance.ready["http"] + "/v1/models", headers=headers, timeout=30, verify=PLAIN).status_code


def becomes(appliance: Appliance, tenant: str, status: int) -> None:
    """A tenant is answered so, within a while."""
    until = time.monotonic() + IN_FORCE_S
    while (seen := asked(appliance, tenant)) != status:
        assert time.monotonic() < until, seen
        time.sleep(0.05)


def test_a_reload_takes_the_policy_behind_a_swapped_link(linked: tuple[Appliance, dict[str, str]]) -> None:
    """`athanor reload` puts it in force, and nothing does before; one with a mistake is refused, names line and place,
    and changes nothing."""
    appliance, before = linked
    admin = ("--admin", appliance.ready["admin"])
    swap(appliance, {**before, "policy.yaml": "version: 1\ntenants: {}\n"})
    assert asked(appliance, "alpha") == 200
    assert athanor("reload", *admin).returncode == 0
    assert asked(appliance, "alpha") == 401
    swap(appliance, before)
    assert athanor("reload", *admin).returncode == 0
    assert asked(appliance, "alpha") == 200
    swap(appliance, {**before, "policy.yaml": "version: 1\ntenant: {}\n"})
    refused = athanor("reload", *admin)
    assert refused.returncode == 1 and "policy.yaml" in refused.stderr, refused.stderr
    assert asked(appliance, "alpha") == 200


def test_a_key_that_a_swapped_link_revokes_needs_no_reload(linked: tuple[Appliance, dict[str, str]]) -> None:
    """The revoked key gets 401 soon, another tenant's goes on; the link back brings it back. The control: a swap to a
    new file with the same keys changes nothing."""
    appliance, before = linked
    swap(appliance, before)
    time.sleep(1.0)
    assert (asked(appliance, "alpha"), asked(appliance, "beta")) == (200, 200)
    table = json.loads(before["credentials.json"])
    left = {**table, "keys": {name: one for name, one in table["keys"].items() if not name.startswith("alpha")}}
    assert len(left["keys"]) < len(table["keys"])
    swap(appliance, {**before, "credentials.json": json.dumps(left)})
    becomes(appliance, "alpha", 401)
    assert asked(appliance, "beta") == 200
    swap(appliance, before)
    becomes(appliance, "alpha", 200)
