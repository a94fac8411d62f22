"""docs/reference/ is what the code says: each page is written again and compared; names are held against it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource

from appliance.gateway.generate_request import Operation
from appliance.gateway.http import (
    messages_request,
    openai,
    openai_embeddings,
    responses_request,
    scoring,
    tokenizer_routes,
)
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.metrics import Level, Metrics
from appliance.operator.reference import http, http_agents, metrics
from appliance.operator.reference.__main__ import FOLDER, PAGES, main


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_up_to_date(name: str) -> None:
    """`python -m appliance.operator.reference` would change nothing."""
    assert PAGES[name]() == (FOLDER / name).read_text(), "run: python -m appliance.operator.reference"


def test_there_is_no_other_page(tmp_path: Path) -> None:
    """The command writes these files and the folder holds no others."""
    main(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(one.name for one in FOLDER.iterdir())


@pytest.mark.parametrize("name", PAGES)
def test_every_entry_has_a_meaning(name: str) -> None:
    """No row ends with an empty cell, and every row has as many cells as its header."""
    columns = 0
    for line in (FOLDER / name).read_text().splitlines():
        cells = [one.strip() for one in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        columns = (columns or len(cells)) if cells else 0
        assert len(cells) == columns, line
        assert not cells or cells[-1], line


@pytest.mark.parametrize(
    ("shown", "served"),
    [
        (http.GENERATION + http.SAMPLING + http.CHAT, openai._SERVED[Operation.CHAT]),
        (http.GENERATION + http.SAMPLING + http.COMPLETION, openai._SERVED[Operation.TEXT_COMPLETION]),
        (http.EMBEDDINGS, openai_embeddings._SERVED),
        (http.RERANK, scoring.RERANK_FIELDS),
        (http.SCORE, scoring.SCORE_FIELDS),
        (http.CLASSIFY, scoring.CLASSIFY_FIELDS),
        (http_agents.RESPONSES, responses_request._SERVED),
        (http_agents.MESSAGES, messages_request._SERVED),
        (http.TOKENIZE, tokenizer_routes._TOKENIZE),
    ],
)
def test_fields_are_those_that_are_served(shown: tuple[http.Field, ...], served: frozenset[str]) -> None:
    """Each field that a route takes has its row, and no other."""
    assert sorted(row[0] for row in shown) == sorted(served)


def test_headers_are_those_of_the_code(root: Path) -> None:
    """Each of our own headers that the front end names has its row."""
    code = "".join(one.read_text() for one in (root / "appliance/gateway/http").glob("*.py"))
    rows = " ".join((*http.REQUEST_HEADERS, *http.RESPONSE_HEADERS))
    found = set(re.findall(r'"(x-[a-z-]*[a-z]|openai-[a-z-]+|retry-after[a-z-]*|www-authenticate|allow)"', code))
    assert len(found) > 6
    assert sorted(name for name in found if name not in rows) == []


def test_prometheus_names_are_those_that_are_rendered() -> None:
    """Each counter and gauge, set once, is found in the text under the name that the page gives it."""
    made = Metrics(Resource.create({}))
    for name, one in names.COUNTERS.items():
        made.count(name, **dict.fromkeys(one.labels, "x"))
    made.levels([Level(name, 1, dict.fromkeys(one.labels, "x")) for name, one in names.GAUGES.items()])
    text = made.render()[1].decode()
    for table, suffix in ((names.COUNTERS, "_total"), (names.GAUGES, "")):
        for name, one in table.items():
            assert re.search(rf"^{metrics.prometheus(name, one, suffix)}[{{ ]", text, re.MULTILINE), name
    made.shutdown(1.0)
