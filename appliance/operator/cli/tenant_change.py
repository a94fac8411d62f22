"""Changes of one tenant of the configured policy: its texts, their signature, and how the changed policy comes into
force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.errors import ConfigError, os_errors_as
from appliance.operator.cli import exits
from appliance.operator.cli.policy_sources import load_with_sources, refuse
from appliance.operator.cli.policy_versions import NewPolicy, load_configuration, show_changes
from appliance.operator.cli.terminal import Format, fail, output

if TYPE_CHECKING:
    from appliance.common.config import ApplianceConfig
    from appliance.operator.key_table import KeyFiles
    from policy.loader import Source
    from policy.model import PolicySet

Sign = Annotated[
    Path | None,
    typer.Option(
        "--sign", metavar="FILE", help="Private key of policy_keys: the changed policy is signed with it [unsigned]."
    ),
]
Draft = Annotated[
    Path | None,
    typer.Option("--draft", metavar="DIR", help="Write the changed policy there, whole, and change nothing else."),
]


@dataclass(frozen=True, slots=True)
class Present:
    """The configured policy, as it is on the disk."""

    config: ApplianceConfig
    policy: PolicySet
    sources: list[Source]

    @property
    def key_files(self) -> KeyFiles:
        """Files of the key table."""
        return key_files_of(self.config)


def key_files_of(config: ApplianceConfig) -> KeyFiles:
    """Return the files of a configuration's key table. Its secret lies beside it, where the configuration names a copy
    of that which only the gateway has."""
    from appliance.operator.key_table import KeyFiles

    beside = config.credentials.with_name("pepper")
    pepper = config.pepper if config.pepper.exists() and not beside.exists() else beside
    return KeyFiles(config.credentials, pepper)


def present(config: Path) -> Present:
    """Load the policy that a configuration names; its problems are printed, and end the command.

    Raises:
        ConfigError: configuration or policy cannot be read.
    """
    loaded = load_configuration(config)
    return Present(loaded, *load_with_sources(loaded.policy, Format.TABLE))


def changed(found: Present, new: Sequence[Source]) -> NewPolicy:
    """Return the policy with some of its files changed or new; its problems are printed, and end the command."""
    from policy.errors import PolicyError
    from policy.loader import load_policy

    names = {one.name for one in new}
    whole = [*(one for one in found.sources if one.name not in names), *new]
    try:
        policy = load_policy(whole)
    except PolicyError as error:
        refuse(error, whole, Format.TABLE)
    folder = found.config.policy.parent
    return NewPolicy({Path(one.name).relative_to(folder).as_posix(): one.text for one in new}, policy)


def tell_and_sign(found: Present, target: NewPolicy, sign: Path | None, draft: Path | None) -> NewPolicy:
    """Print what changes, and return the policy with its signature, where one is demanded. Without a key for it, and
    without a draft to be signed elsewhere, the command ends here.

    Raises:
        ConfigError, KeysError: the private key cannot be used.
    """
    from appliance.common.policy_signature import signature_file, signature_text
    from isolation.keys.signing import load

    config = found.config
    if sign is not None:
        key = load(sign)
        if config.policy_keys and key.public.hex() not in config.policy_keys:
            raise ConfigError(f"{sign} is the private key of {key.public.hex()}, which is not among policy_keys")
    show_changes(config, target)
    if sign is None:
        if config.policy_keys and draft is None:
            fail(exits.REFUSED, "policies are signed here (policy_keys), so nothing was changed", _how_to_sign(config))
        return target
    text = signature_text(_sources(found, target), config.policy, key)
    return replace(target, files={**target.files, signature_file(config.policy).name: text})


def _how_to_sign(config: ApplianceConfig) -> str:
    name = config.policy.name
    return (
        "--sign FILE signs with a private key of policy_keys that is here; where none is, --draft DIR writes the "
        f"changed policy there, to be signed where the key is (athanor policy sign DIR/{name} --key FILE) and applied"
    )


def _sources(found: Present, target: NewPolicy) -> list[Source]:
    from policy.loader import Source

    texts = {str(found.config.policy.parent / name): text for name, text in target.files.items()}
    known = [replace(one, text=texts.pop(one.name, one.text)) for one in found.sources]
    beside = known[0].files if known else {}
    return [*known, *(Source(name, text, beside) for name, text in texts.items())]


def write_draft(found: Present, target: NewPolicy, folder: Path) -> None:
    """Write all files of a changed policy into a new folder, and print what is to be done with it.

    Raises:
        ConfigError: the folder is there already, or cannot be written.
    """
    from appliance.common.policy_history import relative

    config = found.config
    files, _ = relative(_sources(found, target), config.policy)
    with os_errors_as(f"cannot write the draft {folder}"):
        folder.mkdir(mode=0o750)
        for name, text in (files | target.files).items():
            (folder / name).parent.mkdir(mode=0o750, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", newline="")
    console = output()
    console.print(f"written to {folder}; nothing else was changed. Next:", soft_wrap=True, markup=False)
    new = folder / config.policy.name
    applies = config.policy.is_dir() or set(target.files) == {config.policy.name}
    lines = [f"athanor policy sign {new} --key FILE"] if config.policy_keys else []
    if applies:
        lines.append(f"athanor policy apply {new}")
    else:
        # apply replaces the policy's own file, and this change is in one of its drop-ins.
        lines += [f"cp -r {folder}/. {config.policy.parent}/", "athanor reload"]
    for line in lines:
        console.print(f"  {line}", soft_wrap=True, markup=False)
