"""``athanor version``: what exactly is installed, for a report of a problem."""

from __future__ import annotations

import typer

from appliance.common.version import VERSION
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, output, print_data


def version(output_format: Output = Format.TABLE) -> None:
    """Show the version of the appliance and of what it stands on."""
    facts = versions()
    if print_data(facts, output_format):
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3, 0, 0))
    for name, value in facts.items():
        table.add_row(Text(name.replace("_", " "), "dim"), Text(value))
    output().print(table)


def versions() -> dict[str, str]:
    """Name to version of everything that matters in a report."""
    import platform

    from appliance.gateway.telemetry.names import SCHEMA_URL
    from isolation.ipc.messages import PROTOCOL_VERSION

    return {
        "athanor": VERSION,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "wire_protocol": str(PROTOCOL_VERSION),
        "semantic_conventions": SCHEMA_URL.rpartition("/")[2],
    }


def callback(wanted: bool) -> None:
    """``--version``: one line, then the end."""
    if wanted:
        typer.echo(f"athanor {VERSION}")
        raise typer.Exit
