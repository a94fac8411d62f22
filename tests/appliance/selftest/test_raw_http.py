"""HTTP by hand: what counts as an answer."""

from __future__ import annotations

import pytest

from appliance.selftest.raw_http import body_of, status_of

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "body"),
    [(HEAD + b"{} \n", b"{} \n"), (HEAD, None), (HEAD + b"{}", None), (b"HTTP/1.1 200 OK\r\n\r\n{}", b"{}")],
)
def test_an_answer_that_was_cut_off_is_none(answer: bytes, body: bytes | None) -> None:
    """A body that is shorter than its head says is no body, whatever the status; without a length all that came is."""
    assert status_of(answer) == 200
    assert body_of(answer) == body
