"""A support archive of an appliance that has served: no prompt, no answer, no key is in it."""

from __future__ import annotations

import contextlib
import json
import tarfile
from pathlib import Path

import openai
import pytest

from tests.system.commands import athanor
from tests.system.conftest import Appliance

pytestmark = pytest.mark.runsc

PROMPT_CANARY = "zyxwv-prompt-canary-7781"
STOLEN = "ath_alpha-1_" + "fe" * 32


def test_nothing_secret_gets_in(appliance: Appliance, tmp_path: Path) -> None:
    """Prompts, answers, wrong and right keys, the pepper and digests are searched for in every member; that the search
    finds what is there is shown by the tenant's name and the request's trace."""
    client = appliance.openai("alpha", default_headers={"x-note": PROMPT_CANARY})
    messages = [{"role": "user", "content": f"What is {PROMPT_CANARY}?"}]
    answer = client.chat.completions.create(
        model="athanor-mini", messages=messages, max_tokens=24, temperature=0, user=PROMPT_CANARY
    )
    with contextlib.suppress(openai.AuthenticationError):
        openai.OpenAI(base_url=appliance.ready["http"] + "/v1", api_key=STOLEN, max_retries=0).models.list()
    config = json.loads((appliance.state / "athanor.yaml").read_text().partition("\n")[2])
    assert config["listen"]["admin"] in appliance.ready["admin"]
    path = tmp_path / "help.tar.gz"
    done = athanor("bundle", "--config", str(appliance.state / "athanor.yaml"), "--file", str(path))
    assert done.returncode == 0, done.stderr
    with tarfile.open(path) as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive.getmembers()}
    everything = b"\n".join(members.values())
    for wanted in ("help/traces.json", "help/metrics.txt", "help/status.json", "help/policy/policy.yaml"):
        assert wanted in members
    assert b'"alpha"' in everything, "the search finds what is there"
    assert answer.id.partition("-")[2].encode() in members["help/traces.json"]
    pepper = (appliance.state / "pepper").read_bytes()
    table = json.loads((appliance.state / "credentials.json").read_text())["keys"]
    digests = [record["hmac_sha256"] for record in table.values()]
    said = (answer.choices[0].message.content or "").strip()
    assert len(said) > 20
    secrets = [PROMPT_CANARY, STOLEN[-64:], said, pepper.hex(), *digests]
    secrets += [appliance.key(tenant)[-64:] for tenant in ("alpha", "beta")]
    assert [secret for secret in secrets if secret.encode() in everything] == []
    assert pepper not in everything
