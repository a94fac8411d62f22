"""Outputs of models as they are published, with what a reading finds in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.text.output.tools import Tool, ToolSet
from isolation.ipc.output import Thinking
from tests.engine.text.output.reading import TIME, WEATHER, Read, read_output

HAND_WRITTEN = "hand-written, after the chat template"
VLLM = "vllm-project/vllm/tests/tool_parsers"
VLLM_REASONING = "vllm-project/vllm/tests/reasoning"
SGLANG = "sgl-project/sglang/test/srt/test_function_call_parser.py"
LLAMA_CPP = "ggml-org/llama.cpp/tests/test-chat.cpp"
OLLAMA = "ollama/ollama/model/parsers/lfm2_test.go"
HARMONY_DOCS = "openai/harmony/docs/format.md"
LLAMA_DOCS = "meta-llama/llama-models/models/llama3_3/prompt_format.md"
TRANSFORMERS = "huggingface/transformers/docs/source/en/chat_extras.md"

THINK = ("<think>", "</think>")

_TEXT = {"type": "string"}
_NAMES = """
add multiply get_current_weather get_current_temperature get_age bash special_function python final_answer search
get_db_config get_tourist_attractions searchTool getOpenIncidentsTool complexTool parserTool trending_songs
make_next_step_decision test_function get_current_time send_message foo bar process_html process_data test get_news
generate_file get_location register_user do_something_cool get_candidate_status exec Bash set_temperature
complex_function set_status get_status get-weather weather.get grocery.orderIngredients toggle update score ping
""".split()


def _tool(name: str, **properties: Mapping[str, Any]) -> Tool:
    return Tool(name, {"type": "object", "properties": properties})


_TYPED = (
    WEATHER,
    TIME,
    _tool("get_current_weather", city=_TEXT, state=_TEXT, unit=_TEXT),
    _tool("calculate_area", shape=_TEXT, dimensions={"type": "object"}, precision={"type": "integer"}),
    _tool("send_message", recipient=_TEXT, message=_TEXT, priority=_TEXT),
    _tool("bash", command=_TEXT),
)
TOOLS = ToolSet({tool.name: tool for tool in (*map(Tool, _NAMES), *_TYPED)})
"""Tools of the published outputs; most of them have no schema there."""


@dataclass(frozen=True, slots=True)
class Vector:
    """One output of a model."""

    family: str
    """Name of the format."""
    case: str
    source: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    begun: tuple[str, str] | None = None
    refused: int = 0
    """Number of calls that become content."""
    thinking: tuple[str, str] | None = None
    state: Thinking = Thinking.POSSIBLE
    cut: bool = False
    special: tuple[str, ...] = ()
    """Texts that are special tokens of the model."""

    def __str__(self) -> str:
        return f"{self.family}: {self.case}"


def check(vector: Vector) -> None:
    """Read the output of a vector, in pieces of several sizes, and compare."""
    found = read_output(
        vector.family,
        vector.text,
        tools=TOOLS,
        thinking=vector.thinking,
        state=vector.state,
        cut=vector.cut,
        special=vector.special,
    )
    assert len(found.refused) == vector.refused, found
    assert found == Read(vector.content, vector.reasoning, list(vector.calls), vector.begun, found.refused)
