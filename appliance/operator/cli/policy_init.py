"""``athanor policy init`` and ``schema``: a first policy, and the JSON Schema that editors check it by."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from appliance.common.errors import reason_of
from appliance.operator.cli import exits
from appliance.operator.cli.options import DEFAULT_CONFIG, Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

INIT_EXAMPLES = """
athanor policy init | policy.yaml and policy.schema.json in this folder
athanor policy init drafts/new.yaml --tenant acme | with a name of its own
"""

SCHEMA_EXAMPLES = """
athanor policy schema > policy.schema.json | for an editor
athanor policy schema --cases > cases.schema.json | for files of cases
"""

DEFAULT_PATH = Path("policy.yaml")

DEFAULT_TENANT = "alpha"
"""First tenant of a policy where none is named."""


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Policy to write.")] = DEFAULT_PATH,
    tenant: Annotated[str, typer.Option(metavar="ID", help="Its first tenant.")] = DEFAULT_TENANT,
    output_format: Output = Format.TABLE,
) -> None:
    """Write a first policy, and its JSON Schema beside it.

    Comments in it say what can be written. Editors with a YAML language server then complete and check the keys. A
    file that is there is never overwritten.
    """
    from policy.schema import schema_text

    text = first_text(path, tenant)
    schema = schema_beside(path)
    written = _write(schema, schema_text(), keep_equal=True)
    try:
        _write(path, text)
    except typer.Exit:
        if written:
            schema.unlink()
        raise
    if not print_data({"policy": str(path), "schema": str(schema), "tenant": tenant}, output_format):
        _show(path, schema, tenant)


def schema_beside(path: Path) -> Path:
    """Return the path of the JSON Schema of a first policy at a path."""
    from policy.first_policy import SCHEMA_NAME

    return path.with_name(SCHEMA_NAME)


def first_text(path: Path, tenant: str) -> str:
    """Return the text of a first policy of one tenant, whose comments call it ``path``; the command ends where the
    tenant's id is none, or the path is that of the schema."""
    from policy.first_policy import first_policy
    from policy.schema import TENANT_ID

    if not re.fullmatch(TENANT_ID, tenant):
        hint = "lower-case letters, digits and dashes, 63 at most"
        fail(exits.REFUSED, f"{tenant!r} is no tenant id", hint)
    if path == schema_beside(path):
        fail(exits.USAGE, f"{path} is the schema's own name; choose another")
    return first_policy(str(path), tenant)


def schema(
    cases: Annotated[bool, typer.Option("--cases", help="The schema of files of cases instead.")] = False,
) -> None:
    """Print the JSON Schema of policy files (draft 2020-12)."""
    from policy.case_schema import case_schema_text
    from policy.schema import schema_text

    typer.echo(case_schema_text() if cases else schema_text(), nl=False)


def _write(path: Path, text: str, *, keep_equal: bool = False) -> bool:
    """Write a new file; ends the command where one is there. With ``keep_equal`` one that holds this text already is
    left as it is: then False."""
    try:
        if keep_equal and path.is_file() and path.read_bytes() == text.encode():
            return False
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        fail(exits.REFUSED, f"{path} is there already and stays as it is", "name another file, or move that one away")
    except OSError as error:
        fail(exits.REFUSED, f"cannot write {path}: {reason_of(error)}")
    return True


def _is_configured(path: Path) -> bool:
    """Whether a configuration beside the policy, or the service's, names this file: then a reload reads it."""
    from appliance.common.config_loader import load_config
    from appliance.common.errors import ConfigError
    from appliance.operator.cli.policy import BESIDE

    for config in (path.absolute().parent / BESIDE, DEFAULT_CONFIG):
        try:
            if config.is_file() and load_config(config).policy.resolve() == path.resolve():
                return True
        except (ConfigError, OSError):  # one that cannot be used names nothing that is read
            continue
    return False


def _show(path: Path, schema: Path, tenant: str) -> None:
    from rich.text import Text

    from appliance.common.figures import printable

    console = output()
    console.print(Text.assemble(("wrote ", "green"), (printable(str(path)), "bold"), f" and {printable(str(schema))}"))
    console.print(Text("Next:", "dim"))
    last = "athanor reload" if _is_configured(path) else f"athanor policy apply {path}"
    for line in (f"athanor key create {tenant} --id {tenant}-1", f"athanor policy check {path}", last):
        console.print(Text(f"  {printable(line)}", "cyan"), soft_wrap=True)
