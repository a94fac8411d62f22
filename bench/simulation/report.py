"""Tables of a simulation in the terminal, and its figures as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Figures = Mapping[str, Any]

NOTE = "SIMULATION: real scheduler, KV pool, prefix cache, fair service, ledger and policy; a card's time is a model."
"""First line of everything that is shown."""


def seconds(value: float | None) -> str:
    """Return a time as people read it; a dash for none."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.1f} ms"


def share(value: float) -> str:
    """Return a part of all in percent."""
    return f"{100 * value:.1f} %"


Columns = Sequence[tuple[str, Callable[[Figures], str]]]

LATENCY: Columns = (
    ("TTFT P50", lambda one: seconds(one["ttft_s"]["p50"])),
    ("P90", lambda one: seconds(one["ttft_s"]["p90"])),
    ("P99", lambda one: seconds(one["ttft_s"]["p99"])),
    ("ITL P50", lambda one: seconds(one["itl_s"]["p50"])),
    ("P90", lambda one: seconds(one["itl_s"]["p90"])),
    ("P99", lambda one: seconds(one["itl_s"]["p99"])),
)
WORK: Columns = (
    ("CACHED", lambda one: share(one["cached_share"])),
    ("BOUND", lambda one: share(one["cached_bound"])),
    ("TOKENS/S", lambda one: f"{one['output_tokens_per_s']:,.0f}"),
    ("ENDED", lambda one: f"{one['requests']['done']:,}"),
    ("HOSTS", lambda one: f"{one['hosts']:,}"),
    ("CARDS AT WORK", lambda one: at_work(one)),
    ("CPU S", lambda one: f"{one['processor_s']:.0f}"),
)
"""Columns of the two tables of all runs."""


def at_work(found: Figures) -> str:
    """Return how much of the window cards computed; of prefill hosts first, where there are any."""
    used = found["utilisation"]
    if "prefill_utilisation" not in found:
        return f"{used['mean']:.2f}"
    return f"{found['prefill_utilisation']['mean']:.2f} and {used['mean']:.2f}"


def show(console: Console, document: Figures) -> None:
    """Print all tables that there are figures for."""
    settings = document["settings"]
    console.print(f"[bold]{NOTE}[/bold]")
    console.print(
        f"{settings['hosts']:,} hosts, {settings['tenants']:,} tenants, {settings['requests_per_s']:g} requests a "
        f"second and host, trace {', '.join(document['traces'].values())}; card {settings['card']} "
        f"({settings['source']}); {settings['window_s']:g} s behind {settings['ramp_s']:g} s"
    )
    for name, columns in (("LATENCY", LATENCY), ("WORK", WORK)):
        table = Table(name, box=None, header_style="bold", pad_edge=False)
        for title, _ in columns:
            table.add_column(title, justify="right", no_wrap=True)
        for run, found in document["runs"].items():
            table.add_row(Text(run), *[cell(found) for _, cell in columns])
        console.print("", table)
    for title, rows in details(document["runs"]).items():
        console.print(f"\n[bold]{title}[/bold]")
        for row in rows:
            console.print(f"  {row}")


def details(runs: Mapping[str, Figures]) -> dict[str, list[str]]:
    """Return what single scenarios have besides, by title."""
    found: dict[str, list[str]] = {}
    for name, one in runs.items():
        if "losses" in one:
            found["Hosts that died"] = losses(one)
        if "tenants" in one:
            found.setdefault("A noisy tenant", []).append(f"{name}: {noise(one['tenants'])}")
        if "jain_over_fleet" in one:
            found["Tenants with more work than there is"] = [
                f"Jain's index {one['jain_on_hosts']:.3f} on each host, {one['jain_over_fleet']:.3f} over the fleet; "
                f"tenants on all hosts got {one['wide_over_narrow']:.1f} times what tenants on one host in eight got"
            ]
        if "limit" in one:
            limit = one["limit"]
            found.setdefault("A limit of rate", []).append(
                f"{name}: {limit['admitted']:,} of {limit['sent']:,} admitted, {limit['allowed']:.0f} allowed a host"
            )
        if "moved_gb" in one:
            gap = one["hand_over_s"]
            found.setdefault("Prefill apart from decode", []).append(
                f"{name}: {one['moved_gb']:,.0f} GB of KV moved; from the first token to the second p50 "
                f"{seconds(gap['p50'])}, p99 {seconds(gap['p99'])}"
            )
    return found


def losses(one: Figures) -> list[str]:
    """Return the lines about dead hosts."""
    lost = one["losses"]
    rows = [
        f"{lost['hosts']:,} hosts: {lost['streams']:,} streams broken, {lost['retried']:,} requests given to another "
        f"host, {lost['failed']:,} to none",
        f"{lost['tokens']:,} tokens of computing lost, {lost['output_tokens']:,} sent in broken streams, "
        f"{lost['kv_tokens']:,} tokens of KV gone",
    ]
    rows += [
        f"second {row['second']}: TTFT p99 {seconds(row['ttft_s']['p99'])}, cached {share(row['cached_share'])}"
        for row in one["by_second"]
    ]
    return rows


def noise(found: Figures) -> str:
    """Return the line about a noisy tenant."""
    others, own = found["others_ttft_s"], found["noisy_ttft_s"]
    text = f"others' TTFT p50 {seconds(others['p50'])}, p90 {seconds(others['p90'])}, {found['others_refused']} refused"
    if own is None:
        return text
    text += f"; its own p50 {seconds(own['p50'])}, "
    return text + f"{found['noisy_refused']:,} of {found['noisy_requests']:,} requests refused"


def write(path: Path, document: Figures) -> None:
    """Write the figures, with sorted keys, so that equal figures are equal bytes.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(known(document), indent=1, sort_keys=True, allow_nan=False) + "\n")


def known(value: Any) -> Any:
    """Return the same with null for numbers that there are none of."""
    if isinstance(value, Mapping):
        return {key: known(one) for key, one in value.items()}
    if isinstance(value, list):
        return [known(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
