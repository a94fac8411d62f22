"""Public prefixes on the running appliance: from the policy file to what tenants find, through the front door."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import httpx
import pytest

from tests.system.conftest import PLAIN, Appliance

from .test_sharing import MODEL, cached, gauge, governed, reload

__all__ = ["governed"]

pytestmark = pytest.mark.runsc

RULES = "You answer in short sentences, you quote the manual, and you never guess. " * 8
TEXT = "The manual of the furnace begins with the rules of the house. " * 8
QUESTION = "What comes first in this house, and what in all others?"
PUBLIC = f"""
public_prefixes:
  rules:
    model: {MODEL}
    tenants: [alpha]
    messages: [{{role: system, content: "{RULES}"}}]
  manual:
    model: {MODEL}
    tenants: all
    file: manual.txt
"""


def publish(appliance: Appliance, more: str) -> None:
    """The demo's policy with something more, in force, and every prefix resident."""
    file = appliance.state / "policy.yaml"
    file.write_text(file.read_text().partition("\npublic_prefixes:")[0] + more)
    reload(appliance)
    settled(appliance)


def views(appliance: Appliance) -> list[dict[str, Any]]:
    """What status says of public prefixes."""
    return list(appliance.status()["public"])


def chat(appliance: Appliance, tenant: str, *, system: str = RULES, user: str = QUESTION) -> tuple[int, str]:
    """Tokens found of a conversation, and its answer."""
    answer = appliance.openai(tenant).chat.completions.create(
        model=MODEL,
        max_tokens=12,
        temperature=0,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0, str(answer.choices[0].message.content)


def settled(appliance: Appliance) -> None:
    """Until every prefix is resident."""
    deadline = time.monotonic() + 30
    while any(one["state"] != "resident" for one in views(appliance)):
        assert time.monotonic() < deadline, views(appliance)
        time.sleep(0.05)


def test_a_published_prefix_is_found_by_whom_it_is_for_at_the_first_request(governed: Appliance) -> None:
    """Before, nothing is found. Then alpha finds the conversation and both find the text, each at the first request,
    and alpha has the answer that it is without a prefix. Beta, who is not named for the rules, finds no more of them
    than it left itself, and nothing of what alpha left behind them. After its engine was killed all is there again.
    What is withdrawn nobody finds."""
    appliance = governed
    (appliance.state / "public").mkdir(exist_ok=True)
    (appliance.state / "public" / "manual.txt").write_text(TEXT)
    nothing, plain = chat(appliance, "beta")
    assert nothing == 0
    publish(appliance, PUBLIC)
    found, answer = chat(appliance, "alpha")
    assert found > 0
    assert answer == plain
    assert cached(appliance, "alpha", TEXT + "Then?") == cached(appliance, "beta", TEXT + "And?") > 0
    tail = "Tell me the third rule, and why the house keeps it. " * 4
    assert chat(appliance, "alpha", user=tail)[0] == found
    own = chat(appliance, "alpha", user=tail)[0]
    assert own > found + 32, "control: the owner finds its own"
    assert chat(appliance, "beta", user=tail)[0] <= found + 16
    shown = {one["id"]: one for one in views(appliance)}
    assert shown["rules"]["num_blocks"] * 16 >= found
    assert (shown["rules"]["tenants"], shown["manual"]["state"]) == (1, "resident")
    generation = appliance.status()["models"][0]["engine"]["generation"]
    os.kill(appliance.sandbox_pid("engine"), signal.SIGKILL)
    appliance.wait_generation("engine", generation)
    settled(appliance)
    assert cached(appliance, "beta", TEXT + "Afterwards?") > 0
    assert gauge(appliance, "athanor_kv_public_blocks", "public/manual") > 0
    publish(appliance, "")
    assert chat(appliance, "beta", system=TEXT)[0] == 0
    assert views(appliance) == []


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        ("{model: no-such-model, tenants: all, text: a}", "there is no model"),
        (f"{{model: {MODEL}, tenants: all, text: short}}", "there is nothing to share"),
        (f'{{model: {MODEL}, tenants: all, text: "{"many words of all kinds " * 4_000}"}}', "too long"),
        (f"{{model: {MODEL}, tenants: [nobody], text: a}}", "there is no tenant"),
        (f"{{model: {MODEL}, tenants: all, file: none.txt}}", "no UTF-8 text public/none.txt"),
        (f"{{model: {MODEL}, tenants: all, messages: [{{role: user, content: a, name: b}}]}}", "unknown key"),
    ],
    ids=lambda value: value[:50],
)
def test_what_cannot_be_published_is_refused_at_the_reload(governed: Appliance, prefix: str, says: str) -> None:
    """With its name and the reason; the policy before stays in force."""
    file = governed.state / "policy.yaml"
    before = governed.status()["policy"]["digest"]
    file.write_text(file.read_text() + "\npublic_prefixes:\n  one: " + prefix + "\n")
    answered = httpx.post(governed.ready["admin"] + "/reload", timeout=60, verify=PLAIN).json()
    assert not answered["ok"]
    assert "public_prefixes.one" in json.dumps(answered["problems"])
    assert says in json.dumps(answered["problems"])
    assert governed.status()["policy"]["digest"] == before
