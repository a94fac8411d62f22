"""The format of a model's outputs, told from the literals of its chat template.

A template writes earlier calls and reasoning as the model was trained to write them, so what it spells is the format. A
model whose template spells none has no calls and no reasoning here.
"""

from __future__ import annotations

from engine.text.output.format import CallFormat, OutputFormat
from engine.text.output.formats.deepseek import DEEPSEEK, DEEPSEEK_BARE
from engine.text.output.formats.dsml import DSML, DSML_V4
from engine.text.output.formats.gemma import FUNCTION_GEMMA, GEMMA_4
from engine.text.output.formats.glm import GLM
from engine.text.output.formats.harmony import HARMONY
from engine.text.output.formats.hermes import HERMES
from engine.text.output.formats.kimi import KIMI
from engine.text.output.formats.llama3 import LLAMA3
from engine.text.output.formats.mistral import MISTRAL, MISTRAL_NAMED
from engine.text.output.formats.pythonic import LFM2, LLAMA_4
from engine.text.output.formats.tagged import TAGGED

FORMATS = (
    HARMONY,
    GEMMA_4,
    FUNCTION_GEMMA,
    KIMI,
    DSML,
    DSML_V4,
    DEEPSEEK,
    DEEPSEEK_BARE,
    MISTRAL_NAMED,
    MISTRAL,
    LFM2,
    LLAMA_4,
    TAGGED,
    GLM,
    HERMES,
    LLAMA3,
)
"""All formats of calls."""

_SIGNS: tuple[tuple[CallFormat, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    (GEMMA_4, ("<|tool_call>call:",)),
    (FUNCTION_GEMMA, ("<start_function_call>",)),
    (KIMI, ("<|tool_call_begin|>",)),
    (DSML, ("｜DSML｜", "function_calls>")),
    (DSML_V4, ("｜DSML｜", "tool_calls>")),
    (DEEPSEEK, ("<｜tool▁call▁begin｜>", "```json")),
    (DEEPSEEK_BARE, ("<｜tool▁call▁begin｜>",)),
    (MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (LFM2, ("<|tool_call_start|>",)),
    (LLAMA_4, ("<|python_start|>",)),
    (TAGGED, ("<tool_call>", "<function=")),
    (GLM, ("<tool_call>", "<arg_key>")),
    (HERMES, ("<tool_call>", '"arguments"')),
    (LLAMA3, ("<|start_header_id|>", '{"name": "', '"parameters": ')),
)
"""Format -> texts that all stand in its templates; the first that fits is the model's."""

_THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
    ("◁think▷", "◁/think▷"),
)


def find_format(literals: str, *, takes_tools: bool) -> OutputFormat:
    """Return the format of a model.

    Args:
        literals: all texts that its chat templates spell.
        takes_tools: whether its templates have a place for tools; without it the model has no calls.
    """
    calls = next((form for form, signs in _SIGNS if all(sign in literals for sign in signs)), None)
    if not takes_tools and (calls is None or not calls.reads_thinking):
        calls = None
    thinking = next((marks for marks in _THINKING if marks[0] in literals and marks[1] in literals), None)
    return OutputFormat(calls, None if calls is not None and calls.reads_thinking else thinking)
