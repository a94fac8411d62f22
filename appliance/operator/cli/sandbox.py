"""``athanor sandbox calls``: programs of sandboxes under load, their system calls collected or their lists enforced.

An operator's tool, apart from what serves: it starts the programs itself, without a sandbox, on a model that the
operator names, and nothing that serves can be told to do this.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.long_work import LongWork
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

CALLS_EXAMPLES = """
athanor sandbox calls --collect --model /srv/llama | engine and text worker on this machine
athanor sandbox calls --collect --program engine --backend device --model /srv/llama | on a GPU
athanor sandbox calls --model /srv/llama | do they live under their lists?
"""


class Program(StrEnum):
    """``--program``."""

    ENGINE = "engine"
    TEXT = "text"
    BOTH = "both"


class Backend(StrEnum):
    """``--backend``."""

    AUTO = "auto"
    DEVICE = "device"
    PLAIN = "plain"


def calls(  # noqa: PLR0913 - a parameter is an option
    model: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the model.")],
    collect: Annotated[bool, typer.Option("--collect", help="Record calls outside of the lists; end nothing.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --collect: listed calls keep their speed and are not counted.")
    ] = False,
    program: Annotated[Program, typer.Option(help="Which program.")] = Program.BOTH,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Seconds of load for each program.")] = 20.0,
    backend: Annotated[Backend, typer.Option(help="Where the engine computes.")] = Backend.AUTO,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Compute threads of the engine.")] = 2,
    dtype: Annotated[str, typer.Option(help="As in the model's configuration.")] = "auto",
    kernels: Annotated[Path | None, typer.Option(metavar="DIR", help="Compiled kernels for the processor.")] = None,
    gpu_kernels: Annotated[Path | None, typer.Option(metavar="DIR", help="Compiled kernels for the GPU.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, max=4096, help="As in the model's configuration.")] = 32,
    max_context: Annotated[int, typer.Option(min=2, help="As in the model's configuration.")] = 1024,
    output_format: Output = Format.TABLE,
) -> None:
    """Run an engine and a text worker under load and compare their system calls with their lists.

    A sandbox's program ends at the first call that is not on its list. With `--collect` such calls
    are made and reported instead: name, arguments, files, threads. For a new library, driver or
    processor. The programs are started here, without a sandbox and from this account, so name a
    model that you trust. Root, or a kernel that lets a parent trace its children, is needed. Exit
    code 1: a call was outside of a list, or a program ended.
    """
    from appliance.operator.calls import report
    from appliance.operator.calls.session import Mode, Trial, run
    from engine.config import EngineConfig, TextConfig

    folder = model.absolute()
    if not folder.is_dir():
        fail(exits.REFUSED, f"{model} is no folder")
    engine = EngineConfig(
        model_dir=str(folder),
        model_digest="00",
        backend=backend.value,
        threads=threads,
        dtype=dtype,
        kernels="" if kernels is None else str(kernels.absolute()),
        gpu_kernels="" if gpu_kernels is None else str(gpu_kernels.absolute()),
        max_num_seqs=max_num_seqs,
        max_context=max_context,
        spill=True,
    )
    configs: dict[str, EngineConfig | TextConfig] = {"engine": engine, "text": TextConfig(model_dir=str(folder))}
    mode = (Mode.OUTSIDE if quick else Mode.COLLECT) if collect else Mode.ENFORCE
    outcomes = {}
    for name, config in configs.items():
        if program.value in (name, Program.BOTH.value):
            with LongWork(f"{name} under load"):
                outcomes[name] = run(Trial(config=config, mode=mode, seconds=seconds))
    document = {name: {**asdict(one), "lived": one.lived} for name, one in outcomes.items()}
    if not print_data(document, output_format):
        for name, one in outcomes.items():
            for line in (f"{name}: {report.verdict(one, mode)}", *report.lines(one, mode)[1:]):
                output().print(line, soft_wrap=True, markup=False)
    if not all(one.lived and not one.outside for one in outcomes.values()):
        raise typer.Exit(exits.REFUSED)
