"""``athanor policy shadow``: a policy that decides on every request beside the one in force, without effect."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.errors import os_errors_as
from appliance.common.figures import counted, printable
from appliance.operator.cli import exits
from appliance.operator.cli.options import DEFAULT_CONFIG, FIND, Admin, Config, Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

if TYPE_CHECKING:
    from rich.console import RenderableType

    from appliance.common.shadow_status import ShadowStatus

EXAMPLES = """
athanor policy shadow new.yaml | from now on new.yaml decides too, without effect
athanor policy shadow | what it would have done differently, for whom, by which rule
athanor policy shadow --off | no longer
"""

RELOAD_S = 60.0
"""Seconds that the outcome of a reload is waited for."""

SAID = {
    "refuses": ("red", "would be refused by"),
    "serves": ("green", "would be served, and was refused"),
    "waits": ("yellow", "would wait for"),
    "other_model": ("cyan", "would be led to another model by"),
}
"""Verdict to its colour and its words."""


def shadow(
    new: Annotated[
        Path | None, typer.Argument(metavar="[NEW]", help="Policy to try: a file, or a folder where the policy is one.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="End the trial, and remove what decides in it.")] = False,
    config: Config = DEFAULT_CONFIG,
    admin: Admin = FIND,
    output_format: Output = Format.TABLE,
) -> None:
    """Try a policy on the requests that come, without effect.

    NEW is checked, written beside the configured policy as policy.shadow.yaml, and decides on each
    request from then on; only the policy in force has an effect. Without NEW, shows how many
    requests it would have refused, served, or had wait, by tenant and rule. A trial outlives
    restarts, its counts do not.
    """
    if new is not None and off:
        fail(exits.USAGE, "a policy cannot be tried and not be tried")
    if new is not None or off:
        _place(config, new, output_format)
        _reload(admin)
        if off:
            output().print("no policy is tried any more")
            return
    from appliance.common.shadow_status import ShadowStatus
    from appliance.operator.cli.admin_client import ask, read

    answer = ask(admin, "/policy/shadow")
    found = read(ShadowStatus, answer)
    if not print_data(answer.body, output_format):
        output().print(shadow_view(found))
    if found.problems:
        raise typer.Exit(exits.REFUSED)


def shadow_view(found: ShadowStatus) -> RenderableType:
    """Return what a shadow policy would have decided, for a terminal."""
    from datetime import UTC, datetime

    from rich.console import Group
    from rich.text import Text

    from appliance.operator.cli.tables import number, table

    if found.problems:
        return Group(Text("the policy to try has problems, and nothing is tried:", "red"), *map(Text, found.problems))
    if not found.digest:
        return Text("no policy is tried; begin with: athanor policy shadow NEW", "dim")
    decided, agreed = sum(found.verdicts.values()), found.verdicts.get("agrees", 0)
    since = f"{datetime.fromtimestamp(found.since, UTC):%Y-%m-%d %H:%M} UTC"
    told = Text.assemble(
        "policy ",
        (found.digest[:12], "bold"),
        f" decides without effect since {since}: it agrees on ",
        (f"{agreed:,} of {counted(decided, 'request')}", "bold green" if agreed == decided else "bold yellow"),
    )
    if not found.rows:
        return told
    shown = table("TENANT", "WHAT IT WOULD DO", numbers=["REQUESTS"])
    for row in found.rows:
        style, words = SAID.get(row.verdict, ("", row.verdict))
        shown.add_row(
            Text(printable(row.tenant), "bold"),
            Text(f"{words} {printable(row.rule)}".rstrip(), style),
            number(row.requests),
        )
    return Group(told, "", shown)


def _place(config: Path, new: Path | None, output_format: Format) -> None:
    """Put a policy beside the configured one, or remove what is there. Problems of the policy end the command."""
    from appliance.common.config_loader import load_config
    from appliance.operator.cli.policy_sources import load
    from appliance.operator.placement import Placement
    from policy.files import shadow_file

    policy = load_config(config).policy
    place = shadow_file(policy)
    files: dict[str, str] = {}
    if new is not None:
        if new.is_dir() != policy.is_dir():
            kind = "a folder" if policy.is_dir() else "a file"
            fail(exits.USAGE, f"the configured policy {policy} is {kind}, so the one to try has to be {kind} too")
        load(new, output_format)
        with os_errors_as(f"cannot read {new}"):
            files = _texts(new, place.name)
    Placement(place.parent, files, []).put()  # The trial before stays where this one cannot be written.
    with os_errors_as(f"cannot remove what {place} had before"):
        _remove(place, kept={place.parent / name for name in files})


def _texts(new: Path, name: str) -> dict[str, str]:
    """Texts of a policy by name below the folder of the configured one; ``name`` is the place's. Texts of public
    prefixes come with a folder; a file's are those beside the configured policy."""
    from policy.files import MAX_PUBLIC_FILES, PUBLIC_FOLDER, PUBLIC_SUFFIXES

    if not new.is_dir():
        return {name: new.read_text(encoding="utf-8")}
    found = [file for file in sorted(new.glob("*.yaml")) if not file.name.startswith(".")]
    public = [file for file in sorted((new / PUBLIC_FOLDER).glob("*")) if file.suffix in PUBLIC_SUFFIXES]
    found += public[:MAX_PUBLIC_FILES]
    return {f"{name}/{file.relative_to(new)}": file.read_text(encoding="utf-8") for file in found}


def _remove(place: Path, kept: Collection[Path]) -> None:
    """Remove a trial, or the files of one before that are not ``kept``, and folders without a file."""
    if not place.is_dir():
        if place not in kept:
            place.unlink(missing_ok=True)
        return
    from policy.files import PUBLIC_FOLDER, PUBLIC_SUFFIXES

    for folder, suffixes in ((place / PUBLIC_FOLDER, PUBLIC_SUFFIXES), (place, (".yaml",))):
        for file in folder.glob("*"):
            if file.suffix in suffixes and file not in kept:
                file.unlink()
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _reload(admin: str) -> None:
    from appliance.common.status import ReloadOutcome
    from appliance.operator.cli.admin_client import ask, read

    outcome = read(ReloadOutcome, ask(admin, "/reload", "POST", RELOAD_S), 409)
    if not outcome.ok:
        fail(exits.REFUSED, "\n".join(["the reload is refused, so nothing is tried yet", *outcome.problems]))
