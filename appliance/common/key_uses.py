"""The file of last uses of API keys, in the folder of the audit log. Blocks; the supervisor writes, commands read.

``{"used": {"acme-1@1764064800": 1764151200}}``: a secret's name (``appliance.common.keys.secret_name``) and the second
of its last use, both in Unix time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.keys import KEY_ID, MAX_KEYS
from appliance.common.strict_json import JsonError, parse_json
from isolation.host.atomic_file import write_whole

NAME = "key-uses.json"
FILE_MODE = 0o640

MAX_USES = 2 * MAX_KEYS
"""Most secrets in the file: two of each key."""

MAX_BYTES = 32 << 20
"""Most bytes of the file: ``MAX_USES`` names with their times."""

_SECRET = re.compile(rf"{KEY_ID.pattern}@[0-9]{{1,12}}")


def is_secret_name(text: str) -> bool:
    """Whether a text is a name that a secret may have."""
    return _SECRET.fullmatch(text) is not None


def read_uses(folder: Path) -> dict[str, int]:
    """Return the last uses in a folder by secret; none where there is no file yet.

    Raises:
        ConfigError: the file cannot be read, or is no such file.
    """
    path = folder / NAME
    try:
        with os_errors_as(f"cannot read {path}"):
            if not path.exists():
                return {}
            with path.open("rb") as file:
                document = parse_json(file.read(MAX_BYTES + 1))
    except JsonError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    used = document.get("used") if isinstance(document, dict) and document.keys() == {"used"} else None
    if not isinstance(used, dict) or not all(is_secret_name(name) and type(at) is int for name, at in used.items()):
        raise ConfigError(f"{path}: expected the last uses of keys")
    return used


def write_uses(folder: Path, used: Mapping[str, int]) -> None:
    """Write the last uses.

    Raises:
        ConfigError: they cannot be written.
    """
    with os_errors_as(f"cannot write {folder / NAME}"):
        write_whole(folder / NAME, json.dumps({"used": dict(used)}).encode(), FILE_MODE)
