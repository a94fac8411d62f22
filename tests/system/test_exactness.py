"""A real trained Llama out of a real sandbox gives exactly the ids that another implementation computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from appliance.gateway.grpc.generated import inference_pb2, inference_pb2_grpc
from appliance.operator import kernels
from tests.compiled_kernels import compiled
from tests.system.conftest import Appliance, running

pytestmark = [pytest.mark.runsc, pytest.mark.full]
"""`make test` has this model's ids on both backends (tests/engine/backends/test_exact_ids.py), and an appliance's
answers that were computed elsewhere (tests/system/test_first_light.py)."""

MODEL = "stories260K-hf"
VARIANTS = ["gvisor", "gvisor, compiled kernels", "unsafe"]


@pytest.fixture(scope="module")
def cases(shared_data: Path) -> list[dict[str, Any]]:
    """Prompts with their greedy ids."""
    loaded = json.loads((shared_data / "expected" / "greedy_fp32.json").read_text())
    return list(loaded["stories260K"])


@pytest.fixture(scope="module", params=VARIANTS)
def stories(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_data: Path, runsc_path: Path
) -> Iterator[Appliance]:
    """A demo that serves the trained model beside the embedded one, with and without a sandbox or compiled kernels."""
    arguments = ["--model", str(shared_data / "models" / MODEL)]
    if request.param == "unsafe":
        arguments.append("--unsafe-no-sandbox")
    on_kernels = "kernels" in request.param
    made = compiled(request.config, tmp_path_factory) if on_kernels else None
    if made is not None and made != kernels.installed():
        folder = tmp_path_factory.mktemp("kernels") / "native"
        shutil.copytree(made, folder)
        arguments += ["--kernels", str(folder)]
    with running(tmp_path_factory.mktemp("stories") / "state", *arguments) as started:
        assert started.ready["models"] == ["athanor-mini", MODEL]
        assert started.ready["sandbox"] == ("unsafe/none" if request.param == "unsafe" else "gvisor/systrap")
        said = "engine computes with compiled kernels" in started.log.read_text()
        assert said or not on_kernels, started.tail()
        yield started


def greedy(appliance: Appliance, tenant: str, case: dict[str, Any]) -> list[int]:
    """The output ids for one prompt."""
    with grpc.insecure_channel(appliance.ready["grpc"]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(
            model=MODEL,
            token_ids=inference_pb2.TokenIds(ids=case["prompt_ids"]),
            max_output_tokens=len(case["greedy_ids"]),
            sampling=inference_pb2.Sampling(temperature=0.0),
            ignore_eos=True,
        )
        identity = (("authorization", f"Bearer {appliance.key(tenant)}"),)
        events = list(stub.Generate(request, metadata=identity, timeout=60))
    return [token for event in events if event.WhichOneof("event") == "delta" for token in event.delta.token_ids]


def test_alone_every_prompt_gives_its_ids(stories: Appliance, cases: list[dict[str, Any]]) -> None:
    """One after the other."""
    for case in cases:
        assert greedy(stories, "alpha", case) == case["greedy_ids"], case["prompt"]


def test_in_a_mixed_batch_of_sixteen_too(stories: Appliance, cases: list[dict[str, Any]]) -> None:
    """Sixteen at once, of both tenants and all prompts."""
    mixed = [cases[index % len(cases)] for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        tenants = ["alpha", "beta"] * 8
        got = list(pool.map(lambda pair: greedy(stories, *pair), zip(tenants, mixed, strict=True)))
    assert got == [case["greedy_ids"] for case in mixed]


def test_text_in_gives_the_same_ids_as_token_ids_in(stories: Appliance, cases: list[dict[str, Any]]) -> None:
    """The tokenizer in the text sandbox gives the published prompt ids."""
    client = stories.openai()
    for case in cases:
        if not case["prompt"]:
            continue
        answer = client.completions.create(model=MODEL, prompt=case["prompt"], max_tokens=1, temperature=0)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(case["prompt_ids"])
