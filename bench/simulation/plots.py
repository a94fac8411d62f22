"""Plots of a simulation, in the style of ``athanor bench --plots``: each as SVG and as PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from appliance.operator.bench.plots import BLUE, DPI, GREEN, GREY, HALO, INK, ORANGE, RED, STYLE, TITLE_IN
from bench.simulation.report import seconds

Figures = Mapping[str, Any]

MIXED = ("named", "spread", "tag", "bounded", "picker", "picker-fresh", "least")
"""Runs that differ by the router's rule."""


def draw(document: Figures, folder: Path) -> list[Path]:
    """Draw every plot that there are figures for; gives the files written.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs, settings = document["runs"], document["settings"]
    line = f"SIMULATION   {settings['hosts']:,} hosts, {settings['tenants']:,} tenants, {settings['card']}"
    wanted: list[tuple[str, Callable[[], Figure]]] = []
    if shown := [name for name in (*MIXED, *[name for name in runs if name.startswith("split, ")]) if name in runs]:
        wanted.append(("routing", lambda: routing({name: runs[name] for name in shown}, line)))
    if "deaths" in runs:
        wanted.append(("deaths", lambda: deaths(runs["deaths"], line)))
    if noise := {name: one["tenants"] for name, one in runs.items() if "tenants" in one}:
        wanted.append(("noisy", lambda: noisy(noise, line)))
    written = []
    for name, make in wanted:
        with mpl.rc_context(STYLE):  # type: ignore[arg-type]
            figure = make()
            for kind in ("svg", "png"):
                path = folder / f"simulation-{name}.{kind}"
                metadata = {"Date": None} if kind == "svg" else {}
                figure.savefig(path, dpi=DPI, metadata=metadata, bbox_inches="tight", pad_inches=0.2)
                written.append(path)
    return written


def routing(runs: Mapping[str, Figures], line: str) -> Figure:
    """Time to first token, gaps and the cached share of each run."""
    figure = Figure(figsize=(11, 1.9 + 0.42 * len(runs)), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    places = list(range(len(runs)))
    for axis, key, text in zip(axes, ("ttft_s", "itl_s"), ("Time to first token", "Gap between tokens"), strict=False):
        ranges(axis, [one[key] for one in runs.values()])
        axis.set_title(f"{text}: p50, p90, p99", loc="left", fontsize=10, color=INK)
    axes[2].barh(places, [100 * one["cached_share"] for one in runs.values()], height=0.5, color=GREEN, zorder=2)
    for place, one in zip(places, runs.values(), strict=True):
        axes[2].annotate(
            f"{100 * one['cached_share']:.1f} %", (100 * one["cached_share"], place), (5, 0),
            textcoords="offset points", va="center", fontsize=8, color=INK, bbox=HALO, zorder=4,
        )  # fmt: skip
    most = 100 * max(one["cached_bound"] for one in runs.values())
    axes[2].axvline(most, color=RED, linewidth=0.9, linestyle=(0, (4, 3)))
    axes[2].annotate(f"bound {most:.0f} %", (most, -0.75), color=RED, fontsize=8, ha="right", va="center")
    axes[2].set_xlim(0, most * 1.15)
    axes[2].grid(visible=True, axis="x")
    axes[2].set_title("Prompt tokens found in the cache, %", loc="left", fontsize=10, color=INK)
    axes[0].set_yticks(places, list(runs), color=INK)
    axes[0].set_ylim(len(runs) - 0.4, -1)
    title(figure, "Rules of routing, and prefill apart from decode", line)
    return figure


def ranges(axis: Axes, found: Sequence[Figures]) -> None:
    """Draw p50, p90 and p99 of each run on a logarithmic axis of time."""
    for place, one in enumerate(found):
        values = [one[name] for name in ("p50", "p90", "p99")]
        axis.plot(values, [place] * 3, color=BLUE, alpha=0.25, linewidth=6, solid_capstyle="round", zorder=2)
        axis.scatter(values, [place] * 3, s=(46, 26, 26), color=BLUE, zorder=3)
        for value, side in ((values[0], -8), (values[2], 8)):
            axis.annotate(
                seconds(value), (value, place), (side, 0), textcoords="offset points", va="center", fontsize=8,
                ha="left" if side > 0 else "right", color=INK,
            )  # fmt: skip
    axis.set_xscale("log")
    axis.margins(x=0.35)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(visible=True, axis="x")


def tick(value: float) -> str:
    """Return a round time."""
    return f"{value:g} s" if value >= 1 else f"{1e3 * value:g} ms"


def deaths(found: Figures, line: str) -> Figure:
    """Second by second, before and behind the death of some hosts."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    rows = [row for row in found["by_second"] if row["ttft_s"]["count"]]
    at = [row["second"] + 0.5 for row in rows]
    for part, color in (("p50", BLUE), ("p99", ORANGE)):
        upper.plot(at, [row["ttft_s"][part] for row in rows], color=color, linewidth=2, marker="o", markersize=4)
        upper.annotate(part, (at[-1], rows[-1]["ttft_s"][part]), (6, 0), textcoords="offset points", color=color)
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    upper.yaxis.set_minor_formatter(NullFormatter())
    lower.plot(at, [100 * row["cached_share"] for row in rows], color=GREEN, linewidth=2, marker="o", markersize=4)
    lower.set_ylim(bottom=0)
    moment = found["death_at"]
    for axis, text in ((upper, "Time to first token"), (lower, "Prompt tokens found in the cache, %")):
        axis.axvline(moment, color=RED, linewidth=0.9, linestyle=(0, (4, 3)))
        axis.set_title(text, loc="left", fontsize=10, color=INK)
        axis.grid(visible=True, axis="y")
    lost = found["losses"]
    upper.annotate(
        f"{lost['hosts']} hosts die", (moment, 1.0), (4, -10), xycoords=("data", "axes fraction"),
        textcoords="offset points", color=RED, fontsize=8,
    )  # fmt: skip
    lower.set_xlabel("simulated seconds")
    title(
        figure, "Deaths of hosts",
        f"{line}   {lost['streams']:,} streams broken, {lost['retried']:,} requests moved, {lost['failed']:,} failed",
    )  # fmt: skip
    return figure


def noisy(runs: Mapping[str, Figures], line: str) -> Figure:
    """Time to first token of all others beside a noisy tenant."""
    figure = Figure(figsize=(8.5, 1.7 + 0.42 * len(runs)), layout="constrained")
    axis = figure.subplots()
    ranges(axis, [one["others_ttft_s"] for one in runs.values()])
    axis.set_yticks(range(len(runs)), [name.removesuffix(", a tenth") for name in runs], color=INK)
    axis.set_ylim(len(runs) - 0.4, -0.6)
    title(figure, "Others' time to first token beside a noisy tenant: p50, p90, p99", f"{line}; a tenth of both here")
    return figure


def title(figure: Figure, text: str, line: str) -> None:
    """Put a title and one line above everything else."""
    height = figure.get_figheight()
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - TITLE_IN / height))
    figure.text(0.006, 1 - 0.02 / height, text, fontsize=14, fontweight="bold", color=INK, va="top")
    figure.text(0.006, 1 - 0.32 / height, line, fontsize=9, color=GREY, va="top")
