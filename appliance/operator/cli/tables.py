"""Tables without lines, and numbers in them, as the commands draw them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from appliance.common.figures import count
from appliance.common.status import ApplianceLoad


def table(*titles: str, numbers: Iterable[str] = ()) -> Table:
    """Empty table: columns of texts, which are cut where there is no room, then columns of ``numbers``."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for title in titles:
        made.add_column(title, no_wrap=True, overflow="ellipsis")
    for title in numbers:
        made.add_column(title, justify="right", no_wrap=True)
    return made


def number(value: int | None) -> Text:
    """A whole number with groups of digits; dim where it is 0 or unknown."""
    return Text(count(value), "" if value else "dim")


def share_of(value: int, limit: int | None) -> Text:
    """``3 of 8``, or the value alone where there is no limit."""
    return Text(f"{value:,}" + (f" of {limit:,}" if limit is not None else ""), "" if value else "dim")


def rate(value: float | None, style: str = "") -> Text:
    """A number a second; dim where it is 0 or unknown."""
    if not value:
        return Text("-" if value is None else "0", "dim")
    return Text(f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}", style)


def rates_line(load: ApplianceLoad) -> Text:
    """Rates of the whole appliance on one line, and the seconds that they are of."""
    rates = load.rates
    if not rates.over_s:
        return Text("no rates yet", "dim")
    text = rate(rates.output_tokens, "bold green") + Text(" tokens/s out   ")
    text += rate(rates.input_tokens) + Text(" in   ") + rate(rates.requests) + Text(" requests/s   ")
    return text + rate(rates.refused, "yellow") + Text(" refused/s") + Text(f"   over {rates.over_s:.0f} s", "dim")
