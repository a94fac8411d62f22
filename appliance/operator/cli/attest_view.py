"""Pure: an attestation for people."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from appliance.common.audit.attestation import Attestation
from appliance.common.figures import counted, printable

SHOWN_CLOCK_S = 86_400
"""Seconds up to which the age of an attestation is told."""


def attest_view(one: Attestation, now_s: float) -> RenderableType:
    """Return the facts, a line each, with what is missing told in words."""
    isolated = one.runtime.startswith("gvisor/")
    shown = Table.grid(padding=(0, 3))
    shown.add_column(no_wrap=True, style="dim")
    shown.add_column(overflow="fold")
    rows = {
        "tenant": Text(printable(one.tenant), "bold"),
        "model": Text(printable(one.model), "bold"),
        "": Text(one.model_digest),
        "signed by": Text(one.model_signer or "no signature is asked for"),
        "class": Text(one.isolation_class),
        "sandbox": Text(one.runtime if isolated else f"{one.runtime}: NOT ISOLATED", "" if isolated else "bold red"),
        "program": Text(f"{one.program}   {one.program_digest}" if one.program else "none"),
        "flags": Text(" ".join(one.flags) or "none"),
        "image": Text(one.image or "none: the host's own Python"),
        "limits": Text(printable(one.limits)),
        "policy": Text(one.policy),
        "version": Text(printable(one.version)),
        "self-test": Text(printable(one.selftest) or "none recorded"),
        "log": Text(one.log),
        "nonce": Text(one.nonce),
        "made": Text(_made(one.time, now_s)),
    }
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown


def _made(time_ms: int, now_s: float) -> str:
    moment = f"{datetime.fromtimestamp(time_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    age = now_s - time_ms / 1_000
    return f"{moment}   {counted(round(age), 'second')} ago" if 0 <= age < SHOWN_CLOCK_S else moment
