"""``athanor bench``: how fast a server is, ours or a peer's, as tables, JSON and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
athanor bench | the embedded model: 1, 16 and 64 streams, then arrivals at random
athanor bench closed:32 open:20 --plots figures | other loads, with plots
athanor bench trace:conv.csv,speed=60,prompt=32,output=8,context=500 | a trace, 60 times faster
athanor bench engine:1,16,64 | the engine alone, beside the memory's speed
athanor bench closed:8 --url http://127.0.0.1:8000 --model llama | any OpenAI-compatible server
"""

DEFAULT_LOADS = ("closed:1", "closed:16", "closed:64", "open:8")

MIB = 1 << 20

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


def bench(  # noqa: PLR0913 - a parameter is an option
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
) -> None:
    """Measure a server: throughput, latency, goodput, cost.

    Requests are streamed, greedy and of exact lengths; each load is warmed up before it counts,
    and every failure is shown. Client and server share this machine unless the URL says otherwise,
    so compare servers by ratios taken side by side, never by one absolute figure.
    """
    from appliance.operator.cli import bench_run

    wish = bench_run.Wish(
        loads=tuple(loads or DEFAULT_LOADS),
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
    )
    raise typer.Exit(bench_run.run(wish))
