"""Today's clients and agent frameworks use the appliance unchanged: chat, streams, tools and typed answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.torch import load_file, save_file

from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated import inference_pb2_grpc
from tests.clients.programs import CLIENTS, PROGRAMS
from tests.system.conftest import Appliance, begun, running
from tests.system.test_clients_document import blocks, environment
from tests.system.test_grpc_document import Reader
from tests.system.tool_models import make_models

pytestmark = pytest.mark.runsc

CITIES = ("Oslo", "Bonn")
EVEN = 0.05
"""Factor of the scores of a model with random weights: whether another call follows is then nearly a coin's toss."""

SEEDS = 32
"""Seeds among which one gives several calls."""

WITHOUT_TYPE = ("llama_index",)
"""Clients that send no schema with tools: their answer to a tool's result is text."""

SEEDED = ("chat completions", "compatible")
"""APIs whose requests have a seed, so that a stream repeats the whole answer."""


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Appliance]:
    """A demo with two models that have tools. The embedded model's weights make one call and end; random ones, which
    have the name ``several``, make more than one in about every second answer, since their scores are nearly even."""
    folder = tmp_path_factory.mktemp("calling")
    (own,) = make_models(folder, ("hermes",))
    (random,) = make_models(folder / "random", ("hermes",), random=("hermes",))
    weights = load_file(random / "model.safetensors")
    for name in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        weights[name] *= EVEN
    save_file(weights, random / "model.safetensors", metadata={"format": "pt"})
    (random / "model.safetensors").chmod(0o644)
    served = [word for model in (own, random.rename(folder / "several")) for word in ("--model", str(model))]
    with running(folder / "state", *served, *begun()) as started:
        yield started


@pytest.fixture(scope="module")
def found(root: Path, calling: Appliance, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a client's program found, by API; each program runs once."""
    variables = environment(root, calling)

    @cache
    def of(name: str) -> dict[str, dict[str, Any]]:
        return dict(PROGRAMS[name].run_file(variables, tmp_path_factory.mktemp(name)))

    return of


def check_verdict(value: Any) -> None:
    """A typed answer, as each program asks for it."""
    assert isinstance(value["allowed"], bool) and value["because"] in ("yes", "no") and len(value) == 2, value


def with_part(found: dict[str, dict[str, Any]], part: str) -> list[Any]:
    """What the APIs gave for one part of a program; those without it are left out, and one has it."""
    values = [one[part] for one in found.values() if part in one]
    assert values, f"{part} is of no API"
    return values


each_client = pytest.mark.parametrize("name", PROGRAMS)


@pytest.mark.full
@each_client
def test_a_client_chats(found: Any, name: str) -> None:
    """The answer, over each API that the client speaks."""
    for said in [one["chat"] for one in found(name).values() if "chat" in one]:
        assert len(said) > 10, said


@pytest.mark.full
@each_client
def test_a_client_streams(found: Any, name: str) -> None:
    """Pieces that are an answer together; Instructor's are typed answers that grow."""
    if name == "instructor":
        (grown,) = with_part(found(name), "grown")
        assert grown[0] == {"allowed": None, "because": None}
        check_verdict(grown[-1])
        return
    for pieces in with_part(found(name), "stream"):
        assert len("".join(pieces)) > 10, pieces


@pytest.mark.full
@each_client
def test_a_client_calls_tools(found: Any, name: str) -> None:
    """Two calls or more in one message satisfy the tool's schema, the same in a stream with the same seed, and there is
    an answer to their results: of the schema that the request had besides, or text."""
    parts = found(name)
    for api, one in parts.items():
        for calls in [one[part] for part in ("calls", "streamed_calls") if part in one]:
            assert all(call in [{"city": city} for city in CITIES] for call in calls), calls
        if "streamed_calls" in one:
            assert one["streamed_calls"] == one["calls"] if api in SEEDED else one["streamed_calls"]
    assert all(len(calls) > 1 for calls in with_part(parts, "calls"))
    for answer in with_part(parts, "said" if name in WITHOUT_TYPE else "answer"):
        if name in WITHOUT_TYPE:
            assert answer.strip()
        else:
            check_verdict(answer)


@pytest.mark.full
@each_client
def test_a_client_gets_typed_answers(found: Any, name: str) -> None:
    """Of a model without tools, and of an agent that has tools and a type for its answer, where the client has one."""
    for value in with_part(found(name), "structured"):
        check_verdict(value)
    for one in found(name).values():
        if "agent" in one:
            check_verdict(one["agent"])


@pytest.mark.full
@pytest.mark.parametrize("name", CLIENTS)
def test_the_document_s_block_is_answered(root: Path, appliance: Appliance, tmp_path: Path, name: str) -> None:
    """As it stands in docs/clients.md, with the page's variables alone."""
    _, text = blocks(root, "clients.md")[name]
    said = CLIENTS[name].run(text, environment(root, appliance), tmp_path)
    assert "allowed" in said and len(said) > 20, said


@pytest.fixture(scope="module")
def several_calls(calling: Appliance) -> tuple[int, list[str]]:
    """A seed with which the model with random weights makes several calls in one message, and what programs of
    docs/grpc.md print for them: what Python's gRPC client gets for the same request."""
    tool = pb.Tool(name="weather", strict=True)
    city = {"type": "object", "properties": {"city": {"enum": [*CITIES]}}, "required": ["city"]}
    tool.parameters.update({**city, "additionalProperties": False})
    asked = pb.ChatMessage(role=pb.ROLE_USER, content="What is the weather in Oslo and in Bonn?")
    request = pb.GenerateRequest(
        model="several",
        conversation=pb.Conversation(messages=[asked], tools=[tool]),
        tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED),
        max_output_tokens=400,
    )
    key = [("authorization", f"Bearer {calling.key('alpha')}")]
    with grpc.insecure_channel(calling.ready["grpc"]) as channel:
        service = inference_pb2_grpc.InferenceServiceStub(channel)
        for seed in range(1, SEEDS):
            request.sampling.seed = seed
            calls: dict[int, str] = {}
            for event in service.Generate(request, metadata=key, timeout=60):
                for piece in event.delta.tool_calls:
                    begun = calls.get(piece.index, f"{piece.name} ")
                    calls[piece.index] = begun + piece.arguments
            if len(calls) > 1:
                return seed, list(calls.values())
    raise AssertionError("no seed gives several calls")


@pytest.mark.full
@pytest.mark.parametrize("language", ["typescript", "go"])
def test_a_program_of_grpc_calls_tools_and_gets_typed_answers(
    root: Path, calling: Appliance, several_calls: tuple[int, list[str]], tmp_path: Path, language: str
) -> None:
    """``tools.ts`` and ``tools.go`` of docs/grpc.md, with this model and seed: several calls of one message, the answer
    to their results and an answer without tools, each of its schema."""
    seed, expected = several_calls
    text = (root / "docs/grpc.md").read_text().replace('"athanor-mini"', '"several"')
    assert text.count("seed: 1 }") == text.count("uint64(1)") == 1
    text = text.replace("seed: 1 }", f"seed: {seed} }}").replace("uint64(1)", f"uint64({seed})")
    reader = Reader(text, tmp_path, calling.ready["grpc"], calling.key("alpha"))
    printed = reader.typescript("tools.ts") if language == "typescript" else reader.go("tools.go")
    *calls, answer, typed = printed.splitlines()
    assert calls == expected and len(calls) > 1
    for said in (answer, typed):
        check_verdict(json.loads(said))


@pytest.mark.full
def test_a_client_s_errors_are_its_own(found: Any) -> None:
    """LiteLLM tells a model that is not there by the status and form of our error."""
    assert found("litellm")["chat completions"]["refused"] == "NotFoundError"


def test_the_table_names_the_versions_that_are_installed(root: Path) -> None:
    """Each version of docs/clients.md is the one that ``make clients`` installs."""
    pins = "\n".join(path.read_text() for path in sorted((root / "requirements/clients").glob("*.in")))
    pinned = dict(re.findall(r"^([a-z0-9-]+)(?:\[[a-z]+\])?==(\S+)$", pins, re.MULTILINE))
    pinned |= json.loads((root / "tests/clients/node/package.json").read_text())["dependencies"]
    rows = re.findall(r"^\| `([^` ]+) ([0-9.]+)`", (root / "docs/clients.md").read_text(), re.MULTILINE)
    assert len(rows) > 6 and all(pinned.get(name, version) == version for name, version in rows)
    assert {"langchain-openai", "litellm", "instructor", "openai-agents", "ai"} <= {name for name, _ in rows}
