"""``athanor install --systemd`` and ``athanor uninstall``: a service of this machine, and none again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.terminal import fail, output

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from appliance.operator.install.changes import Change
    from appliance.operator.install.installer import InstallPlan, RemovalPlan
    from appliance.operator.install.share import ShareChange

INSTALL_EXAMPLES = """
athanor install --systemd --dry-run | what would change
athanor install --systemd | units, users, directories, a first configuration
athanor install --systemd --prefix ./root --command /usr/bin/athanor | below a root that is a machine later
"""

UNINSTALL_EXAMPLES = """
athanor uninstall | stop and remove the services; keys, policy and models stay
athanor uninstall --purge | remove those too: nothing is left
"""

ROOT = Path("/")

Prefix = Annotated[Path, typer.Option(metavar="DIR", help="Root of the file system.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Also units that were edited by hand.")]

STYLES = {"new": "green", "changed": "yellow", "edited": "bold red", "removed": "red", "same": "dim"}
STYLES |= {
    "state": STYLES["changed"],
    "kept": STYLES["same"],
    "note": STYLES["same"],
    "problem": STYLES["edited"],
    "": "",
}
"""Styles of what happens to a file or to the state."""


def install(
    context: typer.Context,
    systemd: Annotated[bool, typer.Option("--systemd", help="As services of systemd, the one way there is.")] = False,
    prefix: Prefix = ROOT,
    command: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The athanor command that the services run [this one].")
    ] = None,
    dry_run: DryRun = False,
    force: Force = False,
) -> None:
    """Install units, users, directories, a first configuration and documents.

    Shows the difference to what is there. What is there already and right is not touched, so it
    can be run again at any time; configuration, policy, keys and models are made once and never
    changed. Documents, examples, dashboards, alert rules and manual pages go
    below /usr/local/share and are replaced when they differ.

    Exit codes: 0 installed, or nothing to do; 1 it could not be done; 2 wrong command line.
    """
    from appliance.operator.install import installer

    if not systemd:
        fail(exits.USAGE, "say --systemd: there is no other way to install yet")
    root = prefix.absolute()
    _need_root(root, dry_run=dry_run)
    plan = installer.plan_install(root, command, context.obj)
    console = output()
    _show_install(console, plan)
    if dry_run:
        return
    installer.install(plan, force=force)
    if not plan.idle:
        _next_steps(console, root)


def uninstall(
    prefix: Prefix = ROOT,
    purge: Annotated[bool, typer.Option("--purge", help="Also keys, policy, models, state and users.")] = False,
    dry_run: DryRun = False,
    force: Force = False,
) -> None:
    """Stop the services and remove what `athanor install` wrote.

    Requests that run get 20 seconds to end. Exit codes: 0 removed, or nothing was there; 1 it could
    not be done.
    """
    from appliance.operator.install import installer

    root = prefix.absolute()
    _need_root(root, dry_run=dry_run)
    plan = installer.plan_removal(root)
    _show_removal(output(), plan, purge=purge)
    if plan.packaged:
        fail(exits.REFUSED, "the units came with a package", "apt remove athanor    (or: apt purge athanor)")
    if dry_run:
        return
    for name in installer.uninstall(plan, purge=purge, force=force):
        output().print(f"the user or group {name} is still there: remove it with userdel or groupdel")


def _need_root(root: Path, *, dry_run: bool) -> None:
    if root == ROOT and not dry_run and os.geteuid() != 0:
        fail(exits.REFUSED, "this needs root", "sudo athanor ...; or --dry-run to see what it would do")


def _show_install(console: Console, plan: InstallPlan) -> None:
    from rich.text import Text

    if plan.packaged:
        console.print(Text("units, users and directories came with the package", "dim"))
    _show_changes(console, plan.changes)
    _show_share(console, plan.root, plan.share)
    for seed in plan.seeds:
        _line(console, "new", str(plan.root / seed.path), f"   {seed.purpose}")
    for step in plan.state.steps:
        _line(console, "state", step.summary)
    _show_image(console, plan)
    if plan.idle and not plan.image.problem:
        console.print(Text("nothing to do: everything is as it shall be", "green"))


def _show_image(console: Console, plan: InstallPlan) -> None:
    from appliance.operator.install.packaged_image import PIN

    image = plan.image
    if image.problem:
        _line(console, "problem", image.problem)
        _line(console, "", image.hint)
        return
    if image.image is None:
        if not image.chosen:
            _line(console, "note", "no image: sandboxes see the Python of this machine, read-only", "   docs/images.md")
        return
    if image.pin is not None:
        ours = image.pin.pinned == image.image.digest
        note = f"the image of the package, {image.pin.pinned[:16]}" if ours else "without images of earlier packages"
        _line(console, "changed", str(plan.root / PIN), f"   {note}")
    for path in image.stale:
        _line(console, "removed", str(path))


def _show_removal(console: Console, plan: RemovalPlan, *, purge: bool) -> None:
    from rich.text import Text

    _show_changes(console, plan.changes, brief=True)
    _show_share(console, plan.root, plan.share)
    for path in plan.links:
        _line(console, "removed", str(path))
    for path in plan.leftovers:
        _line(console, "removed" if purge else "kept", str(path))
    if not plan.changes and not plan.share and not plan.links and not (purge and plan.leftovers):
        console.print(Text("nothing to do: no service is installed here", "green"))


def _line(console: Console, word: str, text: str, note: str = "") -> None:
    """One line that begins with what happens."""
    from rich.text import Text

    console.print(Text.assemble((f"{word:<8}", STYLES[word]), text, (note, "dim")), soft_wrap=True)


def _show_changes(console: Console, changes: Iterable[Change], *, brief: bool = False) -> None:
    from rich.text import Text

    from appliance.common.figures import printable

    for change in changes:
        kind = change.kind.value
        _line(console, kind, printable(str(change.path)))
        if brief or not change.before or kind == "same":
            continue
        for line in change.diff().splitlines():
            style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "dim")
            console.print(Text(f"        {printable(line)}", style), soft_wrap=True)


def _show_share(console: Console, root: Path, changes: Iterable[ShareChange]) -> None:
    for change in changes:
        _line(console, change.kind.value, str(root / change.place), f"   {change.note}")


def _next_steps(console: Console, root: Path) -> None:
    from rich.text import Text

    if root != ROOT:
        return
    steps = [
        ("athanor key create alpha --id alpha-1 --credentials /etc/athanor/credentials.json", "a tenant's key"),
        ("editor /etc/athanor/policy.yaml", "what the tenant may do"),
        ("athanor doctor", "before the start"),
        ("systemctl enable --now athanor.target", ""),
    ]
    console.print(Text("\nNext:", "bold"))
    for command, purpose in steps:
        line = Text.assemble("  ", (command, "cyan"), (f"   {purpose}" if purpose else "", "dim"))
        console.print(line, soft_wrap=True)
