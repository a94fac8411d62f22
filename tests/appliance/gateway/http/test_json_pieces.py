"""Documents in pieces: the same bytes as in one, and no piece that takes long."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.http.openai_objects import ROWS_AT_ONCE, Rows, pieces_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.lists(VALUES, max_size=3))
def test_pieces_put_together_are_the_document(value: Any, rows: list[Any]) -> None:
    """Whatever is in it, and wherever rows stand that are made later."""
    document = {"value": value, "rows": Rows(lambda row: [row], rows), "more": [Rows(str, [1, 2])]}
    plain = {"value": value, "rows": [[row] for row in rows], "more": [["1", "2"]]}
    assert b"".join(pieces_of(document)) == json.dumps(plain, separators=(",", ":")).encode()


def test_rows_are_made_a_few_at_a_time() -> None:
    """Between two pieces no more rows are made than one piece holds, however many there are."""
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number

    total, before, most = 10 * ROWS_AT_ONCE + 1, 0, 0
    for _ in pieces_of({"rows": Rows(make, range(total))}):
        most, before = max(most, len(made) - before), len(made)
    assert (most, made) == (ROWS_AT_ONCE, list(range(total)))
