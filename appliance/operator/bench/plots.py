"""Figures as plots that a person can look at: each as PNG and as SVG, on a light ground, labelled where the eye is.

What is drawn follows from what was measured: a frontier needs two closed loops, a timeline one open loop or trace.
Colours are Okabe and Ito's, which differ for colour-blind readers too ("Color Universal Design", 2008).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#6b7280"
INK, PAPER, LINE = "#1f2937", "#ffffff", "#e5e7eb"

HALO = {"boxstyle": "square,pad=0.15", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.85}
"""Behind a label, so that no line runs through it."""

TITLE_IN = 0.55
"""Inches that a title and its line take."""

DPI = 160
"""Pixels an inch of the PNG files."""

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "athanor",
}

Bounds = Mapping[str, Sequence[tuple[float, str]]]

_BOUNDS: Bounds = {"ttft": ((0.5, "500 ms"), (2.0, "2 s")), "tpot": ((0.03, "30 ms"), (0.1, "100 ms")), "itl": ()}
_PANELS = (("ttft", "Time to first token"), ("tpot", "Time per later token"), ("itl", "Gap between chunks"))


def draw(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Every plot that the document of ``athanor bench --json`` has figures for; gives the files written.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    loads = [one for one in document.get("loads", ()) if one["ttft"]]
    closed = [one for one in loads if one["load"].startswith("closed:")]
    timed = [one for one in loads if one.get("timeline")]
    wanted: list[tuple[str, Callable[[], Figure]]] = []
    if loads:
        wanted.append(("latency", lambda: latency(loads, document["target"])))
    if len(closed) > 1:
        wanted.append(("frontier", lambda: frontier(closed, document["target"])))
    wanted += [
        (f"timeline-{place}", lambda one=one: timeline(one, document["target"]))  # type: ignore[misc]
        for place, one in enumerate(timed, 1)
    ]
    if document.get("engine"):
        wanted.append(("engine", lambda: engine(document["engine"])))
    if document.get("peers"):
        wanted.append(("peers", lambda: peers(document["peers"])))
    written = []
    for name, make in wanted:
        with mpl.rc_context(STYLE):  # type: ignore[arg-type]  # its stub expects a literal
            figure = make()
            for kind in ("png", "svg"):
                path = folder / f"{name}.{kind}"
                # No date in the file: the same figures give the same bytes.
                figure.savefig(
                    path, dpi=DPI, metadata={"Date": None} if kind == "svg" else {}, bbox_inches="tight", pad_inches=0.2
                )
                written.append(path)
    return written


def latency(loads: Sequence[Mapping[str, Any]], target: str) -> Figure:
    """From P50 over P95 to P99 of each load, three quantities side by side on logarithmic axes."""
    figure = Figure(figsize=(11, 1.6 + 0.42 * len(loads)), layout="constrained")
    axes = figure.subplots(1, len(_PANELS), sharey=True)
    places = range(len(loads))
    for axis, (key, title) in zip(axes, _PANELS, strict=True):
        for place, load in zip(places, loads, strict=True):
            spread = load[key]
            if spread is None:
                continue
            values = [max(spread[name], 1e-5) for name in ("p50", "p95", "p99")]
            axis.plot(values, [place] * 3, color=BLUE, alpha=0.25, linewidth=6, solid_capstyle="round", zorder=2)
            for value, size, fill in zip(values, (46, 26, 26), (BLUE, PAPER, PAPER), strict=True):
                axis.scatter(value, place, s=size, facecolor=fill, edgecolor=BLUE, linewidth=1.4, zorder=3)
            _label(axis, values[0], place, _time(values[0]), right=False)
            _label(axis, values[2], place, _time(values[2]), right=True)
        for bound, text in _BOUNDS[key]:
            axis.axvline(bound, color=RED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
            axis.text(bound, -0.62, text, color=RED, fontsize=8, ha="center", va="bottom")
        _log_time(axis)
        axis.set_title(title, loc="left", fontsize=10, color=INK, pad=16)
        axis.set_ylim(len(loads) - 0.4, -0.65)
    axes[0].set_yticks(list(places), [load["label"] for load in loads], color=INK)
    _title(figure, "Latency", f"{target}   filled: median; rings: P95 and P99; dashed: bounds of goodput")
    return figure


def frontier(closed: Sequence[Mapping[str, Any]], target: str) -> Figure:
    """What all streams get together against what each one gets."""
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axis = figure.subplots()
    points = sorted((one["output_tokens_per_s"], int(one["load"].split(":")[1].split(",")[0]), one) for one in closed)
    points.sort(key=lambda point: point[1])
    each = [1 / one["tpot"]["p50"] if one["tpot"] else total / streams for total, streams, one in points]
    totals = [total for total, _, _ in points]
    axis.plot(each, totals, color=BLUE, linewidth=2, zorder=2)
    axis.scatter(each, totals, s=46, color=BLUE, zorder=3)
    for (total, streams, _), speed in zip(points, each, strict=True):
        text = f"{streams} stream{'s' if streams > 1 else ''}"
        axis.annotate(text, (speed, total), (7, 6), textcoords="offset points", color=INK)
    axis.set_xlim(0, max(each) * 1.22)
    axis.set_ylim(0, max(totals) * 1.15)
    axis.grid(visible=True)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.set_xlabel("tokens/s of each stream, median")
    axis.set_ylabel("tokens/s of all streams")
    _title(figure, "Throughput against speed", target)
    return figure


def timeline(load: Mapping[str, Any], target: str) -> Figure:
    """Requests in flight and tokens a second over the time of a load."""
    line = load["timeline"]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    curves = ((upper, "in_flight", ORANGE, "Requests in flight"), (lower, "tokens_per_s", BLUE, "Output tokens/s"))
    for axis, name, color, title in curves:
        axis.fill_between(line["at_s"], line[name], step="post", color=color, alpha=0.3, linewidth=0)
        axis.step(line["at_s"], line[name], where="post", color=color, linewidth=1.4)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, axis="y")
        axis.set_xlim(0, line["at_s"][-1] if line["at_s"] else 1)
    if line["failed_at_s"]:
        upper.scatter(
            line["failed_at_s"], [0] * len(line["failed_at_s"]), marker="|", s=60, color=RED, zorder=4, clip_on=False
        )
        upper.text(1, 1.02, f"{len(line['failed_at_s'])} failed", color=RED, ha="right", transform=upper.transAxes)
    lower.set_xlabel("seconds")
    _title(figure, "Over time", f"{load['load']}   {target}")
    return figure


def engine(found: Mapping[str, Any]) -> Figure:
    """Decode rate of the engine alone by batch, with its share of the roofline."""
    rows = found["rows"]
    figure = Figure(figsize=(7, 4.0), layout="constrained")
    axis = figure.subplots()
    batches = [row["batch"] for row in rows]
    rates = [row["decode_tokens_per_s"] for row in rows]
    places = range(len(rows))
    axis.bar(places, rates, width=0.5, color=GREEN, alpha=0.85, zorder=2)
    for place, row in zip(places, rows, strict=True):
        text = f"{row['decode_tokens_per_s']:,.0f}/s\n{100 * row['roofline_share']:.0f} % of memory"
        axis.annotate(
            text,
            (place, row["decode_tokens_per_s"]),
            (0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            bbox=HALO,
        )
    axis.set_xticks(places, [str(batch) for batch in batches])
    axis.set_ylim(0, max(rates) * 1.22)
    axis.grid(visible=True, axis="y")
    axis.set_xlabel("sequences in the batch")
    axis.set_ylabel("decoded tokens/s")
    speed = found["read_bytes_per_s"] / 1e9
    _title(figure, "The engine alone", f"{found['model']}, {found['dtype']}; memory read at {speed:.1f} GB/s")
    return figure


def peers(found: Mapping[str, Any]) -> Figure:
    """Ratio of our rate to each peer's: the median as a dot, the rounds' range as a bar; 1 is a draw."""
    cases = found["cases"]
    count = sum(len(case["ratios"]) for case in cases)
    figure = Figure(figsize=(8.5, 1.4 + 0.34 * count + 0.42 * len(cases)), layout="constrained")
    axis = figure.subplots()
    place, ticks = 0.0, []
    for case in cases:
        axis.text(
            0.0,
            place,
            case["name"],
            fontsize=10,
            fontweight="bold",
            va="center",
            transform=axis.get_yaxis_transform(),
            bbox=HALO,
            zorder=4,
        )
        place += 1
        for name, ratio in case["ratios"].items():
            color = GREEN if ratio["median"] >= 1 else RED
            ends = [ratio["least"], ratio["most"]]
            axis.plot(ends, [place] * 2, color=color, alpha=0.3, linewidth=6, solid_capstyle="round")
            axis.scatter(ratio["median"], place, s=46, color=color, zorder=3)
            _label(axis, max(ends), place, f"{ratio['median']:.2f}x", right=True)
            ticks.append((place, name))
            place += 1
    axis.axvline(1, color=GREY, linewidth=1)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks([at for at, _ in ticks], [name for _, name in ticks], color=INK)
    axis.set_ylim(place - 0.3, -0.7)
    axis.grid(visible=True, axis="x")
    axis.set_xlabel("our tokens/s over theirs")
    _title(figure, "Side by side", found["heading"])
    return figure


def _label(axis: Axes, x: float, y: float, text: str, *, right: bool) -> None:
    axis.annotate(
        text,
        (x, y),
        (8 if right else -8, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        va="center",
        fontsize=8,
        color=INK,
        bbox=HALO,
        zorder=4,
    )


def _title(figure: Figure, title: str, line: str) -> None:
    """Title and one line above everything else, at the same distances on a figure of any height."""
    height = figure.get_figheight()
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - TITLE_IN / height))
    figure.text(0.006, 1 - 0.02 / height, title, fontsize=14, fontweight="bold", color=INK, va="top")
    figure.text(0.006, 1 - 0.32 / height, line, fontsize=9, color=GREY, va="top")


def _log_time(axis: Axes) -> None:
    axis.set_xscale("log")
    axis.margins(x=0.3)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _time(value)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(visible=True, axis="x")


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.2g} ms"
