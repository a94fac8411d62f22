"""A YAML file of the configuration: its values, and the place of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from appliance.common.errors import ConfigError, os_errors_as
from policy.errors import PolicyError
from policy.positions import Locator, load_yaml

MAX_CONFIG_BYTES = 256 << 10
"""Bytes of athanor.yaml, and of each file beside it."""

Place = tuple[str | int, ...]
"""Path of a value: ``("models", 0, "name")``."""


class ConfigText:
    """One file with a mapping."""

    def __init__(self, path: Path) -> None:
        """Read it.

        Raises:
            ConfigError: it cannot be read, or is no mapping.
        """
        self.path = path
        self._locate = Locator()
        values = self._read()
        if not isinstance(values, dict):
            raise ConfigError(f"{path}:1:1: must be a mapping; docs/reference/configuration.md lists its keys")
        self.values: dict[str, Any] = values

    def _read(self) -> Any:
        path = self.path
        with os_errors_as(f"cannot read {path}"):
            data = path.read_bytes()
        if len(data) > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        try:
            values, self._locate = load_yaml(data.decode(), str(path))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8") from error
        except PolicyError as error:
            raise ConfigError(str(error)) from error
        return values

    def place(self, where: Place, *, of_key: bool = False) -> str:
        """``FILE:LINE:COLUMN`` of a value, or of its key."""
        line, column = self._locate.key(where) if of_key else self._locate(where)
        return f"{self.path}:{line}:{column}"

    def has(self, where: Place) -> bool:
        """Whether the file writes this value."""
        node: Any = self.values
        for part in where:
            known = isinstance(node, dict) or (isinstance(node, list) and isinstance(part, int) and part < len(node))
            if not known or (isinstance(node, dict) and part not in node):
                return False
            node = node[part]
        return True
