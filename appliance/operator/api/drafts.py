"""Policy files of a request, as a folder for the time of its answer. Blocks."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.common.errors import InvalidRequestError, os_errors_as
from appliance.operator.api.generated import policy_pb2 as pb

MAX_FILES = 4_096
"""Most files of a policy in one request."""

MAX_NAME_CHARS = 256
"""Most characters of a file's name."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*){0,2}")
"""Names of files below a folder, and below its policy.d and public; no part of one leads out of it."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A policy in a folder of its own."""

    folder: Path
    policy: Path
    """Its file or folder, named as the configured one."""

    def shown(self, text: str) -> str:
        """Return a text in which files have the names of the request."""
        return text.replace(f"{self.folder}/", "")


@contextmanager
def draft(files: Sequence[pb.PolicyFile], configured: Path) -> Iterator[Draft]:
    """Write the files for the time of the block. ``configured``: the policy that the configuration names.

    Raises:
        InvalidRequestError: the names are unusable, or none is the policy's.
    """
    named = _named(files, configured)
    with tempfile.TemporaryDirectory(prefix="athanor-policy-") as made:
        folder = Path(made)
        with os_errors_as("cannot write the draft of the policy"):
            for name, text in named.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8", newline="")
        yield Draft(folder, folder / configured.name)


def _named(files: Sequence[pb.PolicyFile], configured: Path) -> dict[str, str]:
    if len(files) > MAX_FILES:
        raise InvalidRequestError(f"a policy has at most {MAX_FILES} files", param="files")
    found: dict[str, str] = {}
    for file in files:
        name = file.name or (configured.name if len(files) == 1 else "")
        if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{name[:80]!r} is no name of a policy's file below the folder of {configured.name}", param="files"
            )
        if name in found:
            raise InvalidRequestError(f"two files have the name {name}", param="files")
        found[name] = file.text
    inside = f"{configured.name}/"
    if not any(name == configured.name or name.startswith(inside) for name in found):
        raise InvalidRequestError(
            f"no file is {configured.name}, which is the policy that the configuration names", param="files"
        )
    if configured.name in found and any(name.startswith(inside) for name in found):
        raise InvalidRequestError(f"{configured.name} is a file and a folder at once", param="files")
    return found
