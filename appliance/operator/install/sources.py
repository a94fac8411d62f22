"""Files to install: from the source tree, or from the installed distribution."""

from __future__ import annotations

import sys
from pathlib import Path

from appliance.common.errors import ConfigError
from appliance.operator.install.rendering import GATEWAY_UNIT

CONFIG, POLICY = "athanor.yaml", "athanor.policy.yaml"
"""Names of the first configuration and the first policy among the sources."""


def source_folder() -> Path:
    """The folder ``systemd/`` of this installation.

    Raises:
        ConfigError: it came without one.
    """
    return _base(f"systemd/{GATEWAY_UNIT}", "the units are") / "systemd"


def document_folder() -> Path:
    """The folder that has ``README.md``, ``docs/`` and ``examples/`` of this installation.

    Raises:
        ConfigError: it came without them.
    """
    return _base("README.md", "the documents are")


def _base(name: str, what: str) -> Path:
    """A source checkout, or what a wheel put below the environment: both have the files at the same relative paths."""
    here, installed = Path(__file__).resolve().parents[3], Path(sys.prefix) / "share" / "athanor"
    for folder in (here, installed):
        if (folder / name).is_file():
            return folder
    raise ConfigError(f"{what} missing: looked for {name} in {here} and {installed}; install athanor again")


def read_sources(folder: Path) -> dict[str, str]:
    """Name to text of every file in it.

    Raises:
        ConfigError: one cannot be read.
    """
    try:
        return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.is_file()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {folder}: {error}") from error


def own_command() -> Path:
    """The ``athanor`` that runs now, as an absolute path; the one of this Python where that cannot be told."""
    started = Path(sys.argv[0])
    if started.name == "athanor" and started.is_absolute() and started.is_file():
        return started
    return Path(sys.prefix) / "bin" / "athanor"
