"""Pure: an attestation for people."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from appliance.common.audit.attestation import EARLIER_FORM, OUTSIDE, Attestation, AttestedModel
from appliance.common.figures import counted, printable

SHOWN_CLOCK_S = 86_400
"""Seconds up to which the age of an attestation is told."""


def attest_view(one: Attestation, now_s: float) -> RenderableType:
    """Return the facts, a line each, with what is missing told in words. Who signs may be hostile to who verifies: no
    text steers the terminal."""
    isolated = one.runtime.startswith("gvisor/")
    shown = Table.grid(padding=(0, 3))
    shown.add_column(no_wrap=True, style="dim")
    shown.add_column(overflow="fold")
    shown.add_row("tenant", Text(printable(one.tenant), "bold"))
    for model in sorted(one.models, key=lambda model: model.name != one.model):
        shown.add_row("model", Text(printable(model.name), "bold" if model is one.asked else ""))
        for line in _of_model(model, one):
            shown.add_row("", line)
    for adapter in one.adapters:
        shown.add_row("adapter", Text(printable(adapter.name)))
        shown.add_row("", Text(printable(adapter.digest)))
    rows = {
        "class": one.isolation_class,
        "sandbox": one.runtime if isolated else f"{one.runtime}: NOT ISOLATED",
        "program": f"{one.program}   {one.program_digest}" if one.program else "none",
        "flags": " ".join(one.flags) or "none",
        "image": one.image or "none: the host's own Python",
        "limits": one.limits,
        "policy": one.policy,
        "version": one.version,
        "self-test": one.selftest or "none recorded",
        "log": one.log,
        "nonce": one.nonce,
        "made": _made(one.time, now_s),
        "form": f"{one.form}" + (": it names one model, and tells of no adapters" if one.form == EARLIER_FORM else ""),
    }
    for name, value in rows.items():
        shown.add_row(name, Text(printable(value), "bold red" if name == "sandbox" and not isolated else ""))
    return shown


def _of_model(model: AttestedModel, one: Attestation) -> Iterator[Text]:
    """Return the lines below a model's name; where it runs only where that is not where all do."""
    yield Text(printable(model.digest))
    yield Text(f"signed by {printable(model.signer)}" if model.signer else "no signature is asked for", "dim")
    if model.sandbox == OUTSIDE:
        yield Text("computed by a cluster OUTSIDE of the appliance", "bold red")
    elif model.sandbox not in ("", one.runtime):
        yield Text(f"sandbox {printable(model.sandbox)}", "bold red")
    if model.flags:
        yield Text(printable(f"further flags {' '.join(model.flags)}"))


def _made(time_ms: int, now_s: float) -> str:
    try:
        moment = f"{datetime.fromtimestamp(time_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "at a time that no calendar has"
    age = now_s - time_ms / 1_000
    return f"{moment}   {counted(round(age), 'second')} ago" if 0 <= age < SHOWN_CLOCK_S else moment
