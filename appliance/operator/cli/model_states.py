"""States of the models that are served, beside those of the cache: for ``athanor model list``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

PATIENCE_S = 3.0
"""Seconds that a running appliance has to tell its state; a list needs no more of it."""

COLOURS = {"serving": "green", "starting": "yellow", "draining": "yellow", "waking": "yellow", "asleep": "cyan"}
"""Colours of states; the other states are red, since they need a look."""


def state_of(model: Mapping[str, Any]) -> tuple[str, str]:
    """State of a model of ``/status`` in the words of the metric ``athanor_models``, and the reason where it fails."""
    from appliance.common.status import serving_state

    boxes = [model.get("engine") or {}, model.get("text") or {}]
    state = serving_state(str(model.get("state", "")), [str(box.get("state", "")) for box in boxes])
    reasons = [str(box["cause"]) for box in boxes if box.get("cause")]
    return state, reasons[0] if reasons and state not in ("serving", "draining") else ""


def served_rows(config: Path) -> list[dict[str, str]]:
    """Every model of the configuration, and every other one that the running appliance serves, with its state.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    from appliance.common.config_loader import resolve
    from appliance.operator.cli.admin_client import UnreachableError, try_ask

    found = resolve(config)
    told: dict[str, Mapping[str, Any]] | None = None
    try:
        body = try_ask(found.config.listen.admin, "/status", timeout_s=PATIENCE_S).body
        told = {str(one["name"]): one for one in body.get("models", [])}
    except (UnreachableError, AttributeError, KeyError, TypeError):
        pass
    rows = []
    for index, model in enumerate(found.config.models):
        known = None if told is None else told.pop(model.name, None)
        if told is None:
            state, reason = "not running", ""
        elif known is None:
            state, reason = "not served", "written and not in force; athanor reload"
        else:
            state, reason = state_of(known)
        place = found.origins[f"models[{index}].name"].rpartition(":")[0]
        rows.append(_row(model.name, state, reason, place, known))
    for name, known in (told or {}).items():
        rows.append(_row(name, *state_of(known), "written no more; athanor reload", known))
    return rows


def _row(name: str, state: str, reason: str, place: str, known: Mapping[str, Any] | None) -> dict[str, str]:
    from appliance.common.figures import duration

    used_at = None if known is None else known.get("used_at")
    used = "" if not isinstance(used_at, int | float) else f"{duration(max(0.0, time.time() - used_at))} ago"
    return {"name": name, "state": state, "used": used, "reason": reason, "written": place}


def served_table(rows: list[dict[str, str]]) -> Table:
    """The rows as a table."""
    from rich.table import Table
    from rich.text import Text

    from appliance.common.figures import printable

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("served", "state", "last used", "written", "reason"):
        table.add_column(name, no_wrap=name != "reason")
    for row in rows:
        colour = COLOURS.get(row["state"], "dim" if row["state"] == "not running" else "red")
        state = Text(row["state"], colour)
        texts = (printable(row[name]) for name in ("used", "written", "reason"))
        table.add_row(printable(row["name"]), state, *texts)
    return table
