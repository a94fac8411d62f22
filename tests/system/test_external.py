"""A model that another appliance computes: two whole appliances, and the network between them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from appliance.common.catalog import embedded_model
from tests.system.batch_appliance import LIMITS, Kept, wait
from tests.system.conftest import PLAIN, Appliance

pytestmark = [pytest.mark.runsc, pytest.mark.full, pytest.mark.timeout(180)]

POLICY = f"""\
version: 1
tenants:
  alpha: {{credentials: ["key:alpha-1"], models: ["*"], limits: {LIMITS}}}
  beta: {{credentials: ["key:beta-1"], models: ["*"], retention: none, limits: {LIMITS}}}
"""

QUESTION: list[Any] = [{"role": "user", "content": "How do I reload the policy?"}]


@pytest.fixture(scope="module")
def front(appliance: Appliance, runsc_path: Path) -> Iterator[Kept]:
    """An appliance with a model that the shared demo computes; its folder has no weights."""
    with tempfile.TemporaryDirectory(prefix="ext-") as folder:
        state, model = Path(folder) / "state", Path(folder) / "model"
        state.mkdir()
        os.chmod(folder, 0o755)
        shutil.copytree(embedded_model(), model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        (Path(folder) / "key").write_text(appliance.key("alpha") + "\n")
        entry = {
            "name": "far",
            "path": str(model),
            "runner": "external",
            "max_context": 2_048,
            "external": {
                "url": appliance.ready["http"] + "/v1",
                "model": "athanor-mini",
                "api_key_file": str(Path(folder) / "key"),
                "timeout_s": 30,
            },
        }
        kept = Kept(state, runsc_path, [entry], POLICY)
        kept.prepare()
        try:
            kept.start()
            yield kept
        finally:
            kept.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_the_clusters(front: Kept, appliance: Appliance, stream: bool) -> None:
    """A conversation that is laid out and tokenised here has the text that the cluster gives a client of its own, and
    the tokens of the prompt are counted alike."""
    asked: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 40}
    direct = appliance.openai().chat.completions.create(model="athanor-mini", **asked)
    if stream:
        pieces = list(front.openai().chat.completions.create(model="far", stream=True, **asked))
        said = "".join(one.choices[0].delta.content or "" for one in pieces if one.choices)
        reason = next(one.choices[0].finish_reason for one in reversed(pieces) if one.choices)
    else:
        whole = front.openai().chat.completions.create(model="far", **asked)
        said, reason = whole.choices[0].message.content or "", whole.choices[0].finish_reason
        assert whole.usage is not None and direct.usage is not None
        assert whole.usage.prompt_tokens == direct.usage.prompt_tokens
        assert abs(whole.usage.completion_tokens - direct.usage.completion_tokens) <= 2
    assert (said, reason) == (direct.choices[0].message.content, direct.choices[0].finish_reason)


def test_choices_and_stops_are_served(front: Kept) -> None:
    """Two choices, and a stop string, which ends the text here."""
    asked: dict[str, Any] = {"model": "far", "prompt": "The policy", "max_tokens": 24, "temperature": 0}
    whole = front.openai().completions.create(**asked)
    assert len(whole.choices[0].text) > 4
    stop = whole.choices[0].text[3]
    two = front.openai().completions.create(**asked, n=2, stop=[stop])
    assert [one.text for one in two.choices] == [whole.choices[0].text.partition(stop)[0]] * 2


def test_a_client_that_leaves_leaves_nothing_in_the_cluster(front: Kept, appliance: Appliance) -> None:
    """Answers that nobody waits for any more end in the cluster too."""
    streams = [
        front.openai().completions.create(
            model="far", prompt="Count:", max_tokens=1_000, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(3)
    ]
    for stream in streams:
        next(iter(stream))

    def running() -> int:
        return sum(int(model["engine"]["running"]) for model in appliance.status()["models"])

    wait(lambda: running() == 3)
    for stream in streams:
        stream.close()
    wait(lambda: running() == 0, 10)


def test_it_is_named_for_what_it_is(front: Kept) -> None:
    """Tenants see the runner in the list of models, the operator what is not ours there; metrics count its outputs, and
    the audit log names the runner."""
    front.openai().completions.create(model="far", prompt="One", max_tokens=2)
    listed = {one["id"]: one.get("runner") for one in _get(front, "/v1/models")["data"]}
    assert listed == {"far": "external"}
    (model,) = front.get("/status").json()["models"]
    assert (model["runner"], model["state"], model["engine"]["state"]) == ("external", "ready", "ready")
    assert "outside of this appliance" in model["engine"]["computes"]
    ok = [line for line in front.get("/metrics").text.splitlines() if line.startswith("athanor_external_outputs_total")]
    assert any('outcome="ok"' in line and not line.endswith(" 0.0") for line in ok)
    wait(lambda: [one for one in front.entries() if one.get("model") == "far" and one.get("runner") == "external"])


def test_what_cannot_be_had_is_refused(front: Kept) -> None:
    """Log-probabilities and structured output are refused by name; a tenant that keeps nothing may not use it."""
    with pytest.raises(openai.BadRequestError, match="external"):
        front.openai().completions.create(model="far", prompt="One", max_tokens=2, logprobs=1)
    with pytest.raises(openai.PermissionDeniedError, match="outside"):
        front.openai("beta").completions.create(model="far", prompt="One", max_tokens=2)


def test_a_key_that_the_cluster_refuses_is_an_error_at_once(front: Kept) -> None:
    """The caller is told that the cluster failed, not what it said; with the right key it goes on."""
    key = front.state.parent / "key"
    good = key.read_text()
    key.write_text("sk-wrong")
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            front.openai().completions.create(model="far", prompt="One", max_tokens=2)
        assert caught.value.code == "external_model_failed"
        assert "401" not in caught.value.message
        assert "401" in front.tail()
    finally:
        key.write_text(good)
    front.openai().completions.create(model="far", prompt="One", max_tokens=2)


def _get(front: Kept, path: str) -> Any:
    headers = {"authorization": f"Bearer {front.keys['alpha']}"}
    return httpx.get(front.ready["http"] + path, headers=headers, timeout=10, verify=PLAIN).json()
