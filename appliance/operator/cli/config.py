"""``athanor config``: every key of the configuration, and the values in force with their origins."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output, Settings
from appliance.operator.cli.terminal import Format, fail, output, print_data, print_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.table import Table

    from appliance.common.config_keys import Key

REFERENCE_EXAMPLES = """
athanor config reference | every key
athanor config reference sandbox.spill | one section
athanor config reference --format markdown | as in docs/reference/configuration.md
"""

SHOW_EXAMPLES = """
athanor config show | what /etc/athanor/athanor.yaml comes to, with defaults
athanor config show --config .athanor/athanor.yaml | the demo's
athanor config show --set sandbox.cores=4 -o json | what `athanor serve` would make of this option
"""


MAX_COLUMNS = 120
"""Longer lines are hard to read, however wide the terminal is."""


class ReferenceFormat(StrEnum):
    """``--format`` of the reference."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


def reference(
    prefix: Annotated[str, typer.Argument(metavar="KEY", help="A key or section; all keys when left out.")] = "",
    output_format: Annotated[
        ReferenceFormat, typer.Option("--format", metavar="FORMAT", help="table, markdown or json.")
    ] = ReferenceFormat.TABLE,
) -> None:
    """Print every key with type, unit, default and meaning.

    A key can be written in the file, as an environment variable (sandbox.cores is
    ATHANOR_SANDBOX__CORES, models[0].name is ATHANOR_MODELS__0__NAME) or as --set KEY=VALUE.
    """
    from appliance.common.config_keys import keys

    wanted = _plain(prefix)
    chosen = [key for name, key in keys().items() if not wanted or f"{_plain(name)}.".startswith(f"{wanted}.")]
    if not chosen:
        fail(exits.REFUSED, f"there is no key {prefix}", "athanor config reference lists all")
    if output_format is ReferenceFormat.JSON:
        print_json([_described(key) for key in chosen])
    elif output_format is ReferenceFormat.MARKDOWN:
        from appliance.operator.reference.configuration import tables

        typer.echo(tables(chosen), nl=False)
    else:
        _print_sections(chosen)


def show(config: Config = DEFAULT_CONFIG, settings: Settings = None, output_format: Output = Format.TABLE) -> None:
    """Print every value in force, and where it comes from.

    Reads the file, then this shell's ATHANOR_ variables, then --set, as `athanor serve` does. A
    value's origin is a place in the file, a variable, an option or its default. A service has the
    environment of its unit: `systemctl show -p Environment athanor-supervisor` prints that.
    """
    from appliance.common.config_loader import resolve

    resolved = resolve(config, settings or ())
    values = resolved.config.model_dump(mode="json")
    if not print_data({"config": values, "origins": dict(resolved.origins)}, output_format):
        output().print(_values(resolved.values(), resolved.origins, str(config)))


def _plain(name: str) -> str:
    """Key without the brackets of lists: models[0].name and models[].name are models.name."""
    return re.sub(r"\[\d*\]", "", name)


def _described(key: Key) -> dict[str, str]:
    return {name: str(getattr(key, name)) for name in ("name", "type", "unit", "default", "meaning")}


def _print_sections(chosen: Iterable[Key]) -> None:
    """Print a table for each section; its keys stand without the section's name."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = output()
    console.width = min(console.width, MAX_COLUMNS)
    sections: dict[str, Table] = {}
    for key in chosen:
        if key.is_section:
            continue
        section, _, name = key.name.rpartition(".")
        if section not in sections:
            sections[section] = table = Table.grid(padding=(0, 3, 0, 0))
            table.add_column(no_wrap=True, min_width=22)
            table.add_column()
        facts = ", ".join(filter(None, (f"{key.type} {key.unit}".strip(), key.default_note)))
        sections[section].add_row(Text(name, "bold"), Text(facts, "dim"))
        sections[section].add_row("", Padding(Text(key.meaning), (0, 0, 1, 0)))
    for section, table in sections.items():
        console.print(Text(f"\n {section or 'at the top'}", "bold cyan"))
        console.print(Padding(table, (0, 0, 0, 3)))


def _values(values: Mapping[str, str], origins: Mapping[str, str], config: str) -> Table:
    """Keys, values and origins; the file is named once, so that an origin in it is LINE:COLUMN."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("KEY", no_wrap=True)
    table.add_column("VALUE", overflow="fold")
    table.add_column("FROM", overflow="fold")
    for name, value in values.items():
        origin = origins[name].replace(f"{config}:", f"{Path(config).name}:")
        style = "dim" if origin == "default" else ""
        table.add_row(Text(name, style), Text(value, style), Text(origin, style))
    return table
