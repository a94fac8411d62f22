"""Batches of tokens to deltas: however the tokens are cut into batches, the text and the count are the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.request.assembler import Assembler
from appliance.gateway.request.output import LocalText
from appliance.gateway.sandboxes.text_link import VocabularyTable
from isolation.ipc.messages import Finish

ENTRIES = st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=3).map(str.encode)), min_size=1, max_size=8)


def spoken(
    table: VocabularyTable, batches: list[list[int]], stops: tuple[str, ...], *, hide_last: bool
) -> tuple[str, int, str | None]:
    """Text, charged tokens and stop string of these batches; the last one ends the output."""
    output = LocalText(Assembler(table, stops), table)
    text, charged = "", 0
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        finish = (Finish.STOP if hide_last else Finish.LENGTH) if last else Finish.NONE
        delta, used = output.push(batch, [], finish)
        text, charged = text + delta.text, charged + used
        assert delta.token_ids == tuple(batch[:used])
        if output.stopped is not None:
            return text, charged, output.stopped
    return text, charged, None


@given(
    ENTRIES,
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), ("a",), ("\u00e9x", "0")]),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=5),
)
def test_batches_change_nothing(
    entries: list[bytes], strip: bool, hide_last: bool, stops: tuple[str, ...], batches: list[list[int]]
) -> None:
    """Any cut into batches gives what one token at a time gives, with and without stop strings."""
    table = VocabularyTable(tuple(entries), strip)
    singly = [[token] for batch in batches for token in batch]
    assert spoken(table, batches, stops, hide_last=hide_last) == spoken(table, singly, stops, hide_last=hide_last)
