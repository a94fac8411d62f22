"""The grammar of a whole output that may call tools, in llguidance's dialect of Lark: reasoning, then content or
calls."""

from __future__ import annotations

from engine.errors import RequestRejectedError
from engine.text.output.format import CallFormat, OutputFormat
from engine.text.output.rules import ANY_TEXT, Rules, beginning, escaped, holding, not_beginning
from engine.text.output.spelling import Spelling
from engine.text.output.tools import parse_tools
from isolation.ipc.messages import FailureCode
from isolation.ipc.output import Thinking


def tools_grammar(form: OutputFormat, spelling: Spelling, source: bytes, thinking: Thinking) -> str:
    """Return the grammar of outputs whose calls satisfy the schemas of their tools, and whose answers satisfy theirs,
    where they have one.

    Args:
        form: format of the model.
        spelling: of its markers.
        source: the tools (``engine.text.output.tools``).
        thinking: where the prompt leaves the model's reasoning.

    Raises:
        RequestRejectedError: ``INVALID``, the model has no calls, or they cannot be held to a schema.
        ValueError: what answers follow is no schema.
    """
    calls, tools = form.calls, parse_tools(source)
    if calls is None:
        raise RequestRejectedError(FailureCode.INVALID, "this model's outputs have no calls of tools")
    if not tools.tools:
        raise RequestRejectedError(FailureCode.INVALID, "there is no tool that may be called")
    is_free = not (tools.required or tools.answer is not None or calls.reads_thinking)
    free = _free(form, calls, spelling, thinking) if is_free else None
    rules = Rules(spelling, free)
    calls.rules(rules, tools)
    body = "calls"
    if free is not None:
        rules.add("CONTENT", not_beginning(_content(calls), free))
        body = "(calls | CONTENT)?"
    elif tools.answer is not None and not (tools.required or calls.reads_thinking):
        body = f"(calls | {rules.answer(tools.answer)})"
    rules.add("start", f"{_thought(form, rules, thinking)} {body}")
    return rules.source()


def _thought(form: OutputFormat, rules: Rules, thinking: Thinking) -> str:
    """Add the rules of the reasoning at the beginning of an output; returns a part of a rule."""
    if form.thinking is None or thinking is Thinking.NONE:
        return ""
    begin, end = form.thinking
    rules.add("SPACE", r"/[ \n]{1,4}/")
    thought = f"{rules.any_text('thought', '*', '', end)} SPACE?"
    return thought if thinking is Thinking.BEGUN else f"({rules.text(begin)} {thought})?"


def _free(form: OutputFormat, calls: CallFormat, spelling: Spelling, thinking: Thinking) -> list[str]:
    """Return the patterns with which no text around calls begins: it spells no call, nor begins as reasoning does."""
    patterns = [holding(marker) for marker in calls.begins if not spelling.is_special(marker)]
    if form.thinking is not None and thinking is Thinking.POSSIBLE and not spelling.is_special(form.thinking[0]):
        patterns.append(beginning(form.thinking[0]))
    return patterns


def _content(calls: CallFormat) -> str:
    """Return the pattern of an answer without calls."""
    return rf"/[^\s{escaped(calls.bare)}](?s:.*)/" if calls.bare else ANY_TEXT
