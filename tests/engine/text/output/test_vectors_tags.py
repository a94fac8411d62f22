"""Published outputs of the families that write calls in tags."""

from __future__ import annotations

import pytest

from isolation.ipc.output import Thinking
from tests.engine.text.output.vectors import HAND_WRITTEN, THINK, VLLM, Vector, check

DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
ORLANDO = {"city": "Orlando", "state": "FL", "unit": "fahrenheit"}

_QWEN_VLLM = f"{VLLM}/test_qwen3coder_tool_parser.py"


def _tagged(name: str, **values: str) -> str:
    arguments = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<function={name}>\n{arguments}</function>"


def _framed(name: str, **values: str) -> str:
    return f"<tool_call>\n{_tagged(name, **values)}\n</tool_call>"


TAGGED = (
    Vector(
        "tagged",
        "one call",
        _QWEN_VLLM,
        "Sure! Let me check the weather for you." + _framed("get_current_weather", **DALLAS),
        content="Sure! Let me check the weather for you.",
        calls=(("get_current_weather", DALLAS),),
    ),
    Vector(
        "tagged",
        "two calls",
        _QWEN_VLLM,
        _framed("get_current_weather", **DALLAS) + "\n" + _framed("get_current_weather", **ORLANDO),
        calls=(("get_current_weather", DALLAS), ("get_current_weather", ORLANDO)),
    ),
    Vector(
        "tagged",
        "types of the schema",
        _QWEN_VLLM,
        _framed("calculate_area", shape="rectangle", dimensions='{"width": 10, \n "height": 20}', precision="2"),
        calls=(("calculate_area", {"shape": "rectangle", "dimensions": {"width": 10, "height": 20}, "precision": 2}),),
    ),
    Vector(
        "tagged",
        "no outer tags",
        _QWEN_VLLM,
        _tagged("get_current_weather", city="Dallas", state="TX"),
        calls=(("get_current_weather", {"city": "Dallas", "state": "TX"}),),
    ),
    Vector(
        "tagged",
        "no opening tag",
        HAND_WRITTEN,
        _tagged("get_current_weather", city="Dallas") + "\n</tool_call>",
        calls=(("get_current_weather", {"city": "Dallas"}),),
    ),
    Vector(
        "tagged",
        "text that looks like JSON, tags and quotes",
        HAND_WRITTEN,
        _framed("bash", command='{"a": 1}\n<b>"é\\n"</b>\n'),
        calls=(("bash", {"command": '{"a": 1}\n<b>"é\\n"</b>\n'}),),
    ),
    Vector(
        "tagged",
        "reasoning",
        HAND_WRITTEN,
        "I look it up.\n</think>\n\n" + _framed("get_time"),
        reasoning="I look it up.",
        calls=(("get_time", {}),),
        thinking=THINK,
        state=Thinking.BEGUN,
    ),
    Vector(
        "tagged",
        "an argument twice",
        HAND_WRITTEN,
        "<tool_call>\n<function=bash>\n<parameter=command>\na\n</parameter>\n<parameter=command>\nb\n</parameter>\n",
        content="<tool_call>\n<function=bash>\n<parameter=command>\na\n</parameter>\n<parameter=command>\nb\n"
        "</parameter>\n",
        refused=1,
    ),
)

_GLM_VLLM = f"{VLLM}/test_glm4_moe_tool_parser.py"


def _glm(name: str, **values: str) -> str:
    arguments = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{arguments}</tool_call>"


GLM = (
    Vector(
        "glm",
        "two calls with text before each",
        _GLM_VLLM,
        "I will help you get the weather info.\n\n"
        + _glm("get_weather", city="Beijing", date="2025-08-01")
        + "\n\nmeaningwhile, I will also check the weather in Shanghai.\n\n"
        + _glm("get_weather", city="Shanghai", date="2025-08-01"),
        content="I will help you get the weather info.meaningwhile, I will also check the weather in Shanghai.",
        calls=(
            ("get_weather", {"city": "Beijing", "date": "2025-08-01"}),
            ("get_weather", {"city": "Shanghai", "date": "2025-08-01"}),
        ),
    ),
    Vector(
        "glm",
        "reasoning",
        _GLM_VLLM,
        "<think>I want to get the weather.</think>\n\nI will help you get the weather.\n"
        + _glm("get_weather", city="Beijing", date="2025-08-01"),
        content="I will help you get the weather.",
        reasoning="I want to get the weather.",
        calls=(("get_weather", {"city": "Beijing", "date": "2025-08-01"}),),
        thinking=THINK,
    ),
    Vector(
        "glm",
        "indented tags",
        _GLM_VLLM,
        "<tool_call>get_current_weather\n    <arg_key>city</arg_key>\n    <arg_value>Dallas</arg_value>\n"
        "    <arg_key>state</arg_key>\n    <arg_value>TX</arg_value>\n    </tool_call>",
        calls=(("get_current_weather", {"city": "Dallas", "state": "TX"}),),
    ),
    Vector("glm", "empty arguments", _GLM_VLLM, _glm("get_current_time"), calls=(("get_current_time", {}),)),
    Vector(
        "glm",
        "no line breaks",
        "sgl-project/sglang-jax/test/srt/function_call/test_glm47_detector.py",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Beijing</arg_value></tool_call>",
        calls=(("get_weather", {"city": "Beijing"}),),
    ),
    Vector(
        "glm",
        "types of the schema",
        HAND_WRITTEN,
        _glm("get_weather", city="007", days="3", metric="true", hours="[1, 2]", options='{"ü": null}'),
        calls=(("get_weather", {"city": "007", "days": 3, "metric": True, "hours": [1, 2], "options": {"ü": None}}),),
    ),
    Vector(
        "glm",
        "what JSON does not have is text",
        HAND_WRITTEN,
        _glm("test", a="NaN", b="-Infinity", c="01"),
        calls=(("test", {"a": "NaN", "b": "-Infinity", "c": "01"}),),
    ),
    Vector(
        "glm",
        "an argument without its end",
        _GLM_VLLM,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Seattle</arg_value>\n<arg_key>incomplete_arg\n"
        "<arg_value>value</arg_value>\n</tool_call>",
        content="<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Seattle</arg_value>\n"
        "<arg_key>incomplete_arg\n<arg_value>value</arg_value>\n</tool_call>",
        refused=1,
    ),
    Vector(
        "glm",
        "cut off before the closing tag",
        _GLM_VLLM,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beijing</arg_value>",
        begun=("get_weather", '{"city":"Beijing"'),
        cut=True,
    ),
)

_V32, _V4 = f"{VLLM}/test_deepseekv32_tool_parser.py", f"{VLLM}/test_deepseekv4_tool_parser.py"
_DSML = "｜DSML｜"


def _invoke(name: str, *parameters: tuple[str, str, object]) -> str:
    """``parameters``: name, value and whether it is text."""
    spelt = "".join(
        f'<{_DSML}parameter name="{key}" string="{str(text).lower()}">{value}</{_DSML}parameter>\n'
        for key, value, text in parameters
    )
    return f'<{_DSML}invoke name="{name}">\n{spelt}</{_DSML}invoke>\n'


def _section(*calls: str, name: str = "function_calls") -> str:
    return f"<{_DSML}{name}>\n{''.join(calls)}</{_DSML}{name}>"


DSML = (
    Vector("dsml", "no arguments", _V32, _section(_invoke("get_time")), calls=(("get_time", {}),), special=(_DSML,)),
    Vector(
        "dsml",
        "two calls",
        _V32,
        "Sure, let me check! "
        + _section(_invoke("get_weather", ("location", "SF", True)), _invoke("get_weather", ("location", "NYC", True))),
        content="Sure, let me check!",
        calls=(("get_weather", {"location": "SF"}), ("get_weather", {"location": "NYC"})),
        special=(_DSML,),
    ),
    Vector(
        "dsml",
        "arguments that are no text",
        _V32,
        _section(_invoke("update", ("tags", '["a", "b"]', False), ("meta", '{"k": 1}', False))),
        calls=(("update", {"tags": ["a", "b"], "meta": {"k": 1}}),),
    ),
    Vector(
        "dsml",
        "one JSON object",
        "sgl-project/sglang/python/sglang/srt/function_call/deepseekv32_detector.py",
        _section(f'<{_DSML}invoke name="get_weather">\n{{"city": "Beijing"}}\n</{_DSML}invoke>\n'),
        calls=(("get_weather", {"city": "Beijing"}),),
    ),
    Vector(
        "dsml",
        "a value that is not JSON",
        HAND_WRITTEN,
        _invoke("score", ("value", "high", False)),
        content=_invoke("score", ("value", "high", False)),
        refused=1,
    ),
    Vector(
        "dsml",
        "markers that are spelt as text",
        HAND_WRITTEN,
        _section(_invoke("get_time")).replace(_DSML, "｜DSML|"),
        content=_section(_invoke("get_time")).replace(_DSML, "｜DSML|"),
        special=(_DSML,),
    ),
    Vector(
        "dsml-v4",
        "one call",
        _V4,
        "Let me check. "
        + _section(_invoke("get_weather", ("location", "Beijing", True), ("unit", "celsius", True)), name="tool_calls"),
        content="Let me check.",
        calls=(("get_weather", {"location": "Beijing", "unit": "celsius"}),),
        special=(_DSML,),
    ),
    Vector(
        "dsml-v4",
        "reasoning",
        HAND_WRITTEN,
        "I look.</think>" + _section(_invoke("get_time"), name="tool_calls"),
        reasoning="I look.",
        calls=(("get_time", {}),),
        thinking=THINK,
        state=Thinking.BEGUN,
        special=(_DSML, *THINK),
    ),
)


@pytest.mark.parametrize("vector", [*TAGGED, *GLM, *DSML], ids=str)
def test_published_output(vector: Vector) -> None:
    """The reading finds what the output says, however it is cut into pieces."""
    check(vector)
