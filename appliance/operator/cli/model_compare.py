"""``athanor model compare``: what a quantised, converted or compressed model costs in answers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli.long_work import LongWork, of_counted
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, output, print_data

if TYPE_CHECKING:
    from appliance.operator.comparison import Comparison

COMPARE_EXAMPLES = """
athanor model compare models/llama models/llama-int4 --text tickets.txt | what 4 bits cost, on a text of your own
athanor model compare models/llama models/llama-small --text tickets.txt -o json | of a compressed one: nothing
"""


def compare(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the model that OTHER was made from.")],
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Folder of the quantised or converted model.")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="A text such as the model is used for, UTF-8.")],
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=2, max=1 << 16, help="Most tokens of it.")] = 4096,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="NAME", help="float32, or bfloat16: half the memory, with its roundings.")
    ] = "float32",
    output_format: Output = Format.TABLE,
) -> None:
    """Compare two models on a text: perplexity, divergence, agreement.

    Both compute the text in windows of 512 tokens, one model after the other, on this machine's
    processor. Divergence is by Kullback and Leibler, in nats a token: 0 where nothing has changed.
    """
    from appliance.operator import comparison

    with LongWork("comparing", of_counted("token")) as work:
        found = comparison.compare(folder, other, text, tokens=tokens, dtype=dtype, progress=work.reach)
    _show(found, output_format)


def _show(found: Comparison, output_format: Format) -> None:
    change = found.other_perplexity / found.perplexity - 1.0
    facts = {**asdict(found), "folder": str(found.folder), "other": str(found.other)}
    if print_data({**facts, "perplexity_change": round(change, 6)}, output_format):
        return
    from rich.table import Table

    from appliance.common.figures import counted, printable

    table = Table("model", "perplexity", box=None, pad_edge=False)
    table.add_row(printable(str(found.folder)), f"{found.perplexity:,.3f}")
    table.add_row(printable(str(found.other)), f"{found.other_perplexity:,.3f} ({100 * change:+.2f} %)")
    output().print(table)
    lines = (
        f"divergence  {found.divergence:.4f} nats a token; of a hundred tokens one above {found.divergence_p99:.4f}",
        f"agreement   {100 * found.agreement:.1f} % of tokens have the same likeliest successor",
        f"text        {counted(found.tokens, 'token')} scored, in windows of {found.window}",
    )
    for line in lines:
        output().print(line, soft_wrap=True, markup=False, highlight=False)
