"""``athanor model convert | digest``: GGUF files into folders that can be served, folders into compressed ones; what
pins a folder."""

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
    from appliance.operator.compression import CompressedFolder
    from appliance.operator.conversion import Converted
    from appliance.operator.conversion_child import Progress
    from appliance.operator.gguf_export import GgufMade
    from appliance.operator.quantisation import QuantisedFolder

CONVERT_EXAMPLES = """
athanor model convert llama.gguf models/llama | then name the folder under `models:` in athanor.yaml
athanor model convert llama.gguf models/llama --dtype float32 | every number as the file means it
athanor model convert models/llama models/llama-small --compress | the weights in two thirds of their bytes
athanor model convert models/llama-small models/llama --expand | and back, every bit as it was
athanor model convert models/llama models/llama-int4 --quantise int4 | matrices in 4 bits, at a loss: model compare
athanor model convert models/llama llama.gguf --to-gguf --dtype q8_0 | for llama.cpp
"""

DIGEST_EXAMPLES = """
athanor model digest models/llama | the line for its entry under `models:` in athanor.yaml
athanor model digest adapters/support | of an adapter, for its entry under `adapters:` there
"""


def digest(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the model, or of an adapter.")],
    output_format: Output = Format.TABLE,
) -> None:
    """Print the digest of a model's files, or of an adapter's, as the line that pins them.

    It covers every file that a sandbox gets, by name and content. With the line in the model's entry
    of athanor.yaml no other files are served under its name.
    """
    from appliance.common.adapter_files import FILES, is_adapter_folder, read_adapter
    from appliance.common.catalog import find_files, read_model
    from appliance.common.model_digests import DigestCache

    name = folder.resolve().name
    if is_adapter_folder(folder):
        _print_digest(read_adapter(name, folder).digest, folder, list(FILES), output_format)
        return
    sizes = {path: path.stat().st_size for part in find_files(name, folder) for _, path in part}
    done = 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        work.reach(done, sum(sizes.values()))

    with LongWork("reading the model", of_bytes) as work:
        files = read_model(name, folder, DigestCache(on_read=read))
    _print_digest(files.digest, folder, [name for name, _ in files.engine + files.text], output_format)


def _print_digest(found: str, folder: Path, names: list[str], output_format: Format) -> None:
    if not print_data({"digest": found, "folder": str(folder), "files": names}, output_format):
        output().print(f"digest: {found}", soft_wrap=True, markup=False, highlight=False)


def convert(  # noqa: PLR0913 - a parameter is an option
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A GGUF file, or a model folder; it is read inside a wall.")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the result; made, or empty. A file for --to-gguf.")
    ],
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="From and to GGUF: auto, float32, bfloat16 or float16; to it also q8_0. auto: as it is, bfloat16 "
            "where a GGUF file is packed.",
        ),
    ] = "auto",
    compress: Annotated[
        bool, typer.Option("--compress", help="Compress a folder's bfloat16 weights without loss.")
    ] = False,
    expand: Annotated[bool, typer.Option("--expand", help="Undo --compress.")] = False,
    quantise: Annotated[
        str | None,
        typer.Option("--quantise", metavar="int8|int4", help="Round a folder's matrices to 8 or 4 bits a weight."),
    ] = None,
    to_gguf: Annotated[bool, typer.Option("--to-gguf", help="Write a folder as a GGUF file.")] = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Convert a GGUF file into a model folder and back, compress or quantise one.

    Packed weights of a GGUF file are unpacked: a file of 4 bits a weight becomes about four times as
    large. A compressed folder is served like the one it was made from: all that was written is read
    again, and every bit compared. What quantising costs in answers, athanor model compare measures.
    """
    from appliance.common.errors import ConfigError
    from appliance.operator.conversion import convert as work

    if compress + expand + to_gguf + (quantise is not None) > 1:
        raise ConfigError("--compress, --expand, --quantise and --to-gguf exclude each other; leave one")
    if to_gguf:
        _export(source, folder, dtype, output_format)
        return
    if compress or expand or quantise is not None:
        if not source.is_dir() or dtype != "auto":
            raise ConfigError(
                "--compress, --expand and --quantise take a model folder and no --dtype; convert a GGUF file first"
            )
        if quantise is not None:
            _quantise(source, folder, quantise, output_format)
        else:
            _rewrite(source, folder, compress, output_format)
        return
    if source.is_dir():
        raise ConfigError(
            f"{source} is a folder; add --compress, --expand, --quantise or --to-gguf, or name a GGUF file"
        )
    with ExitStack() as stack:
        done = work(source, folder, dtype=dtype, progress=_progress(stack))
    _show(done, output_format)


def _rewrite(source: Path, folder: Path, compress: bool, output_format: Format) -> None:
    from appliance.operator import compression

    with ExitStack() as stack:
        form = compression.CODED if compress else compression.PLAIN
        done = compression.compress(source, folder, form=form, progress=_progress(stack))
    _show_sizes(done, output_format)


def _quantise(source: Path, folder: Path, form: str, output_format: Format) -> None:
    from appliance.operator import quantisation

    with ExitStack() as stack:
        done = quantisation.quantise(source, folder, form=form, progress=_progress(stack))
    _show_quantised(done, output_format)


def _export(source: Path, file: Path, dtype: str, output_format: Format) -> None:
    from appliance.common.errors import ConfigError
    from appliance.operator import gguf_export

    if not source.is_dir():
        raise ConfigError("--to-gguf takes a model folder")
    with ExitStack() as stack:
        done = gguf_export.export(source, file, dtype=dtype, progress=_progress(stack))
    _show_exported(done, output_format)


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


def _show_sizes(done: CompressedFolder, output_format: Format) -> None:
    ratio = done.after / max(done.before, 1)
    if print_data({**asdict(done), "folder": str(done.folder), "ratio": round(ratio, 4)}, output_format):
        return
    from rich.table import Table

    from appliance.common.figures import printable, size

    table = Table("tensors", "number", "plain", "here", "ratio", box=None, pad_edge=False)
    for one in done.classes:
        parts = (str(one.tensors), size(one.before), size(one.after), f"{one.after / max(one.before, 1):.3f}")
        table.add_row(printable(one.name), *parts)
    output().print(table)
    tensors = f"{done.coded} of {counted(done.tensors, 'tensor')} compressed"
    words = f"{done.folder}: {tensors}, {size(done.before)} in {size(done.after)} ({ratio:.3f}), every bit compared"
    output().print(printable(words), soft_wrap=True, markup=False)
    errors().print(printable(f"computed with {done.codec}"), markup=False)


def _show_quantised(done: QuantisedFolder, output_format: Format) -> None:
    ratio = done.after / max(done.before, 1)
    if print_data({**asdict(done), "folder": str(done.folder), "ratio": round(ratio, 4)}, output_format):
        return
    from rich.table import Table

    from appliance.common.figures import printable, size

    table = Table("tensors", "number", "plain", "here", "ratio", "error", box=None, pad_edge=False)
    for one in done.classes:
        parts = (str(one.tensors), size(one.before), size(one.after), f"{one.after / max(one.before, 1):.3f}")
        table.add_row(printable(one.name), *parts, f"{100 * one.error:.2f} %" if one.error else "none")
    output().print(table)
    tensors = f"{done.packed} of {counted(done.tensors, 'tensor')} in {done.form}"
    words = f"{done.folder}: {tensors}, {size(done.before)} in {size(done.after)} ({ratio:.3f})"
    output().print(printable(words), soft_wrap=True, markup=False)


def _show_exported(done: GgufMade, output_format: Format) -> None:
    if print_data({**asdict(done), "file": str(done.file)}, output_format):
        return
    from appliance.common.figures import printable, size

    words = f"{done.file}: {done.architecture}, {counted(done.tensors, 'tensor')} of {', '.join(done.types)}"
    output().print(printable(f"{words} ({size(done.weight_bytes)})"), soft_wrap=True, markup=False)
