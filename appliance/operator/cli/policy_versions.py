"""``athanor policy history``, ``apply`` and ``rollback``: which policies were in force, and how another gets there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.moments import MOMENTS, read_moment
from appliance.operator.cli.options import DEFAULT_CONFIG, FIND, Admin, Config, Output
from appliance.operator.cli.tenant import Yes, confirm
from appliance.operator.cli.terminal import Format, errors, fail, output, print_data

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from appliance.common.config import ApplianceConfig
    from appliance.common.policy_history import PolicyHistory, Version
    from appliance.common.status import ReloadOutcome
    from appliance.operator.cli.admin_client import UnreachableError
    from appliance.operator.placement import Placement
    from policy.changes import Change
    from policy.model import PolicySet

HISTORY_EXAMPLES = """
athanor policy history | the policies that were in force, the newest first
athanor policy history --since 7d | what changed in the policy in a week, in sentences
athanor policy history 7 | what version 7 changed, in sentences
"""

APPLY_EXAMPLES = """
athanor policy apply new.yaml | show what changes, ask, replace the policy, put it in force
athanor policy apply new.yaml --yes | without asking, for scripts
athanor policy apply new.yaml --yes --no-wait | and without the outcome: athanor status tells what is in force
"""

ROLLBACK_EXAMPLES = """
athanor policy rollback | back to the policy before this one
athanor policy rollback 7 | back to version 7 of the history
"""

RELOAD_S = 60.0
"""Seconds that the outcome of a reload is waited for."""

OK, CONFLICT = 200, 409
"""HTTP statuses of a reload: done, and one that changed nothing."""

MAX_NEW_BYTES = 64 << 20
"""Most bytes of a new policy that are read; the loader's own bound is smaller and has its own message."""

MS = 1_000
"""Milliseconds of a second."""

NEXT_START = "it is in force at the next start: nothing answers now"

UNREAD = (
    "its files were replaced before the supervisor had read them, or are larger than a version, so nothing but the "
    "digest is kept"
)
"""What is told of a version without texts."""

MAX_ROWS = 20
"""Versions that the table shows; JSON and YAML have all."""


@dataclass(frozen=True, slots=True)
class NewPolicy:
    """A policy that shall be in force, as files below the folder of the configured one."""

    files: dict[str, str]
    policy: PolicySet
    gone: tuple[str, ...] = ()
    """Drop-ins that it does not have."""


def history(
    number: Annotated[
        int | None, typer.Argument(metavar="[VERSION]", help="Tell what this version changed, and show its files.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help=f"Tell what each version from then on changed: {MOMENTS} (UTC)."),
    ] = None,
    config: Config = DEFAULT_CONFIG,
    output_format: Output = Format.TABLE,
) -> None:
    """Show which policies were in force, and since when.

    The supervisor keeps the text of each policy that comes into force, however it was put there,
    and the audit log has its digest: a request's entry leads to the text that decided it.
    """
    begin = None if since is None else read_moment(since, datetime.now(UTC), "--since")
    if number is not None and begin is not None:
        fail(exits.USAGE, "a version and --since were given; one of them says what is shown", "athanor policy history")
    kept = kept_history(load_configuration(config))
    if begin is not None:
        _show_since(kept, begin, output_format)
        return
    if number is not None:
        _show_version(kept, kept.read(number), output_format)
        return
    versions = [_row(one) for one in _readable(kept)]
    if print_data({"versions": versions}, output_format):
        return
    from appliance.operator.cli.policy_versions_view import history_view

    output().print(history_view(versions[:MAX_ROWS], len(versions)))


def apply(
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The new policy: a file, or a folder where it is one.")],
    config: Config = DEFAULT_CONFIG,
    admin: Admin = FIND,
    yes: Yes = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Whether to wait until it is in force, or refused and taken back.")
    ] = True,
) -> None:
    """Replace the policy by another, and put it in force.

    Checks the new policy together with the drop-ins that stay, tells what it changes, asks, writes
    the file with the owner and mode of the old one, and waits until it is in force. Signatures
    beside the new one go with it. If it is refused, or nothing can be written, all is as before.

    With --no-wait the appliance is told and not waited for: what it refuses then stays on the disk,
    while the policy before it stays in force.
    """
    loaded = load_configuration(config)
    change_policy(loaded, given(new, loaded.policy), admin, f"put {new} in force", yes=yes, wait=wait)


def rollback(
    number: Annotated[
        int | None, typer.Argument(metavar="[VERSION]", help="Version of the history; the one before without it.")
    ] = None,
    config: Config = DEFAULT_CONFIG,
    admin: Admin = FIND,
    yes: Yes = False,
) -> None:
    """Put a policy that was in force before in force again.

    All its files are written back; drop-ins that it did not have are kept beside, with the ending
    .aside, and not read. Tells what changes and asks, as apply does. The history goes on: going
    back is a new version.
    """
    loaded = load_configuration(config)
    kept = kept_history(loaded)
    chosen = kept.read(version_before(kept) if number is None else number)
    change_policy(loaded, restored(chosen, loaded.policy), admin, f"go back to version {chosen.number}", yes=yes)


def load_configuration(config: Path) -> ApplianceConfig:
    """Return the configuration of the appliance whose policy a command is about.

    Raises:
        ConfigError: it cannot be used.
    """
    from appliance.common.config_loader import load_config

    return load_config(config)


def kept_history(config: ApplianceConfig) -> PolicyHistory:
    """Return the history of a configuration's policies; without an audit log the command ends."""
    from appliance.common.policy_history import PolicyHistory

    if config.audit is None:
        fail(
            exits.REFUSED, "policies are kept beside the audit log, and there is none", "name a folder: audit.directory"
        )
    return PolicyHistory(config.audit.directory)


def version_before(kept: PolicyHistory) -> int:
    """Return the version before the newest one whose texts are kept; the command ends where there is none."""
    found = next((number for number in kept.numbers()[1:] if not kept.read(number).unread), None)
    if found is None:
        fail(exits.REFUSED, "the history has no policy before this one", "athanor policy history")
    return found


def given(new: Path, policy: Path) -> NewPolicy:
    """The configured policy with ``new`` in place of its file, or of all its files where it is a folder."""
    from appliance.common.policy_history import relative, sources_of
    from appliance.operator.cli.policy_sources import read, refuse
    from policy.errors import PolicyError
    from policy.loader import load_policy

    if new.resolve() == policy.resolve():
        fail(exits.USAGE, f"{new} is the configured policy itself", "athanor reload puts an edited policy in force")
    if new.is_dir() != policy.is_dir():
        kind = "a folder" if policy.is_dir() else "a file"
        fail(exits.USAGE, f"the configured policy {policy} is {kind}, so the new one has to be {kind} too")
    gone: tuple[str, ...] = ()
    if new.is_dir():
        texts, names = relative(read(new), new)
        files = {_moved(name, policy.name): text for name, text in texts.items()}
        named = tuple(_moved(name, policy.name) for name in names)
        gone = tuple(name for name in relative(read(policy), policy)[1] if name not in named)
        written = files
    else:
        files, named = relative(read(policy), policy)
        written = {policy.name: _text(new)}
        files |= written
    # A problem is told at the file that was given.
    sources = [replace(one, name=str(new)) if one.name == policy.name else one for one in sources_of(files, named)]
    try:
        return NewPolicy(written | _signatures(new, policy), load_policy(sources), gone)
    except PolicyError as error:
        refuse(error, sources, Format.TABLE)


def _signatures(new: Path, policy: Path) -> dict[str, str]:
    """The signatures beside a new policy, as the file beside the configured one; without any that one stays."""
    from appliance.common.policy_signature import signature_file

    path = signature_file(new)
    return {signature_file(policy).name: _text(path)} if path.exists() else {}


def _text(new: Path) -> str:
    """The text of a file that shall be the policy's."""
    from appliance.common.errors import ConfigError, os_errors_as

    with os_errors_as(f"cannot read {new}"), new.open("rb") as file:
        data = file.read(MAX_NEW_BYTES + 1)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{new} is not UTF-8") from None


def _moved(name: str, folder: str) -> str:
    """The name of a folder's file, in another folder."""
    return "/".join([folder, *name.split("/")[1:]])


def restored(version: Version, policy: Path) -> NewPolicy:
    """A version of the history, checked by this version of the appliance."""
    from appliance.common.policy_history import relative
    from appliance.operator.cli.policy_sources import read, refuse
    from policy.errors import PolicyError
    from policy.loader import load_policy

    if version.unread:
        fail(exits.REFUSED, f"version {version.number}: {UNREAD}", "athanor policy history")
    sources = version.sources()
    try:
        loaded = load_policy(sources)
    except PolicyError as error:
        refuse(error, sources, Format.TABLE)
    gone = tuple(name for name in relative(read(policy), policy)[1] if name not in version.named)
    if policy.name in gone:
        fail(
            exits.REFUSED, f"version {version.number} has no file {policy.name}: the configuration named another policy"
        )
    return NewPolicy(version.files, loaded, gone)


def change_policy(
    config: ApplianceConfig, target: NewPolicy, admin: str, what: str, *, yes: bool, wait: bool = True
) -> None:
    """Tell what changes, ask, write, and put in force; whatever fails leaves everything as it was, unless nobody waits
    for it (``wait``)."""
    show_changes(config, target)
    confirm(what, yes=yes)
    if wait:
        put_policy(config, target, admin)
    else:
        _start(config, target, admin)


def _start(config: ApplianceConfig, target: NewPolicy, admin: str) -> None:
    """Write a policy and have the appliance told, without the outcome."""
    from appliance.operator.cli.admin_client import AbsentError, UnreachableError, tell
    from appliance.operator.placement import Placement

    placement = Placement(config.policy.parent, target.files, list(target.gone))
    placement.put()
    console = output()
    try:
        tell(admin, "/reload", "POST")
    except AbsentError as error:
        console.print(f"[green]written[/green]; {NEXT_START}", soft_wrap=True)
        console.print(str(error.args[0]), style="dim", soft_wrap=True, markup=False)
        return
    except UnreachableError as error:
        _take_back(placement, error)
    digest = target.policy.digest[:12]
    console.print(
        f"[green]written[/green], and the appliance is told; athanor status shows {digest} once it is in force",
        soft_wrap=True,
    )


def show_changes(config: ApplianceConfig, target: NewPolicy) -> None:
    """Print what a policy changes against the configured one, as it is on the disk."""
    from appliance.operator.cli.policy_diff_view import changes_view, summary_view
    from appliance.operator.cli.policy_sources import read
    from policy.changes import changes
    from policy.errors import PolicyError
    from policy.loader import load_policy

    console = output()
    try:
        old = load_policy(read(config.policy))
    except PolicyError:
        console.print("the policy that is there has problems, so nothing is compared", style="yellow")
    else:
        found = changes(old, target.policy)
        console.print(changes_view(found, console.width))
        console.print(summary_view(old.digest, target.policy.digest, found))


def put_policy(config: ApplianceConfig, target: NewPolicy, admin: str) -> ReloadOutcome | None:
    """Write a policy and wait until it is in force; whatever fails ends the command, with everything as it was. Gives
    what the appliance said; None where none runs."""
    from appliance.operator.placement import Placement

    placement = Placement(config.policy.parent, target.files, list(target.gone))
    placement.put()
    return _put_in_force(placement, admin)


def _take_back(placement: Placement, error: UnreachableError) -> NoReturn:
    """Have the files as they were, where it is not known whether an appliance has read them; ends the command."""
    placement.undo()
    fail(
        exits.UNREACHABLE,
        f"{error.args[0]}; the files are as before, and what is in force is not known",
        "athanor status names the policy in force; athanor reload puts the files in force",
    )


def _put_in_force(placement: Placement, admin: str) -> ReloadOutcome | None:
    """Reload; where the appliance does not run the next start reads the files."""
    from rich.markup import escape

    from appliance.common.status import ReloadOutcome
    from appliance.operator.cli.admin_client import AbsentError, UnreachableError, read, try_ask

    console = output()
    try:
        answer = try_ask(admin, "/reload", "POST", RELOAD_S)
    except AbsentError as error:
        console.print(f"[green]written[/green]; {NEXT_START}", soft_wrap=True)
        console.print(str(error.args[0]), style="dim", soft_wrap=True, markup=False)
        return None
    except UnreachableError as error:
        _take_back(placement, error)
    if answer.status not in (OK, CONFLICT):
        placement.undo()
        fail(exits.REFUSED, f"the reload failed with status {answer.status}, and the files are as before")
    outcome = read(ReloadOutcome, answer, CONFLICT)
    if not outcome.ok:
        placement.undo()
        fail(exits.REFUSED, "\n".join(["refused, and everything is as before", *outcome.problems]))
    console.print(f"[green]in force[/green]: {escape(outcome.message)}", soft_wrap=True)
    for line in outcome.warnings:
        console.print(f"[bold yellow]warning:[/bold yellow] {escape(line)}", soft_wrap=True)
    return outcome


def _readable(kept: PolicyHistory) -> Iterator[Version]:
    """Yield the versions, the newest first. One that cannot be read hides no other: it is told beside the list."""
    from appliance.common.errors import ConfigError
    from appliance.common.figures import printable

    for number in kept.numbers():
        try:
            yield kept.read(number)
        except ConfigError as error:
            errors().print(printable(f"note: {error.message}"), soft_wrap=True, markup=False, highlight=False)


def _row(version: Version) -> dict[str, Any]:
    since = datetime.fromtimestamp(version.since_ms / 1000, UTC)
    return {
        "version": version.number,
        "since": f"{since:%Y-%m-%dT%H:%M:%SZ}",
        "by": version.by,
        "digest": version.digest,
        "files": list(version.named),
    }


def _show_since(kept: PolicyHistory, begin: datetime, output_format: Format) -> None:
    """What each version changed that came into force at a time or later, the oldest first."""
    from appliance.operator.cli.policy_versions_view import since_view

    versions, told = _readable(kept), []
    one = next(versions, None)
    while one is not None and one.since_ms >= begin.timestamp() * MS:
        before = next(versions, None)
        told.append((_row(one), *changed_by(before, one)))
        one = before
    told.reverse()
    document = [
        {
            **row,
            "note": note,
            "changes": [
                {"sentence": one.sentence, "rule": one.path, "direction": one.direction.value} for one in changed
            ],
        }
        for row, changed, note in told
    ]
    if not print_data({"since": f"{begin:%Y-%m-%dT%H:%M:%SZ}", "versions": document}, output_format):
        console = output()
        console.print(since_view(told, begin, console.width))


def changed_by(before: Version | None, version: Version) -> tuple[Sequence[Change], str]:
    """Return what a version changed against the one before it, or a note that says why that is not known."""
    from policy.changes import changes
    from policy.errors import PolicyError
    from policy.loader import load_policy

    if before is None:
        return (), "the oldest version that is kept"
    if before.unread or version.unread:
        return (), f"not compared: {UNREAD}"
    try:
        return changes(load_policy(before.sources()), load_policy(version.sources())), ""
    except PolicyError as error:
        return (), f"not compared: this version of athanor refuses one of both: {error.problems[0]}"


def _show_version(kept: PolicyHistory, version: Version, output_format: Format) -> None:
    """What a version changed against the one before it, and its files."""
    from appliance.operator.cli.policy_diff_view import changes_view, summary_view

    if print_data({**_row(version), "texts": version.files}, output_format):
        return
    console = output()
    earlier = [number for number in kept.numbers() if number < version.number]
    if earlier:
        before = kept.read(earlier[0])
        found, note = changed_by(before, version)
        if note:
            console.print(note, markup=False)
        else:
            console.print(changes_view(found, console.width))
            console.print(summary_view(before.digest, version.digest, found))
    for name, text in version.files.items():
        console.print(f"\n# {name}", style="dim", markup=False)
        console.print(text.rstrip(), markup=False, soft_wrap=True)
