"""Formats of published models, told from their chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.text.output.detect import find_format
from engine.text.template import parse_template

THINK = ("<think>", "</think>")
GEMMA_THOUGHT = ("<|channel>thought\n", "<channel|>")

TEMPLATES: dict[str, tuple[str | None, tuple[str, str] | None]] = {
    "Apertus-8B-Instruct": (None, None),
    "Bielik-11B-v3.0-Instruct": ("hermes", THINK),
    "Cohere2MoE": (None, None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (None, None),
    "GLM-4.7-Flash": ("glm", THINK),
    "GigaChat3.1-10B-A1.8B": (None, None),
    "Kimi-K2-Instruct": ("kimi", None),
    "Kimi-K3": (None, None),
    "LFM2.5-8B-A1B": ("lfm2", THINK),
    "MiniMax-M1": (None, None),
    "MiniMax-M3": (None, None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("tagged", THINK),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", THINK),
    "Qwen-Qwen3-0.6B": ("hermes", THINK),
    "Qwen3.5-4B": ("tagged", THINK),
    "Reka-Edge": ("hermes", THINK),
    "StepFun3.5-Flash": ("tagged", THINK),
    # It writes calls and takes no tools.
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (None, THINK),
    "deepseek-ai-DeepSeek-V3.2": ("dsml", THINK),
    "deepseek-ai-DeepSeek-V4": ("dsml-v4", THINK),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it": ("gemma-4", GEMMA_THOUGHT),
    "ibm-granite-granite-4.0": ("hermes", None),
    "inclusionai-ling-3.0-flash": ("glm", THINK),
    "llama-cpp-rwkv-world": (None, THINK),
    "meetkai-functionary-medium-v3.2": (None, None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "muse-glimmer": (None, None),
    "openbmb-MiniCPM5-1B": (None, THINK),
    "poolside-Laguna-XS-2.1": ("glm", THINK),
    # It puts its markers together from parts.
    "tencent-Hy3": (None, None),
    "unsloth-mistral-Devstral-Small-2507": ("mistral-named", None),
}
"""Template -> name of the format of calls, and markers of reasoning."""

LITERALS = {
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.<|message|><|call|>",
    "function-gemma": "<start_function_call>call:<escape><end_function_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>\n```json\n",
    "deepseek-bare": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>",
    "llama-4": '<|python_start|><|python_end|>{"name": "',
}
"""Format -> what the templates of its models spell, for those that have none in the table."""


@pytest.fixture(scope="module")
def templates(shared_data: Path) -> Path:
    """Published chat templates."""
    return shared_data / "templates"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_published_template(templates: Path, name: str) -> None:
    """A template gives the format on which its model was trained, or none where there is no reader for it."""
    parsed = parse_template((templates / f"{name}.jinja").read_text())
    form = find_format(parsed.literals, takes_tools="tools" in parsed.variables)
    assert (form.calls.name if form.calls is not None else None, form.thinking) == TEMPLATES[name]


def test_every_template_is_in_the_table(templates: Path) -> None:
    """The table has a row for each template."""
    assert {path.stem for path in templates.glob("*.jinja")} == TEMPLATES.keys()


@pytest.mark.parametrize(("name", "literals"), LITERALS.items())
def test_a_format_without_a_template(name: str, literals: str) -> None:
    """The literals of a family's templates give its format; without a place for tools only harmony stays, which has
    reasoning of its own."""
    found = find_format(literals, takes_tools=True).calls
    assert found is not None
    assert found.name == name
    without = find_format(literals, takes_tools=False).calls
    assert (without is not None) == (name == "harmony")


def test_markers_of_reasoning_come_in_pairs() -> None:
    """One marker of reasoning alone is none, and harmony has no others than its own."""
    assert find_format("</think>", takes_tools=True).thinking is None
    assert find_format("[THINK] [/THINK]", takes_tools=True).thinking == ("[THINK]", "[/THINK]")
    assert find_format("◁think▷◁/think▷", takes_tools=False).thinking == ("◁think▷", "◁/think▷")
    assert find_format(f"{LITERALS['harmony']}<think></think>", takes_tools=True).thinking is None
