"""Tables of a simulation in the terminal, and its figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = Mapping[str, Any]

NOTE = "SIMULATION: real scheduler, KV pool, prefix cache, fair service, ledger and policy; a card's time is a model."
"""First line of everything that is shown."""


def seconds(value: float) -> str:
    """Return a time as people read it."""
    if value != value:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.1f} ms"


def share(value: float) -> str:
    """Return a part of all in percent."""
    return f"{100 * value:.1f} %"


COLUMNS: Sequence[tuple[str, Callable[[Figures], str]]] = (
    ("TTFT p50", lambda one: seconds(one["ttft_s"]["p50"])),
    ("p90", lambda one: seconds(one["ttft_s"]["p90"])),
    ("p99", lambda one: seconds(one["ttft_s"]["p99"])),
    ("ITL p50", lambda one: seconds(one["itl_s"]["p50"])),
    ("p90", lambda one: seconds(one["itl_s"]["p90"])),
    ("p99", lambda one: seconds(one["itl_s"]["p99"])),
    ("cached", lambda one: share(one["cached_share"])),
    ("bound", lambda one: share(one["cached_bound"])),
    ("cards at work, least to most", lambda one: at_work(one)),
    ("tokens/s", lambda one: f"{one['output_tokens_per_s']:,.0f}"),
    ("ended", lambda one: f"{one['requests']['done']:,}"),
    ("cpu s", lambda one: f"{one['processor_s']:.0f}"),
)
"""Columns of the table of all runs."""


def at_work(found: Figures) -> str:
    """Return how much of the window cards computed."""
    used = found["utilisation"]
    text = f"{used['mean']:.2f} ({used['least']:.2f} to {used['most']:.2f})"
    if "prefill_utilisation" not in found:
        return text
    prefill = found["prefill_utilisation"]
    return f"{prefill['mean']:.2f} prefill, {used['mean']:.2f} decode (to {prefill['most']:.2f}, {used['most']:.2f})"


def show(console: Console, document: Figures) -> None:
    """Print all tables that there are figures for."""
    settings = document["settings"]
    console.print(f"[bold]{NOTE}[/bold]")
    console.print(
        f"{settings['hosts']:,} hosts, {settings['tenants']:,} tenants, {settings['requests_per_s']:g} requests a "
        f"second and host, trace {', '.join(document['traces'].values())}; card {settings['card']} "
        f"({settings['source']}); {settings['window_s']:g} s behind {settings['ramp_s']:g} s"
    )
    table = Table("run", box=None, header_style="bold")
    for title, _ in COLUMNS:
        table.add_column(title, justify="right")
    for name, found in document["runs"].items():
        table.add_row(name, *[cell(found) for _, cell in COLUMNS])
    console.print(table)
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
            found.setdefault("KV that moved", []).append(f"{name}: {one['moved_gb']:,.0f} GB")
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
    text = f"others' TTFT p50 {seconds(others['p50'])}, p99 {seconds(others['p99'])}, {found['others_refused']} refused"
    text += f", Jain of served shares {found['others_jain_of_served_share']:.3f}"
    if own is None:
        return text
    text += f"; its own p50 {seconds(own['p50'])}, "
    return text + f"{found['noisy_refused']:,} of {found['noisy_requests']:,} requests refused"


def write(path: Path, document: Figures) -> None:
    """Write the figures, with sorted keys, so that equal figures are equal bytes.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
