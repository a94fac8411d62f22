"""``athanor model bench`` beside a tenant of a running appliance."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from appliance.operator.cli.app import app
from tests.system.conftest import Appliance

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

MODEL = "athanor-mini"


def athanor(appliance: Appliance, *words: str) -> Result:
    """Run a command about this appliance."""
    where = ("--config", str(appliance.state / "athanor.yaml"), "--admin", appliance.ready["admin"])
    return CliRunner().invoke(app, [*words, *where], env={"COLUMNS": "120", "TERM": "dumb"}, prog_name="athanor")


def measured(appliance: Appliance, *words: str) -> Result:
    """Measure the model with short answers."""
    lengths = ("--prompt-tokens", "24", "--output-tokens", "8")
    return athanor(appliance, "model", "bench", MODEL, "--url", appliance.ready["http"], *lengths, *words)


@pytest.fixture
def account(appliance: Appliance) -> Iterator[None]:
    """The tenant bench, for the time of a test."""
    added = athanor(appliance, "tenant", "add", "bench", "--models", "*", "--credential", "key:bench-live", "-y")
    assert added.exit_code == 0, added.output
    try:
        yield
    finally:
        removed = athanor(appliance, "tenant", "remove", "bench", "-y")
        assert removed.exit_code == 0, removed.output


@pytest.mark.full
@pytest.mark.usefixtures("account")
def test_a_model_is_measured_beside_a_tenant(appliance: Appliance) -> None:
    """All levels succeed while a tenant streams, whose answer ends as it would alone; rates, times, load and memory are
    told, each rate beside the bound by the machine's card. The key is gone afterwards; the usage is the account's."""
    (appliance.state / "machine-card.json").write_text('{"memory_read_gb_s_all_cores": 10.0}')
    answers: list[str] = []

    def stream() -> None:
        said = appliance.openai().completions.create(model=MODEL, prompt="How do I", max_tokens=400, temperature=0)
        answers.append(said.choices[0].text)

    stream()
    beside = threading.Thread(target=stream)
    beside.start()
    result = measured(appliance, "-o", "json")
    beside.join()
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [one["streams"] for one in found["levels"]] == [1, 4, 16]
    assert [one["requests"] for one in found["levels"]] == [4, 8, 32]
    assert not any(one["failures"] for one in found["levels"])
    assert all(one["tokens_per_s"] > 0 and one["first_token_p95_s"] > 0 for one in found["levels"])
    bounds = [one["bound"] for one in found["levels"]]
    assert bounds[0] == pytest.approx(10e9 / found["weights_bytes"])
    assert bounds[2] == pytest.approx(16 * bounds[0])
    assert 50e6 < found["memory_peak_bytes"] < found["memory_limit_bytes"]
    assert found["load_s"] > 0
    assert answers[0] == answers[1]
    assert "bench-live" not in (appliance.state / "credentials.json").read_text()
    used = {one["id"]: one for one in appliance.status()["tenants"]}["bench"]
    assert used["requests"] == 44 + 1 + 4 + 16


def test_without_the_account_it_says_how_to_make_it(appliance: Appliance) -> None:
    """The command that makes the account is told; nothing was sent, no key was made."""
    before = (appliance.state / "credentials.json").read_bytes()
    result = measured(appliance)
    assert result.exit_code == 1
    assert 'athanor tenant add bench --models "*" --credential key:bench-live' in result.stderr
    assert (appliance.state / "credentials.json").read_bytes() == before
