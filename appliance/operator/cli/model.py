"""``athanor model convert | digest``: a GGUF file into a folder that can be served; what pins a folder."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.figures import counted
from appliance.operator.cli.long_work import LongWork, of_bytes
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, errors, output, print_data

if TYPE_CHECKING:
    from appliance.operator.conversion import Converted, Progress

CONVERT_EXAMPLES = """
athanor model convert llama.gguf models/llama | then name the folder under `models:` in athanor.yaml
athanor model convert llama.gguf models/llama --dtype float32 | every number as the file means it
"""


DIGEST_EXAMPLES = """
athanor model digest models/llama | the line for its entry under `models:` in athanor.yaml
"""


def digest(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the model.")],
    output_format: Output = Format.TABLE,
) -> None:
    """Print the digest of a model's files, as the line that pins them.

    It covers every file that a sandbox gets, by name and content. With the line in the model's entry
    of athanor.yaml no other files are served under its name.
    """
    from appliance.common.catalog import find_files, read_model
    from appliance.common.model_digests import DigestCache

    name = folder.resolve().name
    sizes = {path: path.stat().st_size for part in find_files(name, folder) for _, path in part}
    done = 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        work.reach(done, sum(sizes.values()))

    with LongWork("reading the model", of_bytes) as work:
        files = read_model(name, folder, DigestCache(on_read=read))
    names = [name for name, _ in files.engine + files.text]
    if not print_data({"digest": files.digest, "folder": str(folder), "files": names}, output_format):
        output().print(f"digest: {files.digest}", soft_wrap=True, markup=False, highlight=False)


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC.gguf", help="The file; it is read inside a wall.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the model; made, or empty.")],
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="auto, float32, bfloat16 or float16. auto: as in the file, bfloat16 where it is packed.",
        ),
    ] = "auto",
    output_format: Output = Format.TABLE,
) -> None:
    """Convert a GGUF file into a folder in the Hugging Face layout.

    Packed weights are unpacked: a file of 4 bits a weight becomes about four times as large.
    """
    from appliance.operator.conversion import convert as work

    with ExitStack() as stack:
        done = work(source, folder, dtype=dtype, progress=_progress(stack))
    _show(done, output_format)


def _progress(stack: ExitStack) -> Progress:
    """A bar on standard error where a person watches, else a line now and then."""
    console = errors()
    if not console.is_terminal:
        return stack.enter_context(LongWork("converting", of_bytes)).reach
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    bar = stack.enter_context(
        Progress(
            TextColumn("converting"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
    )
    task = bar.add_task("", total=None)
    return lambda written, total: bar.update(task, completed=written, total=total)


def _show(done: Converted, output_format: Format) -> None:
    if print_data({**asdict(done), "folder": str(done.folder)}, output_format):
        return
    from appliance.common.figures import printable

    tensors = counted(done.tensors, "tensor")
    words = f"{done.folder}: {done.architecture}, {tensors} of {', '.join(done.types)} as {done.dtype}"
    output().print(printable(f"{words} ({done.weight_bytes / (1 << 20):,.1f} MiB)"), soft_wrap=True, markup=False)
    if not done.chat_template:
        errors().print("the file has no chat template: chats need a chat_template.jinja in the folder", markup=False)
