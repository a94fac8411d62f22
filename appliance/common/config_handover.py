"""Hand-over of the resolved configuration to child processes, which then read neither files nor environment for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from pydantic import ValidationError

from appliance.common.config import ApplianceConfig
from appliance.common.errors import ConfigError

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@contextlib.contextmanager
def sealed(config: ApplianceConfig) -> Iterator[int]:
    """Descriptor of a sealed memory file with the configuration; open while the block runs."""
    fd = os.memfd_create("athanor-config", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, config.model_dump_json().encode())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        yield fd
    finally:
        os.close(fd)


def unsealed(fd: int) -> ApplianceConfig:
    """Configuration in such a file. Closes the descriptor; reads at offset 0, since all children share the position.

    Raises:
        ConfigError: the file does not hold a configuration of this version.
    """
    try:
        return ApplianceConfig.model_validate_json(os.pread(fd, os.fstat(fd).st_size, 0))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(
            f"the launcher's configuration is not understood: {first}; restart the whole appliance"
        ) from error
    finally:
        os.close(fd)
