"""The alert of a tenant that sends ten times what is usual for it, over two weeks of series in Prometheus' own tests of
rules: what must fire, and what looks like it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.observers import observer

GROUP = "athanor-tenants"
STEP_M = 5
"""Minutes between two samples."""

DAY, HOUR = 24 * 60, 60
"""In minutes."""

DAYS = 14
LAST = 12 * DAY + 9 * HOUR
"""When the tenants that the alert is for begin: at nine, of a day of which the day a week before was as any other."""

ASKED_M = (LAST + 40, LAST + DAY + 15 * HOUR - 20)
"""When the alert is looked at: within the hour, and a day and a half later. Both are moments of an evaluation."""

Rate = Callable[[int], float]
"""Requests a second at a minute."""


def at_work(minute: int) -> bool:
    """Nine to five, five days of seven; the first day is a Monday."""
    return minute // DAY % 7 < 5 and 9 * HOUR <= minute % DAY < 17 * HOUR


def attacked(usual: Rate, times: float, begin: int = LAST, end: int = DAYS * DAY) -> Rate:
    """A rate that is multiplied within a time."""
    return lambda minute: usual(minute) * (times if begin <= minute < end else 1)


def steady(_: int) -> float:
    """One request a second."""
    return 1.0


def office(minute: int) -> float:
    """Two requests a second in office hours."""
    return 2.0 if at_work(minute) else 0.0


def quiet(minute: int, other: float = 0.0) -> float:
    """A request an hour, and from ``LAST`` on another rate as well."""
    return 1 / 3600 + (other if minute >= LAST else 0.0)


UNUSUAL: dict[str, Rate] = {
    "twelvefold": attacked(steady, 12),
    # Half a day of it on the eighth day as well: what lasted so long has not become usual.
    "again": lambda minute: attacked(steady, 12)(minute) + (11.0 if 8 * DAY <= minute < 8 * DAY + 12 * HOUR else 0.0),
    "growing": lambda minute: 1.0 if minute < LAST - HOUR else min(15.0, 1.0 + (minute - LAST + HOUR) / 4),
    "quiet-key": lambda minute: quiet(minute, 2.0),
    # Its series is gone since the third day, as after a start of the gateway.
    "absent": lambda minute: 2.0 if minute >= LAST else float("nan") if minute > 2 * DAY else 0.01,
}
USUAL: dict[str, Rate] = {
    "eightfold": attacked(steady, 8),
    "steady": steady,
    "office": office,
    "quiet": lambda minute: quiet(minute, 0.5),
    "nightly": lambda minute: 20.0 if minute % DAY < 30 else 0.0,
    # An hour on one day of the week, at the hour at which the others begin.
    "weekly": lambda minute: 20.0 if minute // DAY % 7 == 5 and 9 * HOUR <= minute % DAY < 10 * HOUR else 0.0,
    "new": lambda minute: 50.0 if minute >= LAST else float("nan"),
    # Twelve times what it was, for good, and for four days when it is looked at: told, and then usual.
    "grown": attacked(steady, 12, begin=LAST - 4 * DAY),
    "other": attacked(steady, 100),
}
"""Tenants for which it fires, and for which it does not, by name."""


def values(rate: Rate) -> str:
    """A counter's samples over all days; none where the rate is not a number."""
    count, found = 0.0, []
    for minute in range(0, DAYS * DAY, STEP_M):
        now = rate(minute)
        if now != now:
            found.append("_")
        else:
            count += 60 * STEP_M * now
            found.append(f"{count:.2f}")
    return " ".join(found)


def complaints(root: Path, folder: Path, series: dict[str, str], asked: list[dict[str, Any]]) -> str:
    """Run the group of rules over series; gives what promtool said, nothing where all is as expected."""
    groups = YAML(typ="safe").load((root / "docs/monitoring/alerts.yaml").read_text())["groups"]
    (group,) = (one for one in groups if one["name"] == GROUP)
    # Two weeks of evaluations: every twenty minutes, not every four.
    (folder / "rules.yml").write_text(json.dumps({"groups": [{**group, "interval": "20m"}]}))
    case = {
        "interval": f"{STEP_M}m",
        "input_series": [{"series": name, "values": told} for name, told in series.items()],
        "promql_expr_test": asked,
    }
    (folder / "tests.yml").write_text(
        json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "20m", "tests": [case]})
    )
    argv = [observer("promtool"), "test", "rules", str(folder / "tests.yml")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-4000:]


def firing(of: str, tenants: list[str], minute: int) -> dict[str, Any]:
    """The expectation that the alert fires for these tenants."""
    expr = f'count by (athanor_tenant_id) (ALERTS{{alertstate="firing", athanor_of="{of}"}})'
    samples = [{"labels": f'{{athanor_tenant_id="{tenant}"}}', "value": 1} for tenant in sorted(tenants)]
    return {"expr": expr, "eval_time": f"{minute}m", "exp_samples": samples}


@pytest.mark.full
@pytest.mark.timeout(180)
def test_ten_times_the_usual_is_told_and_what_is_usual_is_not(root: Path, tmp_path: Path) -> None:
    """Tenfold rates of steady, quiet and absent tenants fire within the hour and still do a day and a half later, also
    where the same happened the week before; growth, office hours, jobs of each night and of each week, new tenants, few
    requests and the sum of tenants without series do not."""
    series = {
        f'athanor_requests_total{{athanor_tenant_id="{name}"}}': values(rate)
        for name, rate in (UNUSUAL | USUAL).items()
    }
    asked = [firing("requests", list(UNUSUAL), minute) for minute in ASKED_M]
    assert complaints(root, tmp_path, series, asked) == ""
    (wrong,) = [firing("requests", [*UNUSUAL, "steady"], ASKED_M[0])]
    assert "steady" in complaints(root, tmp_path, {}, [wrong]), "an expectation that does not hold is told"


@pytest.mark.full
@pytest.mark.timeout(180)
def test_tokens_count_as_requests_do(root: Path, tmp_path: Path) -> None:
    """A tenant whose requests are as many as ever and whose tokens are twelve times as many fires for its tokens; one
    with few tokens does not; cached tokens, which are part of the input, do not count twice."""

    def token(name: str, kind: str) -> str:
        return f'athanor_tokens_total{{athanor_tenant_id="{name}", athanor_token_type="{kind}"}}'

    usual, much = values(lambda minute: 100 * steady(minute)), values(lambda minute: 100 * attacked(steady, 12)(minute))
    little = values(lambda minute: 30 * attacked(steady, 12)(minute))
    cached = values(lambda minute: 100 * attacked(steady, 12)(minute))
    series = {
        **{f'athanor_requests_total{{athanor_tenant_id="{name}"}}': values(steady) for name in ("long", "short")},
        token("long", "input"): usual,
        token("long", "output"): much,
        token("short", "output"): little,
        token("cache", "input"): usual,
        token("cache", "cached"): cached,
    }
    series[token("long", "input")] = much
    asked = [firing("tokens", ["long"], ASKED_M[0]), firing("requests", [], ASKED_M[0])]
    assert complaints(root, tmp_path, series, asked) == ""
