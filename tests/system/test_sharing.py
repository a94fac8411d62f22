"""Sharing groups and quotas of KV on the running appliance: from the policy file to the engine and back to metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.system.commands import athanor
from tests.system.conftest import PLAIN, Appliance

pytestmark = pytest.mark.runsc

MODEL = "athanor-mini"
PROMPT = "Shared by those whom the operator has put together, and by nobody else. " * 6


def reload(appliance: Appliance) -> None:
    """Put the policy that lies there in force."""
    done = athanor("reload", "--admin", appliance.ready["admin"])
    assert done.returncode == 0, done.stdout + done.stderr


def cached(appliance: Appliance, tenant: str, prompt: str = PROMPT) -> int:
    """Tokens of the prompt that the tenant found."""
    answer = appliance.openai(tenant).completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def gauge(appliance: Appliance, name: str, account: str) -> float:
    """A gauge of an account, as soon as it is there."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        cached(appliance, "alpha", "wake")  # an engine reports after steps
        for line in httpx.get(appliance.ready["admin"] + "/metrics", timeout=10, verify=PLAIN).text.splitlines():
            if line.startswith(name + "{") and f'tenant_id="{account}"' in line and not line.endswith(" 0.0"):
                return float(line.rpartition(" ")[2])
        time.sleep(0.2)
    raise AssertionError(f"no {name} of {account}")


@pytest.fixture
def governed(appliance: Appliance) -> Iterator[Appliance]:
    """The shared demo, whose policy is afterwards what it was."""
    file = appliance.state / "policy.yaml"
    good = file.read_text()
    yield appliance
    file.write_text(good)
    reload(appliance)


def test_a_group_shares_its_prefixes_and_an_account_and_leaves_no_trace_behind(governed: Appliance) -> None:
    """Two tenants find each other's prefix while they are in a group, whose blocks are one account. Before and after
    they find only their own. A tenant that asks for more than its cap is told so, at once."""
    appliance = governed
    assert [cached(appliance, name) for name in ("alpha", "beta")] == [0, 0]
    assert min(cached(appliance, name) for name in ("alpha", "beta")) > 0
    file = appliance.state / "policy.yaml"
    before = file.read_text()
    file.write_text(before + "\nsharing_groups:\n  both: {tenants: [alpha, beta], kv: {reservation: 25%}}\n")
    reload(appliance)
    assert cached(appliance, "alpha") == 0
    assert cached(appliance, "beta") > 0
    assert gauge(appliance, "athanor_kv_resident_blocks", "group/both") > 0
    assert gauge(appliance, "athanor_kv_reserved_blocks", "group/both") > 0
    file.write_text(before + "\nsharing_groups:\n  both: {tenants: [alpha, beta], kv: {cap: 0.01%}}\n")
    reload(appliance)
    with pytest.raises(openai.BadRequestError) as caught:
        cached(appliance, "beta")
    assert "KV" in str(caught.value)
    file.write_text(before)
    reload(appliance)
    assert min(cached(appliance, name) for name in ("alpha", "beta")) > 0
    assert cached(appliance, "beta", PROMPT + "Something else. " * 20) > 0
