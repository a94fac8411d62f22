"""Dialogues with tools: how they are written in the chat format, and seeded examples to train on.

The form is the one that Hermes and Qwen models use, so that one parser reads them all. The system message ends with a
line of JSON for each tool; a call is JSON between `<tool_call>` and `</tool_call>`; a result is a message of the role
`tool`. `bpe.CHAT_TEMPLATE` renders the same:

    <|im_start|>system
    Tools:
    {"name": "get_status", "description": "...", "parameters": {...}}<|im_end|>
    <|im_start|>user
    Is everything up?<|im_end|>
    <|im_start|>assistant
    <tool_call>
    {"name": "get_status", "arguments": {}}
    </tool_call><|im_end|>
    <|im_start|>tool
    {"alerts": [], "models": [{"name": "athanor-mini", "state": "ready"}]}<|im_end|>
    <|im_start|>assistant
    No alerts. athanor-mini is ready.<|im_end|>

Four abilities are trained: choose a tool, fill its arguments with what the question says, answer from the result, and
answer without a tool where none is needed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.corpus import expand

CALL_START, CALL_END = "<tool_call>\n", "\n</tool_call>"
HEADING = "Tools:"

_ASK_STATUS = (
    "is {everything|the service|it|the appliance} {up|running|fine|ok|healthy} {now|right now|}?",
    "{check|get|look up|show me} the status {now|please|of my appliance|}",
    "how is {my appliance|the service|the machine} doing {right now|at the moment}?",
    "are there {any|some|current} alerts {now|at the moment|on my appliance}?",
    "is {athanor-mini|the model|my model} ready {now|already|at the moment}?",
)
_ASK_DENIAL = (
    "why was request {ID} {denied|refused|rejected}?",
    "{explain|look up} the {denial|refusal} of {ID}",
    "request {ID} was {denied|refused}, {why|what is the reason|which rule was it}?",
    "which rule {refused|denied|stopped} {ID}?",
    "{a client|tenant beta|my user} got an error for {ID}, {explain it|why|find out the reason}",
)
_RULES = ("models", "limits.requests_per_minute", "limits.tokens_per_minute", "limits.concurrency", "credentials")
_REASONS = ("MODEL_NOT_ALLOWED", "RATE_LIMITED", "CONCURRENCY", "CONTEXT_TOO_LONG", "INVALID_KEY")
_TENANTS = ("alpha", "beta", "gamma", "acme", "web", "nightly", "clinic", "search")
_MODELS = ("athanor-mini", "llama", "qwen3-8b", "chat", "vectors")
_STATES = ("ready", "booting", "restarting", "failed", "frozen")
_ALERTS = ("the disk is nearly full", "a sandbox died", "the certificate ends soon", "requests wait for their turn")
_NAMES = ("get", "find", "read", "list", "lookup", "fetch")
_THINGS = ("weather", "ticket", "user", "order", "file", "price", "train", "room", "invoice", "host")
_ARGUMENTS = {"weather": "city", "train": "city", "file": "path", "host": "name"}
_VALUES = ("berlin", "oslo", "report.txt", "a17", "node-3", "4711", "x9", "lisbon", "blue", "kate")


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation with its tools, in OpenAI's form.

    The arguments of calls are objects, not JSON as text; what the assistant says is trained on.
    """

    tools: tuple[Mapping[str, Any], ...]
    messages: tuple[Mapping[str, Any], ...]


def system_text(tools: Sequence[Mapping[str, Any]], prompt: str = "") -> str:
    """Content of the system message that offers `tools`, after the caller's own `prompt`."""
    lines = [HEADING, *(dump(tool["function"]) for tool in tools)]
    return (f"{prompt}\n\n" if prompt else "") + "\n".join(lines)


def content(message: Mapping[str, Any]) -> str:
    """Content of a message as the chat format has it, its calls included."""
    calls = [
        CALL_START + dump({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}) + CALL_END
        for call in message.get("tool_calls", ())
    ]
    return "\n".join([text for text in (message.get("content") or "",) if text] + calls)


def dump(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def draw(rng: random.Random, asked: tuple[str, str]) -> Dialogue:
    """One dialogue; `asked` is a question of the help desk with its answer, for one that needs no tool."""
    kind = rng.random()
    if kind < 0.30:
        return _status(rng)
    if kind < 0.60:
        return _denial(rng)
    if kind < 0.80:
        return _other(rng)
    question, answer = asked
    offered = _offer(rng, (_STATUS, _DENIAL))
    return Dialogue(offered, ({"role": "user", "content": question}, {"role": "assistant", "content": answer}))


def _tool(name: str, description: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    """A tool in OpenAI's form; all its arguments are texts and required."""
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_STATUS = _tool("get_status", "State of the appliance: models and alerts.", {})
_DENIAL = _tool("explain_denial", "Why a request was refused.", {"request_id": "Id of the request."})


def _status(rng: random.Random) -> Dialogue:
    """A question about the state, answered from get_status."""
    models = [
        {"name": name, "state": _mostly(rng, "ready", _STATES)} for name in rng.sample(_MODELS, rng.randint(1, 2))
    ]
    alerts = rng.sample(_ALERTS, rng.choice((0, 0, 1, 2)))
    said = "No alerts." if not alerts else f"{len(alerts)} alert{'s' * (len(alerts) > 1)}: {'; '.join(alerts)}."
    said += " " + " ".join(f"{model['name']} is {model['state']}." for model in models)
    return _called(rng, _STATUS, {}, _ASK_STATUS, {"alerts": alerts, "models": models}, said)


def _denial(rng: random.Random) -> Dialogue:
    """A question about a refusal, answered from explain_denial."""
    wanted = "".join(rng.choice("0123456789abcdef") for _ in range(rng.choice((6, 6, 8, 10))))
    wanted = rng.choice(("", "", "chatcmpl-", "req-")) + wanted
    found = {"request_id": wanted, "tenant": rng.choice(_TENANTS), "rule": rng.choice(_RULES)}
    found["reason"] = rng.choice(_REASONS)
    said = f"{wanted} of tenant {found['tenant']} was refused by the rule {found['rule']}: {found['reason']}."
    asked = tuple(text.replace("{ID}", wanted) for text in _ASK_DENIAL)
    return _called(rng, _DENIAL, {"request_id": wanted}, asked, found, said)


def _other(rng: random.Random) -> Dialogue:
    """A question for a tool that is nowhere else, so that names and arguments are read and not remembered."""
    verb, thing, value = rng.choice(_NAMES), rng.choice(_THINGS), rng.choice(_VALUES)
    argument = _ARGUMENTS.get(thing, "id")
    tool = _tool(f"{verb}_{thing}", f"{verb} a {thing}".capitalize() + ".", {argument: f"The {argument}."})
    found = {"result": f"{rng.choice(_VALUES)} {rng.randint(1, 99)}"}
    asked = (f"{verb} the {thing} {value}", f"{{please|now|}} {verb} {{a|the}} {thing}: {value}", f"{thing} {value}?")
    return _called(rng, tool, {argument: value}, asked, found, f"The {thing} {value}: {found['result']}.")


def _called(
    rng: random.Random,
    tool: Mapping[str, Any],
    arguments: Mapping[str, str],
    asked: Sequence[str],
    found: Mapping[str, Any],
    said: str,
) -> Dialogue:
    """A question, the call, its result and the answer."""
    question = expand(rng.choice(asked), rng)
    call = {"type": "function", "function": {"name": tool["function"]["name"], "arguments": dict(arguments)}}
    return Dialogue(
        _offer(rng, (tool,)),
        (
            {"role": "user", "content": question[:1].upper() + question[1:] if rng.random() < 0.5 else question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": dump(found)},
            {"role": "assistant", "content": said},
        ),
    )


def _offer(rng: random.Random, needed: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The needed tools among up to two others, in any order."""
    names = {tool["function"]["name"] for tool in needed}
    others = [tool for tool in (_STATUS, _DENIAL) if tool["function"]["name"] not in names]
    verb, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    if f"{verb}_{thing}" not in names:
        others.append(_tool(f"{verb}_{thing}", f"{verb} a {thing}".capitalize() + ".", {"id": "The id."}))
    offered = [*needed, *rng.sample(others, rng.randint(0, min(2, len(others))))]
    rng.shuffle(offered)
    return tuple(offered)


def _mostly(rng: random.Random, usual: str, others: Sequence[str]) -> str:
    return usual if rng.random() < 0.6 else rng.choice(others)
