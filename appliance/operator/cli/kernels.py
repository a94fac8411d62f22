"""``athanor kernels build | gpu``: the engine's kernels, compiled ahead of time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from appliance.common.errors import os_errors_as
from appliance.common.figures import counted
from appliance.operator.cli.long_work import LongWork, of_counted
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, output, print_data

BUILD_EXAMPLES = """
athanor kernels build /etc/athanor/kernels | then name it under `sandbox: kernels:` in athanor.yaml
"""

GPU_EXAMPLES = """
athanor kernels gpu /etc/athanor/gpu-kernels --model /srv/llama --architecture sm_90 | for an H100 or H200
athanor image build images/out --triton-cache /etc/athanor/gpu-kernels | or into the image
"""

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the kernels; made when missing.")]


def build(directory: Directory) -> None:
    """Compile the kernels that engines use on a CPU, for any model.

    Needs a C compiler. One library is made for each kind of processor of this machine's
    architecture; an engine takes the best that its processor runs. Run it again after an upgrade:
    an engine that finds kernels of another version computes without them and says so in the log.
    """
    from appliance.operator import kernels

    with (
        os_errors_as(f"cannot write to {directory}"),
        LongWork("compiling kernels", of_counted("library", "libraries")) as work,
    ):
        built = kernels.build(directory, reached=work.reach)
    for one in built:
        output().print(f"{one.library} ({one.library_bytes // 1024} KiB)", soft_wrap=True)


def gpu(  # noqa: PLR0913 - options of one command
    directory: Directory,
    model: Annotated[Path, typer.Option(metavar="DIR", help="The model; only its config.json is read.")],
    architecture: Annotated[str, typer.Option(metavar="SM", help="sm_80: A100; sm_90: H100 and H200.")],
    dtype: Annotated[str, typer.Option(help="As the engine computes: bfloat16 or float32.")] = "bfloat16",
    block_size: Annotated[int, typer.Option(min=1, max=512, help="As in the model's configuration.")] = 16,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, max=4096, help="As `athanor doctor` tells: by card, unless the model's entry says so.")
    ] = 256,
    weights: Annotated[str, typer.Option(help="As in the model's entry: stored or fp8.")] = "stored",
    output_format: Output = Format.TABLE,
) -> None:
    """Compile all kernels that serving a model on a GPU can launch. No GPU has to be there.

    Needs a C compiler and Triton, and takes minutes. The folder's name says what it is for:
    architecture, Triton, version of our kernels, and the model with these numbers. An engine on a
    GPU takes the folder that is for it, changes nothing in it, compiles nothing, and does not start
    where there is none.
    """
    from appliance.operator import gpu_kernels

    wanted = gpu_kernels.GpuKernels(
        architecture=architecture,
        model=model,
        dtype=dtype,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        weights=weights,
    )
    with os_errors_as(f"cannot write to {directory}"), LongWork(f"compiling kernels for {architecture}"):
        built = gpu_kernels.build(directory, wanted)
    if not print_data({**asdict(built), "folder": str(built.folder)}, output_format):
        output().print(f"{built.folder} ({counted(built.kernels, 'kernel')}, {built.digest})", soft_wrap=True)
