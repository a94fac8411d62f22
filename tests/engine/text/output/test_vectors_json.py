"""Published outputs of the families whose calls are JSON objects with name and arguments, and of Mistral."""

from __future__ import annotations

import pytest

from isolation.ipc.output import Thinking
from tests.engine.text.output.vectors import (
    HAND_WRITTEN,
    LLAMA_CPP,
    LLAMA_DOCS,
    SGLANG,
    THINK,
    TRANSFORMERS,
    VLLM,
    VLLM_REASONING,
    Vector,
    check,
)

CALLED = (("special_function", {"arg1": 1}),)
SF = {"city": "San Francisco", "state": "CA", "unit": "celsius"}

_HERMES_VLLM = f"{VLLM}/test_hermes_tool_parser.py"
HERMES = (
    Vector("hermes", "plain", _HERMES_VLLM, "This is not a tool call.", content="This is not a tool call."),
    Vector(
        "hermes",
        "one call on lines",
        _HERMES_VLLM,
        '<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}}\n</tool_call>',
        calls=(("final_answer", {"trigger": True}),),
    ),
    Vector(
        "hermes",
        "no line breaks",
        _HERMES_VLLM,
        'Sure, let me check the weather.<tool_call>{"name": "get_weather", "arguments": {"city": "NYC"}}</tool_call>',
        content="Sure, let me check the weather.",
        calls=(("get_weather", {"city": "NYC"}),),
    ),
    Vector(
        "hermes",
        "end of the output in place of the tag",
        _HERMES_VLLM,
        '<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}}',
        calls=(("final_answer", {"trigger": True}),),
    ),
    Vector(
        "hermes",
        "no closing brace",
        _HERMES_VLLM,
        '<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}',
        content='<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}',
        refused=1,
    ),
    Vector(
        "hermes",
        "arguments in a string",
        _HERMES_VLLM,
        '<tool_call>\n{"name": "get_db_config", "arguments": "{\\"param\\": \\"max_connections\\"}"}\n</tool_call>',
        calls=(("get_db_config", {"param": "max_connections"}),),
    ),
    Vector(
        "hermes",
        "arguments that are text",
        _HERMES_VLLM,
        '<tool_call>\n{"name": "final_answer", "arguments": "hello"}\n</tool_call>',
        content='<tool_call>\n{"name": "final_answer", "arguments": "hello"}\n</tool_call>',
        refused=1,
    ),
    Vector(
        "hermes",
        "arguments before the name",
        TRANSFORMERS,
        '<tool_call>\n{"arguments": {"location": "Paris, France", "unit": "celsius"}, '
        '"name": "get_current_temperature"}\n</tool_call>',
        calls=(("get_current_temperature", {"location": "Paris, France", "unit": "celsius"}),),
    ),
    Vector(
        "hermes",
        "two calls",
        LLAMA_CPP,
        '<tool_call>\n{"name": "special_function", "arguments": {"arg1": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "python", "arguments": {"code":"print(\'hello\')"}}\n</tool_call>',
        calls=(*CALLED, ("python", {"code": "print('hello')"})),
    ),
    Vector(
        "hermes",
        "reasoning that the prompt has begun",
        LLAMA_CPP,
        'I\'m\nthinking</think>\n<tool_call>{"name": "special_function", "arguments": {"arg1": 1}}</tool_call>',
        reasoning="I'm\nthinking",
        calls=CALLED,
        thinking=THINK,
        state=Thinking.BEGUN,
    ),
    Vector(
        "hermes",
        "a call inside reasoning is none",
        LLAMA_CPP,
        "<think><tool_call>nah uhg</tool_call>",
        reasoning="<tool_call>nah uhg</tool_call>",
        thinking=THINK,
    ),
    Vector(
        "hermes",
        "empty reasoning",
        HAND_WRITTEN,
        "<think>\n\n</think>\n\nHello, world!\nWhat's up?",
        content="Hello, world!\nWhat's up?",
        thinking=THINK,
    ),
    Vector(
        "hermes",
        "escapes",
        LLAMA_CPP,
        '<tool_call>\n{"name": "python", "arguments": {"code":"# This is a program:\\nprint(\'hey\')"}}\n</tool_call>',
        calls=(("python", {"code": "# This is a program:\nprint('hey')"}),),
    ),
    Vector("hermes", "cut off in the marker", HAND_WRITTEN, "Hello <tool", content="Hello <tool", cut=True),
    Vector(
        "hermes",
        "cut off in the closing tag",
        HAND_WRITTEN,
        '<tool_call>\n{"name": "test", "arguments": {}}\n</tool',
        begun=("test", "{}"),
        cut=True,
    ),
)

_LLAMA_VLLM = f"{VLLM}/test_llama3_json_tool_parser.py"
_TAG = "<|python_tag|>"
LLAMA3 = (
    Vector(
        "llama3",
        "Meta's example",
        LLAMA_DOCS,
        f'{_TAG}{{\n    "type": "function",\n    "name": "trending_songs",\n    "parameters": {{\n        "n": "10",\n'
        '        "genre": "all"\n    }\n}',
        calls=(("trending_songs", {"n": "10", "genre": "all"}),),
        special=(_TAG,),
    ),
    Vector(
        "llama3",
        "a built-in tool",
        LLAMA_DOCS,
        f'{_TAG}brave_search.call(query="latest price of 1oz gold")',
        content=f'{_TAG}brave_search.call(query="latest price of 1oz gold")',
        refused=1,
        special=(_TAG,),
    ),
    Vector(
        "llama3",
        "bare call",
        LLAMA_CPP,
        '{"name": "special_function", "parameters": {"arg1": 1}}',
        calls=CALLED,
        special=(_TAG,),
    ),
    Vector(
        "llama3",
        "member arguments",
        _LLAMA_VLLM,
        '{"name": "searchTool", "arguments": {"query": "test"}}',
        calls=(("searchTool", {"query": "test"}),),
    ),
    Vector(
        "llama3",
        "invalid JSON",
        _LLAMA_VLLM,
        '{"name": "searchTool", "parameters": {invalid json}',
        content='{"name": "searchTool", "parameters": {invalid json}',
        refused=1,
    ),
    Vector("llama3", "no name", _LLAMA_VLLM, '{"parameters": {}}', content='{"parameters": {}}', refused=1),
    Vector(
        "llama3",
        "nesting",
        _LLAMA_VLLM,
        '{"name": "complexTool", "parameters": {"level1": {"level2": {"level3": {"level4": {"value": "deep"}}}}}}',
        calls=(("complexTool", {"level1": {"level2": {"level3": {"level4": {"value": "deep"}}}}}),),
    ),
    Vector(
        "llama3",
        "quotes and braces in a string",
        _LLAMA_VLLM,
        '{"name": "parserTool", "parameters": {"text": "He said \\"Hello {world}\\""}}',
        calls=(("parserTool", {"text": 'He said "Hello {world}"'}),),
    ),
    Vector(
        "llama3",
        "text behind a call",
        _LLAMA_VLLM,
        '{"name": "searchTool", "parameters": {"query": "test"}} I used {searchTool} for this.',
        content="I used {searchTool} for this.",
        calls=(("searchTool", {"query": "test"}),),
    ),
    Vector(
        "llama3",
        "text before the tag",
        HAND_WRITTEN,
        f'I look. {_TAG}{{"name": "searchTool", "parameters": {{}}}}',
        content="I look.",
        calls=(("searchTool", {}),),
        special=(_TAG,),
    ),
    Vector(
        "llama3",
        "cut off",
        HAND_WRITTEN,
        '{"name": "searchTool", "parameters": {"query": "te',
        begun=("searchTool", '{"query": "te'),
        cut=True,
    ),
    *(
        Vector(
            "llama3",
            f"two calls with {separator!r} between them",
            _LLAMA_VLLM,
            '{"name": "searchTool", "parameters": {"query": "test1"}}'
            + separator
            + '{"name": "getOpenIncidentsTool", "parameters": {}}',
            calls=(("searchTool", {"query": "test1"}), ("getOpenIncidentsTool", {})),
        )
        for separator in ("; ", ";", ";\n", "\n", " ; ")
    ),
)

_MISTRAL_VLLM = f"{VLLM}/test_mistral_tool_parser.py"
_CALLS = "[TOOL_CALLS]"
_MISTRAL_TOKENS = (_CALLS, "[ARGS]", "[CALL_ID]")
_STEP = "TOOL: Access a weather API\nANSWER: [City Name] - [Weather Conditions]"
MISTRAL = (
    Vector(
        "mistral",
        "one call",
        _MISTRAL_VLLM,
        f'{_CALLS} [{{"name": "get_current_weather", "arguments":{{"city": "San Francisco", "state": "CA", '
        '"unit": "celsius"}}]',
        calls=(("get_current_weather", SF),),
        special=(_CALLS,),
    ),
    Vector(
        "mistral",
        "white space everywhere",
        _MISTRAL_VLLM,
        f'{_CALLS}  [ {{"name":"add" , "arguments" : {{"a": 3, "b": 4}} }} ]',
        calls=(("add", {"a": 3, "b": 4}),),
    ),
    Vector(
        "mistral",
        "a name in arguments before the name",
        _MISTRAL_VLLM,
        f'{_CALLS} [{{"arguments":{{"name": "John Doe"}}, "name": "get_age"}}]',
        calls=(("get_age", {"name": "John Doe"}),),
    ),
    Vector(
        "mistral",
        "two calls",
        _MISTRAL_VLLM,
        f'{_CALLS} [{{"name": "add", "arguments": {{"a": 3.5, "b": 4}}}}, {{"name": "get_current_weather", '
        '"arguments":{"city": "San Francisco", "state": "CA", "unit": "celsius"}}]',
        calls=(("add", {"a": 3.5, "b": 4}), ("get_current_weather", SF)),
    ),
    Vector(
        "mistral",
        "text behind the calls",
        _MISTRAL_VLLM,
        f'Hello{_CALLS} [{{"name": "add", "arguments":{{"a": 1, "b": 2}}}}]\nextra trailing data',
        content="Helloextra trailing data",
        calls=(("add", {"a": 1, "b": 2}),),
    ),
    Vector(
        "mistral", "no JSON", _MISTRAL_VLLM, f"{_CALLS} not json at all", content=f"{_CALLS} not json at all", refused=1
    ),
    Vector(
        "mistral",
        "an id",
        LLAMA_CPP,
        f'{_CALLS}[{{"name": "special_function", "arguments": {{"arg1": 1}}, "id": "123456789"}}]',
        calls=CALLED,
    ),
    Vector(
        "mistral",
        "brackets in a string",
        f"{SGLANG}, shortened",
        f'{_CALLS} [{{"name":"make_next_step_decision", "arguments":{{"decision":"","content":"'
        "TOOL: Access a weather API"
        '\\nANSWER: [City Name] - [Weather Conditions]"}}]',
        calls=(("make_next_step_decision", {"decision": "", "content": _STEP}),),
    ),
)
MISTRAL_NAMED = (
    Vector("mistral-named", "plain", _MISTRAL_VLLM, "This is a test", content="This is a test"),
    Vector(
        "mistral-named",
        "no [ARGS]",
        _MISTRAL_VLLM,
        f'{_CALLS}get_current_weather{{"city": "San Francisco", "state": "CA", "unit": "celsius"}}',
        calls=(("get_current_weather", SF),),
        special=_MISTRAL_TOKENS,
    ),
    Vector(
        "mistral-named",
        "two calls",
        _MISTRAL_VLLM,
        f'{_CALLS}add{{"a": 3.5, "b": 4}}{_CALLS}multiply{{"a": 3, "b": 6}}',
        calls=(("add", {"a": 3.5, "b": 4}), ("multiply", {"a": 3, "b": 6})),
        special=_MISTRAL_TOKENS,
    ),
    Vector(
        "mistral-named",
        "text and escapes",
        _MISTRAL_VLLM,
        f'hi{{hi{_CALLS}bash{{"command": "print(\\"hello world!\\")\\nre.compile(r\'{{}}\')"}}',
        content="hi{hi",
        calls=(("bash", {"command": "print(\"hello world!\")\nre.compile(r'{}')"}),),
    ),
    Vector(
        "mistral-named",
        "cut off in a string",
        _MISTRAL_VLLM,
        f'hi{{hi{_CALLS}bash{{"command": "print(\\"hello world!\\")\\nre.compile(r\'{{}}\')',
        content="hi{hi",
        begun=("bash", '{"command": "print(\\"hello world!\\")\\nre.compile(r\'{}\')'),
        cut=True,
    ),
    Vector("mistral-named", "no arguments", _MISTRAL_VLLM, f"{_CALLS}get_time", content=f"{_CALLS}get_time", refused=1),
    Vector(
        "mistral-named",
        "[ARGS] and an id",
        "hand-written, after mistral-common's version 11",
        f'{_CALLS}get_weather[CALL_ID]abcDEF123[ARGS]{{"city": "Zürich"}}',
        calls=(("get_weather", {"city": "Zürich"}),),
        special=_MISTRAL_TOKENS,
    ),
    Vector(
        "mistral-named",
        "reasoning",
        f"{VLLM_REASONING}/test_mistral_reasoning_parser.py",
        "[THINK]This\nThat[/THINK]This is the rest\nThat",
        content="This is the rest\nThat",
        reasoning="This\nThat",
        thinking=("[THINK]", "[/THINK]"),
        special=("[THINK]", "[/THINK]", *_MISTRAL_TOKENS),
    ),
)


@pytest.mark.parametrize("vector", [*HERMES, *LLAMA3, *MISTRAL, *MISTRAL_NAMED], ids=str)
def test_published_output(vector: Vector) -> None:
    """The reading finds what the output says, however it is cut into pieces."""
    check(vector)
