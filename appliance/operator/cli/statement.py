"""``athanor statement create`` and ``verify``: a tenant's bill that the tenant can check."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.errors import reason_of
from appliance.common.figures import counted
from appliance.operator.cli import exits
from appliance.operator.cli.audit import DEFAULT_FOLDER, From, config_errors_fail, verifier_in
from appliance.operator.cli.moments import MOMENTS, read_moment
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, errors, fail, output, print_data

if TYPE_CHECKING:
    from appliance.common.audit.statement import Statement

CREATE_EXAMPLES = """
athanor statement create --tenant alpha --out alpha.statement | last month's
athanor statement create --tenant alpha --since 2026-10-05 --until 2026-10-06 --out day.statement | one day's
athanor statement create --all --into ./statements | last month's of each tenant, those that are missing
"""

VERIFY_EXAMPLES = """
athanor statement verify alpha.statement --key public.key | as the tenant: nothing else is needed
athanor statement verify alpha.statement --key public.key --log /mnt/copy/audit | as an auditor, against the log
"""

SHOWN = 20
"""Most differences that are printed."""


def create(  # noqa: PLR0913 - a parameter is an option
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="ID", help="The tenant whose requests are stated.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="A statement of each tenant that has requests in the time.")
    ] = False,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help=f"Begin of the time: {MOMENTS} (UTC).")
    ] = "last-month",
    until: Annotated[str, typer.Option("--until", metavar="TIME", help="End of the time, likewise.")] = "month",
    directory: From = DEFAULT_FOLDER,
    signing_key: Annotated[
        Path | None,
        typer.Option(
            "--signing-key", metavar="FILE", help="The log's private key (audit: key); without it that beside the log."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write it; without it to standard output.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="With --all: folder of the files; what is there stays.")
    ] = None,
) -> None:
    """Make a statement of a tenant's requests, signed with the key of the audit log.

    It has each request that the log has of the tenant, with its tokens and its cost, and their
    sums. The log is verified first; nothing is stated from one that is not whole. With --all, one
    for each tenant; run again, it makes those that are missing.
    """
    from appliance.common.audit.files import SIGNING_KEY

    if every != (tenant is None) or every != (into is not None) or (every and out is not None):
        fail(exits.USAGE, "whose statements?", "write --tenant ID [--out FILE], or --all --into DIR")
    now = datetime.now(UTC)
    begin, end = (
        int(read_moment(*one).timestamp() * 1_000) for one in ((since, now, "--since"), (until, now, "--until"))
    )
    if end <= begin:
        fail(exits.USAGE, f"the time ends before it begins: --since {since} --until {until}")
    key = signing_key or directory / SIGNING_KEY
    if into is not None:
        _create_all(directory, key, (begin, end), into)
    elif tenant is not None:
        _create_one(directory, key, (tenant, begin, end), out)


def _create_all(directory: Path, key: Path, span: tuple[int, int], into: Path) -> None:
    from appliance.operator.statements import make_statements

    if not into.is_dir():
        fail(exits.REFUSED, f"{into} is no folder", "make it, readable by those alone who may see bills")
    with config_errors_fail():
        made = make_statements(directory, key, *span, into)
    for path in made.new:
        typer.echo(path)
    there = f"; {counted(len(made.there), 'was', 'were')} there already" if made.there else ""
    errors().print(f"{counted(len(made.new), 'statement')} made{there}", soft_wrap=True, markup=False)


def _create_one(directory: Path, key: Path, wanted: tuple[str, int, int], out: Path | None) -> None:
    from appliance.operator.statements import Stated, make_statement

    with config_errors_fail():
        text = make_statement(directory, key, Stated(*wanted))
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        fail(exits.REFUSED, f"{out} is there already", "name another file; a statement is not written over")
    except OSError as error:
        fail(exits.REFUSED, f"cannot write {out}: {reason_of(error)}")
    errors().print(f"{out}: the tenant verifies it with {directory / 'public.key'}", soft_wrap=True, markup=False)


def verify(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The statement.")],
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="The public key of the audit log.")],
    log: Annotated[
        Path | None, typer.Option("--log", metavar="DIR", help="Compare it with the audit log in this folder too.")
    ] = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Verify that a statement is as it was made, and that its sums are those of its requests.

    Offline: reads the files and nothing else. Compare the requests with your own records: what the
    key's holder states, nobody else can change, but only you know what you sent.
    """
    statement = _read(path, key)
    found: list[str] = []
    if log is not None:
        from appliance.operator.statements import compare

        with config_errors_fail():
            found = compare(statement, log)
    _show(statement, found, output_format, compared=log is not None)
    if found:
        raise typer.Exit(exits.REFUSED)


def _read(path: Path, key: Path) -> Statement:
    from appliance.common.audit.signed_text import SignedTextError
    from appliance.common.audit.statement import MAX_STATEMENT_BYTES, read_statement

    verifier = verifier_in(key)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_STATEMENT_BYTES + 1)
    except OSError as error:
        fail(exits.REFUSED, f"cannot read {path}: {reason_of(error)}")
    if len(data) > MAX_STATEMENT_BYTES:
        fail(exits.REFUSED, f"{path} is larger than a statement may be, {MAX_STATEMENT_BYTES >> 20} MiB")
    try:
        return read_statement(data, verifier)
    except SignedTextError as error:
        fail(exits.REFUSED, f"{path}: {error}")


def _show(statement: Statement, found: list[str], output_format: Format, *, compared: bool) -> None:
    from appliance.operator.cli.statement_view import document, statement_view

    if print_data(document(statement, found, compared=compared), output_format):
        return
    console = output()
    console.print(statement_view(statement, console.width))
    for one in found[:SHOWN]:
        console.print(one, style="red", soft_wrap=True, markup=False)
    if found:
        console.print("the log says something else", style="bold")
    else:
        console.print(
            "the signature holds, and the log has exactly this" if compared else "the signature holds", style="bold"
        )
