"""What ``athanor demo`` prints when it is ready: where it listens, the keys, and what to paste.

Commands are printed as one logical line each, however long, so that a paste is what was printed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from appliance.common.status import is_unsafe
from appliance.operator.cli.admin_client import default_admin
from appliance.operator.cli.console import PAGE
from appliance.operator.cli.status_view import unsafe_warning

if TYPE_CHECKING:
    from appliance.operator.demo import DemoReady

QUESTIONS = ("What is Athanor?", "What is a sandbox?")
"""Two that the embedded model can answer."""


def print_banner(console: Console, ready: DemoReady, program: str = "athanor") -> None:
    """Print it; lines of the commands are never wrapped or indented. ``program`` is how the reader
    calls this command.
    """
    where = ready.addresses
    tenant, key = next(iter(ready.api_keys.items()))
    console.print()
    if is_unsafe(where.sandbox):
        console.print(unsafe_warning(console.width), "\n")
    console.print(
        Text.assemble(
            ("athanor is ready", "bold green"), f"   {', '.join(where.models)}", (f"   in {where.sandbox}", "dim")
        )
    )
    console.print()
    facts = {"OpenAI API": f"{where.http}/v1", "gRPC": where.grpc, "admin": where.admin}
    facts |= {"console": f"{where.admin}{PAGE}"}
    facts |= {f"key of {name}": plain for name, plain in ready.api_keys.items()}
    facts["keys and policy"] = str(ready.state_dir)
    facts["image"] = "none: sandboxes see this Python, read-only (docs/images.md)"
    width = max(map(len, facts))
    for name, value in facts.items():
        line = Text.assemble((f"  {name:<{width}}   ", "dim"), value)
        console.print(line, soft_wrap=True)
    _paste(console, f"Ask it as tenant {tenant}:", curl(where.http, key, where.models[0]))
    _paste(console, "With any OpenAI client:", python(where.http, key, where.models[0]))
    _paste(console, "See what happened:", traces(where.admin, program))
    console.print("\nctrl-c stops it", style="dim")
    console.print()


def curl(http: str, key: str, model: str) -> str:
    """A chat completion by curl, ready to paste into a shell."""
    return "\n".join(
        [
            f"curl -s {http}/v1/chat/completions \\",
            f"  -H 'authorization: Bearer {key}' \\",
            "  -H 'content-type: application/json' \\",
            f"  -d '{json.dumps({'model': model, 'messages': _messages(QUESTIONS[0]), 'temperature': 0})}'",
        ]
    )


def python(http: str, key: str, model: str) -> str:
    """Example request through the official Python client, which reads its settings from the environment; so do most
    other clients."""
    call = f'create(model="{model}", messages={json.dumps(_messages(QUESTIONS[1]))}, temperature=0)'
    return "\n".join(
        [
            f"export OPENAI_BASE_URL={http}/v1 \\",
            f"  OPENAI_API_KEY={key}",
            "python3 -c 'import openai",
            f"answer = openai.chat.completions.{call}",
            "print(answer.choices[0].message.content)'",
        ]
    )


def traces(admin: str, program: str) -> str:
    """The command that lists the last requests of this appliance."""
    return f"{program} traces" if admin == default_admin() else f"{program} traces --admin {admin}"


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _paste(console: Console, title: str, command: str) -> None:
    console.print(f"\n{title}\n", style="bold")
    console.print(Text(command, "cyan"), soft_wrap=True)
