"""``athanor install`` and ``uninstall`` as steps: what would change, then the changes, then telling the system."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import typer

import appliance
from appliance.common import schema
from appliance.common.errors import ConfigError
from appliance.common.schema import StatePlan
from appliance.operator.install import state, system
from appliance.operator.install.changes import Change, Kind, apply, find_changes, find_removals
from appliance.operator.install.packaged_image import ImagePlan, named_in, plan_image, put_image, read_named
from appliance.operator.install.rendering import GATEWAY_UNIT, PACKAGE_PLACE, UNITS, hidden, render
from appliance.operator.install.share import ADMIN_SHARE, ShareChange, apply_share, find_share_changes, share_files
from appliance.operator.install.sources import CONFIG, document_folder, own_command, read_sources, source_folder
from appliance.operator.install.state import Seed

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class InstallPlan:
    """What an install would do."""

    root: Path
    changes: tuple[Change, ...]
    share: tuple[ShareChange, ...]
    seeds: tuple[Seed, ...]
    packaged: bool
    """The units came with a package, and stay as they are."""
    state: StatePlan
    image: ImagePlan = field(default_factory=ImagePlan)
    sources: dict[str, str] = field(repr=False, default_factory=dict)

    @property
    def idle(self) -> bool:
        """Nothing would change."""
        kinds = {change.kind for change in self.changes} | {change.kind for change in self.share}
        return self.state.idle and self.image.idle and not self.seeds and kinds <= {Kind.SAME}


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """What an uninstall would do."""

    root: Path
    changes: tuple[Change, ...]
    share: tuple[ShareChange, ...]
    links: tuple[Path, ...]
    leftovers: tuple[Path, ...]
    """What a purge would remove besides."""
    packaged: bool


def plan_install(root: Path, command: Path | None, app: typer.Typer) -> InstallPlan:
    """Compare what is there with what is to be installed.

    Args:
        root: ``/``, or a tree that is one later.
        command: the ``athanor`` command on that machine; None for the one that runs now.
        app: the command line, whose manual pages and completions are installed.

    Raises:
        ConfigError: the services could not run this command, the state is newer than this version, or something cannot
            be read.
    """
    found = schema.plan(root)
    sources = read_sources(source_folder())
    packaged = is_packaged(root)
    chosen = own_command() if command is None else command
    if not packaged:
        check_command(chosen, here=root == ROOT)
    files = () if packaged else render(sources, str(chosen))
    brought = {} if packaged else share_files(document_folder(), app, ADMIN_SHARE)
    shared = () if packaged else find_share_changes(root, ADMIN_SHARE, brought)
    image = plan_image(root) if packaged else ImagePlan(chosen=read_named(root).image)
    sources[CONFIG] = named_in(sources[CONFIG], image.image)
    seeds = state.missing_seeds(root)
    return InstallPlan(root, find_changes(root, files), shared, seeds, packaged, found, image, sources)


def is_packaged(root: Path) -> bool:
    """Whether a package brought the units."""
    return (root / PACKAGE_PLACE / UNITS / GATEWAY_UNIT).exists()


def check_command(command: Path, *, here: bool) -> None:
    """Refuse a command that the services could not run.

    Raises:
        ConfigError: it is not absolute, not there, or in a place that the units hide from the services.
    """
    if not command.is_absolute() or any(character.isspace() for character in str(command)):
        raise ConfigError(f"the command {command} must be an absolute path without spaces")
    if not here:
        return
    if not os.access(command, os.X_OK):
        raise ConfigError(f"there is no program {command}; name the athanor command with --command")
    unseen = hidden((command, Path(sys.prefix), Path(appliance.__path__[0])))
    if unseen:
        raise ConfigError(
            f"the services could not see {unseen[0]}: home and temporary directories are hidden from them; install "
            "athanor elsewhere first, such as a virtual environment in /opt/athanor, or the package"
        )


def install(plan: InstallPlan, *, force: bool = False) -> None:
    """Make the plan true.

    Raises:
        ConfigError: a file was edited by hand and ``force`` is not given, or something cannot be written.
    """
    _refuse_edited(plan.changes, force=force)
    apply(plan.changes)
    apply_share(plan.root, plan.share)
    here = plan.root == ROOT
    if here:
        system.make_users()
    state.plant(plan.root, plan.seeds, plan.sources)
    put_image(plan.root, plan.image)
    if here:
        system.make_directories()
    schema.migrate(plan.root, plan.state)
    if here:
        system.reload_units()


def plan_removal(root: Path) -> RemovalPlan:
    """What an uninstall would do.

    Raises:
        ConfigError: something cannot be read.
    """
    files = render(read_sources(source_folder()), "-")
    return RemovalPlan(
        root,
        find_removals(root, files),
        find_share_changes(root, ADMIN_SHARE, {}),
        state.links(root),
        state.leftovers(root),
        is_packaged(root),
    )


def uninstall(plan: RemovalPlan, *, purge: bool = False, force: bool = False) -> tuple[str, ...]:
    """Stop, remove, and with ``purge`` remove keys, policy and state too; gives users that could not be removed.

    Raises:
        ConfigError: a file was edited by hand and ``force`` is not given, or something cannot be removed.
    """
    _refuse_edited(plan.changes, force=force)
    here = plan.root == ROOT
    if here:
        system.stop()
    apply(plan.changes)
    apply_share(plan.root, plan.share)
    state.remove_links(plan.root)
    if here:
        system.reload_units()
    if not purge:
        return ()
    state.purge(plan.root)
    return system.remove_users() if here else ()


def _refuse_edited(changes: tuple[Change, ...], *, force: bool) -> None:
    edited = [str(change.path) for change in changes if change.kind is Kind.EDITED]
    if edited and not force:
        raise ConfigError(
            f"edited by hand: {', '.join(edited)}; move the edits into drop-ins (`systemctl edit UNIT`), or lose them "
            "with --force"
        )
