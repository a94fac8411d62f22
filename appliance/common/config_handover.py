"""Hand-over of the resolved configuration to child processes, which start from neither files nor environment."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance.common.config import ApplianceConfig
from appliance.common.errors import ConfigError

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Handover(BaseModel):
    """The configuration, and what it was read with beside its file: a reload reads it again with the same."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: ApplianceConfig
    options: tuple[str, ...] = ()
    """``KEY=VALUE`` of the command line."""
    environment: dict[str, str] = {}
    """``ATHANOR_*`` variables."""


@contextlib.contextmanager
def sealed(given: Handover) -> Iterator[int]:
    """Descriptor of a sealed memory file with what is handed over; open while the block runs."""
    fd = os.memfd_create("athanor-config", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, given.model_dump_json().encode())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        yield fd
    finally:
        os.close(fd)


def unsealed(fd: int) -> Handover:
    """What is in such a file. Closes the descriptor; reads at offset 0, since all children share the position.

    Raises:
        ConfigError: the file does not hold a configuration of this version.
    """
    try:
        return Handover.model_validate_json(os.pread(fd, os.fstat(fd).st_size, 0))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(
            f"the launcher's configuration is not understood: {first}; restart the whole appliance"
        ) from error
    finally:
        os.close(fd)
