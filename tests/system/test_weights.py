"""The form in which an engine holds its weights, as every surface of a running appliance names it."""

from __future__ import annotations

import time

import httpx
import pytest

from isolation.ipc.messages import WeightForm
from tests.system.conftest import PLAIN, START_TIMEOUT_S, Appliance

pytestmark = pytest.mark.runsc


def test_the_form_of_the_weights_is_told(appliance: Appliance) -> None:
    """Status, metric and a request's span have the same word, which is a form that a processor can have."""
    form = appliance.status()["models"][0]["engine"]["weights"]
    assert form in {one.word for one in (WeightForm.FLOAT32, WeightForm.BF16, WeightForm.COMPRESSED, WeightForm.INT8)}
    answer = appliance.openai().completions.create(model="athanor-mini", prompt="The furnace", max_tokens=2)
    with httpx.Client(base_url=appliance.ready["admin"], timeout=10, verify=PLAIN) as admin:
        deadline, trace = time.monotonic() + START_TIMEOUT_S, f"/traces/{answer.id}"
        while "spans" not in (found := admin.get(trace).json()):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        assert found["spans"][1]["attributes"]["athanor.weights.form"] == form
        while not (
            lines := [one for one in admin.get("/metrics").text.splitlines() if "athanor_model_weights{" in one]
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert len(lines) == 1
    assert f'"{form}"' in lines[0]
    assert lines[0].endswith(" 1.0")
