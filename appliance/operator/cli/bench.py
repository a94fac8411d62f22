"""``athanor bench``: how fast a server is, ours or a peer's, as tables, JSON and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.operator.cli.guarded import guard_command
from appliance.operator.cli.help import HelpCommand

EXAMPLES = """
athanor bench | the embedded model: 1, 16 and 64 streams, then arrivals at random
athanor bench closed:32 open:20 --plots figures | other loads, with plots
athanor bench trace:conv.csv,speed=60,prompt=32,output=8,context=500 | a trace, 60 times faster
athanor bench engine:1,16,64 | the engine alone, beside the memory's speed
athanor bench closed:8 --url http://127.0.0.1:8000 --model llama | any OpenAI-compatible server
athanor bench --record --note "beside a build" | only a card of this machine
athanor bench --record zen4.json engine:1,16 | a card, and a load
"""

DEFAULT_LOADS = ("closed:1", "closed:16", "closed:64", "open:8")

MIB = 1 << 20

CARD = "machine-card.json"
"""File of a card that is given none."""

LOAD_KINDS = ("closed:", "open:", "trace:", "engine:", "engine,")
"""Beginnings of a word that is a load and no file."""

Loads = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LOAD...",
        show_default=False,
        help="closed:N streams, open:N requests a second, "
        "trace:FILE, engine:BATCHES. After commas: requests=N; for a trace speed=X (time runs X times "
        "faster), prompt=N and output=N (N times shorter), context=N (longer ones are left out).",
    ),
]
Url = Annotated[str | None, typer.Option(metavar="URL", help="A running server; without it one of ours is started.")]
Keys = Annotated[list[str] | None, typer.Option(metavar="KEY", help="Of a tenant; several take turns.")]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Its model there, or a model folder to serve.")]
PromptTokens = Annotated[int, typer.Option(metavar="N", min=1, max=MIB, help="Of each prompt.")]
OutputTokens = Annotated[int, typer.Option(metavar="N", min=1, max=MIB, help="Of each answer.")]
Tenants = Annotated[int, typer.Option(metavar="N", min=1, max=2, help="Tenants that take turns, of ours.")]
KvMib = Annotated[int, typer.Option(metavar="MIB", min=1, max=MIB, help="KV memory of ours.")]
Dtype = Annotated[str, typer.Option(metavar="TYPE", help="Weights of ours: auto, float32 or bfloat16.")]
Kernels = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        exists=True,
        file_okay=False,
        show_default=False,
        help="Compiled kernels for ours; by default those that `make run` compiled.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", help="Of prompts and arrivals.")]
Price = Annotated[float | None, typer.Option(metavar="PRICE", min=0, help="Of the machine, for the cost of a token.")]
Pid = Annotated[int | None, typer.Option(metavar="PID", min=1, help="A server here, to count its processor time.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")]
Plots = Annotated[Path | None, typer.Option(metavar="DIR", help="Write plots there, PNG and SVG.")]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="[FILE]",
        show_default=False,
        help=f"Write a card of this machine there, by default to {CARD}. Without LOAD nothing else is measured.",
    ),
]
Note = Annotated[
    str, typer.Option(metavar="TEXT", show_default=False, help="For the card: what its readers must know.")
]


class BenchCommand(HelpCommand):
    """The command ``bench``, in which the file of ``--record`` may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the file of a card where the command line does not, then parse."""
        return super().parse_args(ctx, with_card_file(args))


def with_card_file(words: list[str]) -> list[str]:
    """Insert the default file behind each ``--record`` that is followed by nothing, an option or a load. Pure."""
    complete = []
    for place, word in enumerate(words):
        complete.append(word)
        following = words[place + 1 : place + 2]
        if word == "--record" and (not following or following[0].startswith(("-", *LOAD_KINDS))):
            complete.append(CARD)
    return complete


def bench(  # noqa: PLR0913 - a parameter is an option
    context: typer.Context,
    loads: Loads = None,
    url: Url = None,
    api_key: Keys = None,
    model: Model = None,
    prompt_tokens: PromptTokens = 128,
    output_tokens: OutputTokens = 64,
    tenants: Tenants = 2,
    kv_mib: KvMib = 256,
    dtype: Dtype = "auto",
    kernels: Kernels = None,
    seed: Seed = 0,
    price_per_hour: Price = None,
    pid: Pid = None,
    json_file: Json = None,
    plots: Plots = None,
    record: Record = None,
    note: Note = "",
) -> None:
    """Measure a server: throughput, latency, goodput, cost.

    Requests are streamed, greedy and of exact lengths; each load is warmed up before it counts,
    and every failure is shown. Client and server share this machine unless the URL says otherwise,
    so compare servers by ratios taken side by side, never by one absolute figure.

    A card (--record) has facts and the measured memory speed of the machine that the command runs
    on, as JSON: no host name, path, user name or serial number.
    """
    guard_command(context)
    from appliance.operator.cli import bench_run

    wish = bench_run.Wish(
        loads=tuple(loads or (DEFAULT_LOADS if record is None else ())),
        url=url,
        api_keys=tuple(api_key or ()),
        model=model,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tenants=tenants,
        kv_bytes=kv_mib * MIB,
        dtype=dtype,
        kernels=kernels,
        seed=seed,
        price_per_hour=price_per_hour,
        pid=pid,
        json_file=json_file,
        plots=plots,
        record=record,
        note=note,
    )
    raise typer.Exit(bench_run.run(wish))
