"""``athanor kernels build``: the engine's kernels, compiled for this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import exits
from appliance.cli.terminal import fail, output

BUILD_EXAMPLES = """
athanor kernels build /etc/athanor/kernels | then name it under `sandbox: kernels:` in athanor.yaml
"""


def build(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the kernels; made when missing.")],
) -> None:
    """Compile the kernels that engines use on this machine, for any model.

    Needs a C compiler. Run it again after an upgrade and on every machine: an engine that finds
    kernels of another version or processor computes without them and says so in the log.
    """
    from appliance import kernels
    from appliance.errors import ConfigError

    try:
        built = kernels.build(directory)
    except ConfigError as error:
        fail(exits.REFUSED, str(error))
    except OSError as error:
        fail(exits.REFUSED, f"cannot write to {directory}: {(error.strerror or str(error)).lower()}")
    output().print(f"{built.library} ({built.library_bytes // 1024} KiB)", soft_wrap=True)
