"""``athanor policy diff``: what a new policy changes for whom, and which logged requests it would have refused."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.moments import MOMENTS, read_moment
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output
from appliance.operator.cli.terminal import Format, errors, fail, output, print_data

if TYPE_CHECKING:
    from policy.changes import Change
    from policy.model import PolicySet
    from policy.replay import Replay

EXAMPLES = """
athanor policy diff new.yaml | against the policy that the configuration names
athanor policy diff old.yaml new.yaml --no-replay | two files, without the audit log
athanor policy diff new.yaml --since 7d | replay the requests of a week
athanor policy diff new.yaml --refuse wider | exit code 1 where anything is allowed or shared that was not
"""


class Refused(StrEnum):
    """``--refuse`` of the comparison: the changes that make it fail."""

    NOTHING = "nothing"
    WIDER = "wider"
    NARROWER = "narrower"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Replayed:
    """Replay of the log, or the reason why there is none."""

    result: Replay | None = None
    since: float = 0.0
    """Unix time of the first entry that counts."""
    lost: int = 0
    problem: str = ""


def diff(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="[OLD] NEW", help="Two policies; without OLD the one that the configuration names."),
    ],
    config: Config = DEFAULT_CONFIG,
    since: Annotated[str, typer.Option(metavar="TIME", help=f"Replay from then on: {MOMENTS}.")] = "24h",
    no_replay: Annotated[bool, typer.Option("--no-replay", help="Leave the audit log alone.")] = False,
    directory: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Folder of the audit log [the configuration's].")
    ] = None,
    refuse: Annotated[
        Refused, typer.Option(metavar="KIND", help="Fail on changes: nothing, wider, narrower or any.")
    ] = Refused.NOTHING,
    output_format: Output = Format.TABLE,
) -> None:
    """Tell what a new policy changes, in sentences, for each tenant.

    A change with + allows more or protects less, one with - allows less or protects more, one with ~ does neither.
    Each sentence has the path of its rule. Reads files only; nothing that runs is asked or changed.

    Replays the requests of the last day from the audit log and counts those that the new policy would have refused and
    the old one would not, by rule. The log has what requests used, at their end: counts of rates are estimates, and
    rules that cannot be replayed are named.

    Exit codes: 0 compared; 1 a policy has problems or cannot be read, or something changes that --refuse names.
    """
    from appliance.operator.cli.policy_sources import load
    from policy.changes import changes

    begin = read_moment(since, datetime.now(UTC), "--since").timestamp()
    if len(paths) > 2:
        fail(exits.USAGE, f"{len(paths)} policies were given, and two are compared", "athanor policy diff OLD NEW")
    old_path = paths[0] if len(paths) == 2 else _in_force(config, paths[0])
    old, new = load(old_path, output_format), load(paths[-1], output_format)
    found = changes(old, new)
    replayed = Replayed() if no_replay else _replay(old, new, begin, directory, config)
    if not print_data(_document(old, new, found, replayed), output_format):
        _show(old, new, found, replayed)
    raise typer.Exit(exits.REFUSED if _refused(found, refuse) else exits.OK)


def _in_force(config: Path, new: Path) -> Path:
    """Path of the policy that the configuration names."""
    from appliance.common.config_loader import load_config

    path = load_config(config).policy
    if path.resolve() == new.resolve():
        hint = "write the draft to a file of its own, or name two: athanor policy diff OLD NEW"
        fail(exits.USAGE, f"{new} is the policy that {config} names itself", hint)
    return path


def _replay(old: PolicySet, new: PolicySet, begin: float, directory: Path | None, config: Path) -> Replayed:
    """Replay the log. A log that cannot be read is told, and is a failure only where ``--from`` names it."""
    from appliance.common.errors import ConfigError
    from appliance.operator.cli.audit import log_folder
    from appliance.operator.replay_log import MS, LoggedRequests
    from policy.replay import replay

    try:
        logged = LoggedRequests(directory or log_folder(config), round(begin * MS))
        return Replayed(replay(old, new, logged), begin, logged.lost)
    except ConfigError as error:
        if directory is not None:
            raise
        return Replayed(problem=str(error).splitlines()[0])


def _refused(found: tuple[Change, ...], refuse: Refused) -> bool:
    if refuse is Refused.NOTHING:
        return False
    return any(refuse is Refused.ANY or change.direction.value == refuse.value for change in found)


def _document(old: PolicySet, new: PolicySet, found: tuple[Change, ...], replayed: Replayed) -> dict[str, Any]:
    """The comparison for other programs."""
    from dataclasses import asdict

    from policy.replay import not_replayed, sentences

    result = replayed.result
    rows = [
        {"subject": change.subject, "kind": change.kind.value, "path": change.path, "direction": change.direction.value}
        | {"text": change.sentence, "old": change.old, "new": change.new}
        for change in found
    ]
    replay: dict[str, Any] = {"problem": replayed.problem}
    if result is not None:
        replay |= {
            "since": replayed.since,
            "requests": dict(result.requests),
            "refused": [asdict(one) for one in result.refused],
            "shortened": [asdict(one) for one in result.shortened],
            "lifted": [asdict(one) for one in result.lifted],
            "inexact": result.inexact,
            "other_policy": result.foreign,
            "lost": replayed.lost,
            "sentences": sentences(result),
            "not_replayed": [{"path": path, "reason": reason} for path, reason in not_replayed(found)],
        }
    return {"old_digest": old.digest, "new_digest": new.digest, "changes": rows, "replay": replay}


def _show(old: PolicySet, new: PolicySet, found: tuple[Change, ...], replayed: Replayed) -> None:
    from appliance.operator.cli.policy_diff_view import changes_view, replay_view, summary_view

    console = output()
    console.print(changes_view(found, console.width))
    if replayed.result is not None and found:
        console.print(replay_view(replayed.result, replayed.since, replayed.lost, found))
    console.print(summary_view(old.digest, new.digest, found))
    if replayed.problem:
        errors().print(f"not replayed: {replayed.problem}", style="dim", soft_wrap=True, markup=False)
