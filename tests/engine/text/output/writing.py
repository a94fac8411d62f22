"""Outputs as the chat templates of the models write them, and small tokenizers in which to spell them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.text.output.format import OutputFormat
from engine.text.output.spelling import Spelling
from engine.text.token_bytes import Words, build_tokenizer
from tests.engine.text.output.reading import BY_NAME

Call = tuple[str, Mapping[str, Any]]

THINKING = ("<think>", "</think>")

_MERGED = (b'{"', b'"}', b'": ', b'", "', b"</", b">\n", b"\n\n", b"ab", b'"\n', b"]}", b'">')
"""Tokens of several bytes, which lie across the parts of a grammar."""

_SPECIAL = {"tagged": ("<tool_call>", "</tool_call>"), "dsml": ("｜DSML｜",), "dsml-v4": ("｜DSML｜",)}
"""Format -> its special tokens where they are not all of its markers."""


@dataclass(frozen=True)
class Spelt:
    """A tokenizer of single bytes and a few more tokens, with one format's markers."""

    words: Words
    tokenizer: Any
    special: Mapping[str, int]

    def ids(self, text: str) -> list[int]:
        """Cut a text into special tokens and bytes."""
        if not self.special:
            return list(text.encode())
        pieces = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text)
        return [
            token for piece in pieces for token in ([self.special[piece]] if piece in self.special else piece.encode())
        ]

    def text(self, ids: Sequence[int]) -> str:
        """Put tokens together."""
        by_id = {number: text.encode() for text, number in self.special.items()}
        return b"".join(by_id.get(token, self.words.entries[token]) for token in ids).decode("utf-8", "replace")


@cache
def spelt(name: str, *, special: bool, thinking: bool = False) -> Spelt:
    """Return a tokenizer for the format; ``special``: its markers are special tokens."""
    form = OutputFormat(BY_NAME[name], THINKING if thinking else None)
    texts = (*_SPECIAL.get(name, BY_NAME[name].markers), *THINKING) if special else ()
    entries = [bytes([byte]) for byte in range(256)] + list(_MERGED)
    ids = {text: len(entries) + number for number, text in enumerate(sorted(texts, key=len, reverse=True))}
    entries += [b""] * len(ids)
    words = Words(entries, lambda text: list(text.encode()), form, Spelling(form.markers, ids))
    return Spelt(words, build_tokenizer(words), ids)


def write(name: str, calls: Sequence[Call]) -> str:
    """Return the calls as the format's chat template writes them."""
    return _WRITERS[name](calls)


def _object(call: Call, member: str = "arguments") -> str:
    return json.dumps({"name": call[0], member: call[1]}, ensure_ascii=False)


def _json(call: Call) -> str:
    return json.dumps(call[1], ensure_ascii=False)


def _tag_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tagged(call: Call) -> str:
    arguments = "".join(f"<parameter={key}>\n{_tag_value(one)}\n</parameter>\n" for key, one in call[1].items())
    return f"<tool_call>\n<function={call[0]}>\n{arguments}</function>\n</tool_call>"


def _glm(line: str, call: Call) -> str:
    arguments = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{_tag_value(one)}</arg_value>{line}" for key, one in call[1].items()
    )
    return f"<tool_call>{call[0]}{line}{arguments}</tool_call>"


def _dsml(section: str, calls: Sequence[Call]) -> str:
    invokes = ""
    for name, arguments in calls:
        invokes += f'<｜DSML｜invoke name="{name}">\n'
        for key, one in arguments.items():
            kind = "true" if isinstance(one, str) else "false"
            invokes += f'<｜DSML｜parameter name="{key}" string="{kind}">{_tag_value(one)}</｜DSML｜parameter>\n'
        invokes += "</｜DSML｜invoke>\n"
    return f"<｜DSML｜{section}>\n{invokes}</｜DSML｜{section}>"


def _gemma_value(quote: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(quote, one) for one in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(quote, one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def _python_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_python_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_python_value(one)}" for key, one in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _python(calls: Sequence[Call]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={_python_value(one)}' for key, one in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(written)}]"


def _each(separator: str, one: Callable[[Call], str]) -> Callable[[Sequence[Call]], str]:
    return lambda calls: separator.join(map(one, calls))


_DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"

_WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": _each("\n", lambda call: f"<tool_call>\n{_object(call)}\n</tool_call>"),
    "llama3": _each("; ", lambda call: _object(call, "parameters")),
    "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(map(_object, calls))}]",
    "mistral-named": _each("", lambda call: f"[TOOL_CALLS]{call[0]}[ARGS]{_json(call)}"),
    "deepseek": lambda calls: _DEEPSEEK.format(
        "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n{_json(call)}\n```<｜tool▁call▁end｜>"
            for call in calls
        )
    ),
    "deepseek-bare": lambda calls: _DEEPSEEK.format(
        "".join(f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{_json(call)}<｜tool▁call▁end｜>" for call in calls)
    ),
    "kimi": lambda calls: "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>".format(
        "".join(
            f"<|tool_call_begin|>functions.{call[0]}:{at}<|tool_call_argument_begin|>{_json(call)}<|tool_call_end|>"
            for at, call in enumerate(calls)
        )
    ),
    "dsml": lambda calls: _dsml("function_calls", calls),
    "dsml-v4": lambda calls: _dsml("tool_calls", calls),
    "tagged": _each("\n", _tagged),
    "glm": _each("\n", lambda call: _glm("\n", call)),
    "gemma-4": _each(
        "", lambda call: "<|tool_call>call:{}{}<tool_call|>".format(call[0], _gemma_value('<|"|>', call[1]))
    ),
    "function-gemma": _each(
        "",
        lambda call: "<start_function_call>call:{}{}<end_function_call>".format(
            call[0], _gemma_value("<escape>", call[1])
        ),
    ),
    "llama-4": _python,
    "lfm2": lambda calls: f"<|tool_call_start|>{_python(calls)}<|tool_call_end|>",
    "harmony": lambda calls: (
        f"<|channel|>commentary to=functions.{calls[0][0]} <|constrain|>json<|message|>{_json(calls[0])}"
    ),
}
