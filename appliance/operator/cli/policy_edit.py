"""``athanor policy edit``: a policy's file in the operator's editor, checked before it is written."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.options import DEFAULT_CONFIG, FIND, Admin, Config
from appliance.operator.cli.policy_sources import print_problems, read
from appliance.operator.cli.policy_versions import NewPolicy, change_policy, load_configuration
from appliance.operator.cli.tenant import Yes
from appliance.operator.cli.terminal import errors, fail, output

if TYPE_CHECKING:
    from policy.loader import Source
    from policy.model import PolicySet

EXAMPLES = """
athanor policy edit | the policy's own file, in $VISUAL or $EDITOR
athanor policy edit /etc/athanor/policy.d/acme.yaml | one of its drop-ins
"""


def edit(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="File of the policy; its own without one.")
    ] = None,
    config: Config = DEFAULT_CONFIG,
    admin: Admin = FIND,
    yes: Yes = False,
) -> None:
    """Edit a file of the policy, and put the policy in force.

    The editor has a copy, so nothing that is half written is ever read. What it leaves is checked
    with the other files: a mistake is shown with its line, and the copy can be edited again. Then it
    goes on as apply does. Comments and layout stay as they are written.
    """
    loaded = load_configuration(config)
    sources = read(loaded.policy)
    chosen = _chosen(file, loaded.policy, sources)
    with tempfile.TemporaryDirectory(prefix="athanor-edit-") as folder:
        draft = Path(folder) / Path(chosen.name).name
        draft.write_text(chosen.text, encoding="utf-8")
        edited = _edited(draft, chosen, sources)
        if edited is None:
            output().print("nothing was changed")
            return
        text, policy = edited
        name = Path(chosen.name).relative_to(loaded.policy.parent).as_posix()
        try:
            change_policy(
                loaded, NewPolicy({name: text}, policy), admin, f"put the edited {chosen.name} in force", yes=yes
            )
        except (typer.Exit, typer.Abort):
            _keep(chosen, text)
            raise


def _chosen(file: Path | None, policy: Path, sources: list[Source]) -> Source:
    wanted = (file or policy).resolve()
    for source in sources:
        if Path(source.name).resolve() == wanted:
            return source
    names = ", ".join(source.name for source in sources)
    fail(exits.USAGE, f"{file or policy} is no file of the policy; those are: {names}")


def _edited(draft: Path, chosen: Source, sources: list[Source]) -> tuple[str, PolicySet] | None:
    """Return the text that the editor left, and the policy with it; None where it is the old one."""
    import click

    from policy.errors import PolicyError
    from policy.loader import load_policy

    while True:
        try:
            click.edit(filename=str(draft))
        except click.ClickException as error:
            fail(exits.REFUSED, f"no editor: {error.message}", "name one in EDITOR")
        text = draft.read_text(encoding="utf-8", errors="replace")
        if text == chosen.text:
            return None
        changed = replace(chosen, text=text)
        files = [changed if one is chosen else one for one in sources]
        try:
            return text, load_policy(files)
        except PolicyError as error:
            print_problems(error.problems, {one.name: one.text for one in files})
        if not typer.confirm("edit it again?", default=True):
            _keep(chosen, text)
            raise typer.Exit(exits.REFUSED)


def _keep(chosen: Source, text: str) -> None:
    """Keep what was written and is not in force."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="athanor-policy-", suffix=".yaml", delete=False
    ) as kept:
        kept.write(text)
    errors().print(f"what you wrote is kept in {kept.name}; {chosen.name} is as it was", soft_wrap=True)
