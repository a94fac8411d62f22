"""What ``athanor demo`` prints when it is ready: where it listens, the keys, and what to paste.

Commands are printed as one logical line each, however long, so that a paste is what was printed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from appliance.cli.status_view import unsafe_warning
from appliance.status import is_unsafe

if TYPE_CHECKING:
    from appliance.demo import DemoReady

QUESTION = "What is a tenant?"
"""A question that the embedded model knows to answer."""


def print_banner(console: Console, ready: DemoReady) -> None:
    """Print it."""
    where = ready.addresses
    model = where.models[0]
    tenant, key = next(iter(ready.api_keys.items()))
    console.print()
    if is_unsafe(where.sandbox):
        console.print(unsafe_warning(console.width))
        console.print()
    heading = Text.assemble(
        ("athanor is ready", "bold green"),
        f"   {', '.join(where.models)}",
        (f" in {where.sandbox}", "dim"),
    )
    console.print(heading)
    console.print()
    facts = Table.grid(padding=(0, 3, 0, 0))
    facts.add_row(Text("  OpenAI API", "dim"), f"{where.http}/v1")
    facts.add_row(Text("  gRPC", "dim"), where.grpc)
    facts.add_row(Text("  admin", "dim"), Text.assemble(where.admin, ("   metrics, status", "dim")))
    facts.add_row(Text("  state", "dim"), Text(str(ready.state_dir)))
    console.print(facts, soft_wrap=True)
    console.print()
    for name, plain in ready.api_keys.items():
        line = Text.assemble(("  key of ", "dim"), (f"{name:<8}", "bold"), plain)
        console.print(line, soft_wrap=True)
    _command(console, f"Ask it as tenant {tenant}", curl(where.http, key, model))
    _command(console, "or with the official client", python(where.http, key, model))
    _command(console, "and see what happened", traces(where.admin))
    console.print(Text("ctrl-c stops it; keys and policy stay in the state directory", "dim"))
    console.print()


def curl(http: str, key: str, model: str) -> str:
    """A chat completion by curl, ready to paste."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
    return (
        f"curl -s {http}/v1/chat/completions -H 'authorization: Bearer {key}'"
        f" -H 'content-type: application/json' -d '{json.dumps(body)}'"
    )


def python(http: str, key: str, model: str) -> str:
    """The same through the openai package, as a shell command."""
    code = (
        f'import openai; c = openai.OpenAI(base_url="{http}/v1", api_key="{key}"); '
        f'print(c.chat.completions.create(model="{model}", '
        f'messages=[{{"role": "user", "content": "{QUESTION}"}}]).choices[0].message.content)'
    )
    return f"python3 -c '{code}'"


def traces(admin: str) -> str:
    """The command that lists the last requests of this appliance."""
    from appliance.cli.admin_client import DEFAULT_ADMIN

    return "athanor traces" if admin == DEFAULT_ADMIN else f"athanor traces --admin {admin}"


def _command(console: Console, title: str, command: str) -> None:
    console.print()
    console.print(Text(title, "bold"))
    console.print(Text(f"  {command}", "cyan"), soft_wrap=True)
