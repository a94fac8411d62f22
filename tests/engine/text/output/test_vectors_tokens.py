"""Published outputs of the families whose calls are JSON between special tokens."""

from __future__ import annotations

import pytest

from isolation.ipc.output import Thinking
from tests.engine.text.output.vectors import (
    HAND_WRITTEN,
    HARMONY_DOCS,
    LLAMA_CPP,
    THINK,
    VLLM,
    VLLM_REASONING,
    Vector,
    check,
)

CALLED = (("special_function", {"arg1": 1}),)

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DEEPSEEK_TOKENS = (_BEGIN, _END, _CALL, _CALL_END, _SEP)
_V3, _V31 = f"{VLLM}/test_deepseekv3_tool_parser.py", f"{VLLM}/test_deepseekv31_tool_parser.py"


def _v3(name: str, arguments: str) -> str:
    return f"{_CALL}function{_SEP}{name}\n```json\n{arguments}\n```{_CALL_END}"


DEEPSEEK = (
    Vector(
        "deepseek",
        "one call",
        _V3,
        f"Let me check the weather for you.{_BEGIN}" + _v3("get_weather", '{"city": "Paris"}') + _END,
        content="Let me check the weather for you.",
        calls=(("get_weather", {"city": "Paris"}),),
        special=_DEEPSEEK_TOKENS,
    ),
    Vector(
        "deepseek",
        "two calls",
        _V3,
        _BEGIN
        + _v3("get_weather", '{"city": "Tokyo", "unit": "celsius"}')
        + _v3("search", '{"location": "Tokyo", "check_in": "2025-01-15"}')
        + _END,
        calls=(
            ("get_weather", {"city": "Tokyo", "unit": "celsius"}),
            ("search", {"location": "Tokyo", "check_in": "2025-01-15"}),
        ),
        special=_DEEPSEEK_TOKENS,
    ),
    Vector(
        "deepseek",
        "all types",
        _V3,
        _BEGIN
        + _v3(
            "test_function",
            '{"string_field": "hello", "int_field": 42, "float_field": 3.14, "bool_field": true, "null_field": null, '
            '"array_field": ["a", "b", "c"], "object_field": {"nested": "value"}, "empty_array": [], '
            '"empty_object": {}}',
        )
        + _END,
        calls=(
            (
                "test_function",
                {
                    "string_field": "hello",
                    "int_field": 42,
                    "float_field": 3.14,
                    "bool_field": True,
                    "null_field": None,
                    "array_field": ["a", "b", "c"],
                    "object_field": {"nested": "value"},
                    "empty_array": [],
                    "empty_object": {},
                },
            ),
        ),
    ),
    Vector(
        "deepseek",
        "empty arguments",
        _V3,
        _BEGIN + _v3("get_current_time", "{}") + _END,
        calls=(("get_current_time", {}),),
    ),
    Vector(
        "deepseek",
        "escapes",
        _V3,
        _BEGIN + _v3("send_message", '{"text": "He said \\"hello\\"", "path": "C:\\\\Users\\\\file"}') + _END,
        calls=(("send_message", {"text": 'He said "hello"', "path": "C:\\Users\\file"}),),
    ),
    Vector(
        "deepseek",
        "no closing brace",
        _V3,
        f'{_BEGIN}{_CALL}function{_SEP}get_weather\n```json\n{{"city": "Tokyo"\n```{_CALL_END}{_END}',
        content=f'{_CALL}function{_SEP}get_weather\n```json\n{{"city": "Tokyo"\n```{_CALL_END}',
        refused=1,
    ),
    Vector(
        "deepseek",
        "reasoning",
        LLAMA_CPP,
        f"<think>I'm\nthinking</think>\n\n{_BEGIN}" + _v3("special_function", '{"arg1": 1}') + _END,
        reasoning="I'm\nthinking",
        calls=CALLED,
        thinking=THINK,
        special=_DEEPSEEK_TOKENS,
    ),
    Vector(
        "deepseek",
        "markers inside reasoning",
        LLAMA_CPP,
        f"I need to remember the correct syntax. It starts with {_BEGIN} and ends with",
        reasoning=f"I need to remember the correct syntax. It starts with {_BEGIN} and ends with",
        thinking=THINK,
        state=Thinking.BEGUN,
        cut=True,
    ),
    Vector(
        "deepseek",
        "reasoning begun by the prompt and by the model",
        f"{VLLM_REASONING}/test_deepseekr1_reasoning_parser.py",
        "<think>This\nThat</think>This is the rest\nThat",
        content="This is the rest\nThat",
        reasoning="This\nThat",
        thinking=THINK,
        state=Thinking.BEGUN,
    ),
    Vector(
        "deepseek-bare",
        "one call",
        _V31,
        f'normal text{_BEGIN}{_CALL}foo{_SEP}{{"x":1}}{_CALL_END}{_END}',
        content="normal text",
        calls=(("foo", {"x": 1}),),
        special=_DEEPSEEK_TOKENS,
    ),
    Vector(
        "deepseek-bare",
        "two calls with text around them",
        _V31,
        f'some prefix text{_BEGIN}{_CALL}foo{_SEP}{{"x":1}}{_CALL_END}{_CALL}bar{_SEP}{{"y":2}}{_CALL_END}{_END}'
        " some suffix text",
        content="some prefix textsome suffix text",
        calls=(("foo", {"x": 1}), ("bar", {"y": 2})),
        special=_DEEPSEEK_TOKENS,
    ),
)

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI, _KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI_TOKENS = (_SECTION, _SECTION_END, _KIMI, _KIMI_ARGUMENTS, _KIMI_END)
_KIMI_VLLM = f"{VLLM}/test_kimi_k2_tool_parser.py"


def _kimi(*calls: tuple[str, str]) -> str:
    spelt = "".join(f"{_KIMI}{name} {_KIMI_ARGUMENTS}{arguments}{_KIMI_END}" for name, arguments in calls)
    return f"{_SECTION}{spelt}{_SECTION_END}"


KIMI = (
    Vector(
        "kimi",
        "two calls",
        _KIMI_VLLM,
        "Compare weather. "
        + _kimi(
            ("functions.get_weather:0", '{"city": "Beijing"}'), ("functions.get_weather:1", '{"city": "Shanghai"}')
        ),
        content="Compare weather.",
        calls=(("get_weather", {"city": "Beijing"}), ("get_weather", {"city": "Shanghai"})),
        special=_KIMI_TOKENS,
    ),
    Vector(
        "kimi",
        "no prefix of the name",
        _KIMI_VLLM,
        "No prefix. " + _kimi(("get_weather:0", '{"city": "Tokyo"}')),
        content="No prefix.",
        calls=(("get_weather", {"city": "Tokyo"}),),
        special=_KIMI_TOKENS,
    ),
    Vector(
        "kimi",
        "no number",
        HAND_WRITTEN,
        f'{_KIMI}get_weather{_KIMI_ARGUMENTS}{{"city":"Tokyo"}}{_KIMI_END}',
        calls=(("get_weather", {"city": "Tokyo"}),),
    ),
    Vector(
        "kimi",
        "tags in a string",
        _KIMI_VLLM,
        _kimi(("functions.process_html:0", '{"html": "<div>content</div>"}')),
        calls=(("process_html", {"html": "<div>content</div>"}),),
    ),
    Vector(
        "kimi",
        "JSON on lines",
        _KIMI_VLLM,
        _kimi(("functions.process_data:0", '{\n  "name": "test",\n  "value": 123\n}')),
        calls=(("process_data", {"name": "test", "value": 123}),),
    ),
    Vector("kimi", "empty arguments", _KIMI_VLLM, _kimi(("functions.test:0", "{}")), calls=(("test", {}),)),
    Vector(
        "kimi",
        "one malformed call and one that is not",
        _KIMI_VLLM,
        _kimi(("functions.test:0", '{"city": "Beijing"'), ("functions.get_weather:1", '{"city": "Shanghai"}')),
        content=f'{_KIMI}functions.test:0 {_KIMI_ARGUMENTS}{{"city": "Beijing"{_KIMI_END}',
        calls=(("get_weather", {"city": "Shanghai"}),),
        refused=1,
    ),
)

_ANALYSIS = "<|channel|>analysis<|message|>"
_HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_THOUGHT = f"{_ANALYSIS}I'm\nthinking<|end|><|start|>assistant"
HARMONY = (
    Vector(
        "harmony",
        "an answer",
        HARMONY_DOCS,
        f'{_ANALYSIS}User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.<|end|>\n'
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        content="2 + 2 = 4.",
        reasoning='User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.',
        special=_HARMONY_TOKENS,
    ),
    Vector(
        "harmony",
        "a call",
        HARMONY_DOCS,
        f"{_ANALYSIS}Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"location":"San Francisco"}<|call|>',
        reasoning="Need to use function get_weather.",
        calls=(("get_weather", {"location": "San Francisco"}),),
        special=_HARMONY_TOKENS,
    ),
    Vector(
        "harmony",
        "a preamble",
        HARMONY_DOCS,
        f"{_ANALYSIS}{{long chain of thought}}<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "**Action plan**:\n1. Generate an HTML file<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.generate_file<|constrain|>"
        'json<|message|>{"template": "basic_html", "path": "index.html"}<|call|>',
        content="**Action plan**:\n1. Generate an HTML file",
        reasoning="{long chain of thought}",
        calls=(("generate_file", {"template": "basic_html", "path": "index.html"}),),
        special=_HARMONY_TOKENS,
    ),
    *(
        Vector(
            "harmony",
            case,
            LLAMA_CPP,
            f'{_THOUGHT}{header}<|message|>{{"arg1": 1}}',
            reasoning="I'm\nthinking",
            calls=CALLED,
            special=_HARMONY_TOKENS,
        )
        for case, header in (
            (
                "a call on the channel for reasoning",
                "<|channel|>analysis to=functions.special_function <|constrain|>json",
            ),
            ("a call without a type", "<|channel|>commentary to=functions.special_function"),
        )
    ),
    Vector(
        "harmony",
        "a recipient in the role",
        "hand-written, after openai/harmony/docs/format.md",
        f'{_THOUGHT} to=functions.special_function<|channel|>commentary json<|message|>{{"arg1": 1}}<|call|>',
        reasoning="I'm\nthinking",
        calls=CALLED,
        special=_HARMONY_TOKENS,
    ),
    Vector(
        "harmony",
        "cut off in a call",
        LLAMA_CPP,
        f'{_THOUGHT}<|channel|>commentary to=functions.special_function <|constrain|>json<|message|>{{"arg1',
        reasoning="I'm\nthinking",
        begun=("special_function", '{"arg1'),
        cut=True,
        special=_HARMONY_TOKENS,
    ),
    Vector(
        "harmony",
        "cut off in a header",
        f"{VLLM_REASONING}/test_gptoss_reasoning_parser.py",
        f"{_THOUGHT}<|channel|>final",
        reasoning="I'm\nthinking",
        cut=True,
        special=_HARMONY_TOKENS,
    ),
    Vector(
        "harmony",
        "two calls",
        "hand-written, after vllm-project/vllm/tests/tool_use/test_openai_tool_parser.py",
        "<|channel|>commentary to=functions.get_current_weather <|constrain|>json<|message|>"
        '{"location": "Tokyo"}<|call|>'
        "<|start|>assistant<|channel|>commentary to=functions.get_location <|constrain|>json<|message|>{}<|call|>",
        calls=(("get_current_weather", {"location": "Tokyo"}), ("get_location", {})),
        special=_HARMONY_TOKENS,
    ),
    Vector(
        "harmony",
        "a tool of another kind",
        "hand-written, after openai/harmony/docs/format.md",
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        content="<|channel|>analysis to=python code<|message|>print(1)",
        refused=1,
        special=_HARMONY_TOKENS,
    ),
    Vector("harmony", "no header", HAND_WRITTEN, "Hello!", content="Hello!", special=_HARMONY_TOKENS),
)


@pytest.mark.parametrize("vector", [*DEEPSEEK, *KIMI, *HARMONY], ids=str)
def test_published_output(vector: Vector) -> None:
    """The reading finds what the output says, however it is cut into pieces."""
    check(vector)
