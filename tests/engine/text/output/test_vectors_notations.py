"""Published outputs of the families that write calls in Python or in a notation of their own."""

from __future__ import annotations

import pytest

from isolation.ipc.output import Thinking
from tests.engine.text.output.vectors import (
    HAND_WRITTEN,
    LLAMA_CPP,
    LLAMA_DOCS,
    OLLAMA,
    SGLANG,
    THINK,
    VLLM,
    VLLM_REASONING,
    Vector,
    check,
)

_GEMMA_VLLM, _FUNCTION_VLLM = f"{VLLM}/test_gemma4_tool_parser.py", f"{VLLM}/test_functiongemma_tool_parser.py"
_QUOTE = '<|"|>'
_GEMMA_TOKENS = ("<|tool_call>", "<tool_call|>", _QUOTE)
_CHANNEL = ("<|channel>thought\n", "<channel|>")


def _gemma(body: str) -> str:
    return f"<|tool_call>call:{body}<tool_call|>".replace("'", _QUOTE)


GEMMA = (
    Vector(
        "gemma-4",
        "one call",
        _GEMMA_VLLM,
        "Let me check the weather for you. " + _gemma("get_weather{location:'Paris, France'}"),
        content="Let me check the weather for you.",
        calls=(("get_weather", {"location": "Paris, France"}),),
        special=_GEMMA_TOKENS,
    ),
    Vector(
        "gemma-4",
        "two calls",
        _GEMMA_VLLM,
        _gemma("get_weather{location:'London'}") + _gemma("get_time{location:'London'}"),
        calls=(("get_weather", {"location": "London"}), ("get_time", {"location": "London"})),
        special=_GEMMA_TOKENS,
    ),
    Vector(
        "gemma-4",
        "nesting",
        _GEMMA_VLLM,
        _gemma(
            "complex_function{nested:{inner:'value'},list:['a','b'],outer:{inner:{'3':'new text'}},x:[['a]b','c'],'t']}"
        ),
        calls=(
            (
                "complex_function",
                {
                    "nested": {"inner": "value"},
                    "list": ["a", "b"],
                    "outer": {"inner": {"3": "new text"}},
                    "x": [["a]b", "c"], "t"],
                },
            ),
        ),
        special=_GEMMA_TOKENS,
    ),
    Vector(
        "gemma-4",
        "numbers and words",
        _GEMMA_VLLM,
        _gemma("set_status{is_active:true,count:42,score:3.14,param:null}"),
        calls=(("set_status", {"is_active": True, "count": 42, "score": 3.14, "param": None}),),
    ),
    Vector("gemma-4", "no arguments", _GEMMA_VLLM, _gemma("get_status{}"), calls=(("get_status", {}),)),
    Vector(
        "gemma-4",
        "names with hyphens and points",
        _GEMMA_VLLM,
        _gemma("get-weather{location:'London'}") + _gemma("weather.get{location:'London'}"),
        calls=(("get-weather", {"location": "London"}), ("weather.get", {"location": "London"})),
    ),
    Vector(
        "gemma-4",
        "not complete",
        _GEMMA_VLLM,
        f"<|tool_call>call:get_weather{{location:{_QUOTE}London",
        content=f"<|tool_call>call:get_weather{{location:{_QUOTE}London",
        refused=1,
    ),
    Vector(
        "gemma-4",
        "quotes of JSON, and the quotes' text inside text",
        HAND_WRITTEN,
        '<|tool_call>call:test{a:"x, \\"y\\"",b:[1]}<tool_call|>',
        calls=(("test", {"a": 'x, "y"', "b": [1]}),),
        special=_GEMMA_TOKENS,
    ),
    Vector(
        "gemma-4",
        "reasoning",
        f"{VLLM_REASONING}/test_gemma4_reasoning_parser.py",
        "<|channel>thought\nLine1\nLine2<channel|>Answer",
        content="Answer",
        reasoning="Line1\nLine2",
        thinking=_CHANNEL,
        special=("<|channel>", "<channel|>", *_GEMMA_TOKENS),
    ),
    Vector(
        "function-gemma",
        "two calls",
        _FUNCTION_VLLM,
        "<start_function_call>call:get_weather{location:<escape>London<escape>}<end_function_call>"
        "<start_function_call>call:get_time{timezone:<escape>UTC<escape>}<end_function_call>",
        calls=(("get_weather", {"location": "London"}), ("get_time", {"timezone": "UTC"})),
        special=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    Vector(
        "function-gemma",
        "a number, and text before",
        LLAMA_CPP,
        "Let me check that for you.<start_function_call>call:set_temperature{value:25}<end_function_call>",
        content="Let me check that for you.",
        calls=(("set_temperature", {"value": 25}),),
    ),
)

_LLAMA4_VLLM, _LFM2_VLLM = f"{VLLM}/test_llama4_pythonic_tool_parser.py", f"{VLLM}/test_lfm2_tool_parser.py"
_START, _END = "<|python_start|>", "<|python_end|>"
_LFM2, _LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
_LA = {"city": "LA", "metric": "C"}
_USER = (
    "register_user(name='Doe', age=9, address={'city': 'LA', 'state': 'CA'}, role=None, passed_test=True, "
    "aliases=['John', 'Johnny'])"
)
_REGISTERED = {
    "name": "Doe",
    "age": 9,
    "address": {"city": "LA", "state": "CA"},
    "role": None,
    "passed_test": True,
    "aliases": ["John", "Johnny"],
}
LLAMA_4 = (
    Vector(
        "llama-4",
        "two bare calls",
        LLAMA_DOCS,
        "[get_weather(city='San Francisco', metric='celsius'), get_weather(city='Seattle', metric='celsius')]",
        calls=(
            ("get_weather", {"city": "San Francisco", "metric": "celsius"}),
            ("get_weather", {"city": "Seattle", "metric": "celsius"}),
        ),
        special=(_START, _END),
    ),
    Vector("llama-4", "all types", _LLAMA4_VLLM, f"[{_USER}]", calls=(("register_user", _REGISTERED),)),
    Vector(
        "llama-4",
        "empty arguments",
        _LLAMA4_VLLM,
        f"{_START}[get_weather(city='LA', metric='C'), get_weather(), do_something_cool(steps=[], a={{}})]{_END}",
        calls=(("get_weather", _LA), ("get_weather", {}), ("do_something_cool", {"steps": [], "a": {}})),
        special=(_START, _END),
    ),
    Vector(
        "llama-4",
        "escapes",
        _LLAMA4_VLLM,
        "[get_weather(city='Martha\\'s Vineyard', metric='\\\"cool units\\\"')]",
        calls=(("get_weather", {"city": "Martha's Vineyard", "metric": '"cool units"'}),),
    ),
    Vector(
        "llama-4",
        "text around the tokens",
        SGLANG,
        f"User wants to get the weather in Mars. {_START}[get_weather(location='Mars', unit='celsius')]{_END} "
        "In this way we will get the weather in Mars.",
        content="User wants to get the weather in Mars.In this way we will get the weather in Mars.",
        calls=(("get_weather", {"location": "Mars", "unit": "celsius"}),),
    ),
    Vector(
        "llama-4",
        "JSON",
        _LLAMA4_VLLM,
        '{"type": "function", "name": "Bash", "parameters": {"command": "echo hello", "run_in_background": false}}',
        calls=(("Bash", {"command": "echo hello", "run_in_background": False}),),
    ),
    Vector(
        "llama-4",
        "JSON objects and a comma",
        _LLAMA4_VLLM,
        '{"name": "get_weather", "parameters": {"city": "LA", "metric": "C"}}, '
        '{"name": "register_user", "parameters": {"name": "Doe", "age": 9}}',
        calls=(("get_weather", _LA), ("register_user", {"name": "Doe", "age": 9})),
    ),
    Vector(
        "llama-4",
        "a JSON list",
        _LLAMA4_VLLM,
        '[{"name": "get_weather", "parameters": {"city": "LA", "metric": "C"}}, '
        '{"name": "register_user", "parameters": {"name": "Doe", "age": 9}}]',
        calls=(("get_weather", _LA), ("register_user", {"name": "Doe", "age": 9})),
    ),
    *(
        Vector("llama-4", f"JSON that is no call: {text}", _LLAMA4_VLLM, text, content=text, refused=1)
        for text in ('{"answer": 42, "note": "not a tool call"}', '{"name": "Alice", "age": 30}')
    ),
    Vector("llama-4", "a citation", HAND_WRITTEN, "[1] says so.", content="[1] says so.", refused=1),
    Vector(
        "llama-4",
        "a value that is no literal",
        _LLAMA4_VLLM,
        f"{_START}[test(x=b'z')]",
        content=f"{_START}[test(x=b'z')]",
        refused=1,
    ),
    Vector(
        "llama-4",
        "a number that JSON does not have",
        _LLAMA4_VLLM,
        "[test(x=1e999)]",
        content="[test(x=1e999)]",
        refused=1,
    ),
    Vector(
        "lfm2",
        "one call, and text behind",
        _LFM2_VLLM,
        f"{_LFM2}[get_candidate_status(candidate_id='12345')]{_LFM2_END}\n"
        "Checking the current status of candidate ID 12345.",
        content="Checking the current status of candidate ID 12345.",
        calls=(("get_candidate_status", {"candidate_id": "12345"}),),
        special=(_LFM2, _LFM2_END),
    ),
    Vector(
        "lfm2",
        "a name with points, and white space before the list",
        _LFM2_VLLM,
        f"{_LFM2} [grocery.orderIngredients(ingredientList=[{{'name': 'Lasagna noodles', 'amount': 250}}])]{_LFM2_END}",
        calls=(("grocery.orderIngredients", {"ingredientList": [{"name": "Lasagna noodles", "amount": 250}]}),),
    ),
    Vector(
        "lfm2",
        "brackets and line breaks in text",
        _LFM2_VLLM,
        f"{_LFM2}[exec(command='grep -F \"]\" log.txt'), exec(command='cat << EOF\nprint(1)\nEOF\0')]{_LFM2_END}",
        calls=(("exec", {"command": 'grep -F "]" log.txt'}), ("exec", {"command": "cat << EOF\nprint(1)\nEOF\0"})),
    ),
    Vector("lfm2", "no call", _LFM2_VLLM, f"{_LFM2}[ ]{_LFM2_END}", special=(_LFM2, _LFM2_END)),
    Vector(
        "lfm2",
        "one good call and one that is not",
        _LFM2_VLLM,
        f"{_LFM2}[get_candidate_status(candidate_id='12345'), bar(x=b'z')]{_LFM2_END}",
        content=", bar(x=b'z')]",
        calls=(("get_candidate_status", {"candidate_id": "12345"}),),
        refused=1,
    ),
    Vector(
        "lfm2",
        "JSON",
        OLLAMA,
        f'Getting weather.{_LFM2}{{"name":"get_weather","arguments":{{"location":"北京"}}}}{_LFM2_END}',
        content="Getting weather.",
        calls=(("get_weather", {"location": "北京"}),),
        special=(_LFM2, _LFM2_END),
    ),
    Vector(
        "lfm2",
        "reasoning",
        OLLAMA,
        f"Let me run this command...</think>{_LFM2}[bash(command='ls'),bash(command='pwd')]{_LFM2_END}",
        reasoning="Let me run this command...",
        calls=(("bash", {"command": "ls"}), ("bash", {"command": "pwd"})),
        thinking=THINK,
        state=Thinking.BEGUN,
        special=(_LFM2, _LFM2_END, *THINK),
    ),
    Vector(
        "lfm2",
        "words of JSON and escapes of both kinds",
        HAND_WRITTEN,
        f"{_LFM2}[ping(a=true, b='\\u00fc\\ud83d\\ude00\\x41\\n', c=\"\\U0001F600\")]{_LFM2_END}",
        calls=(("ping", {"a": True, "b": "ü😀A\n", "c": "😀"}),),
    ),
    *(
        Vector(
            "lfm2",
            f"the escape {escape}",
            HAND_WRITTEN,
            f"{_LFM2}[ping(a='{escape}')]",
            content=f"{_LFM2}[ping(a='{escape}')]",
            refused=1,
        )
        for escape in ("\\u-001", "\\ud83d", "\\ud83dx", "\\udc00", "\\U00110000", "\\xg0")
    ),
)


@pytest.mark.parametrize("vector", [*GEMMA, *LLAMA_4], ids=str)
def test_published_output(vector: Vector) -> None:
    """The reading finds what the output says, however it is cut into pieces."""
    check(vector)
