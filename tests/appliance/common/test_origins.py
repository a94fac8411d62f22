"""Origins in the configuration: those that browsers write are taken, all else is refused with what to write."""

from __future__ import annotations

import pytest

from appliance.common.origins import check_origin


@pytest.mark.parametrize(
    "origin",
    [
        "https://app.example",
        "http://localhost:3000",
        "https://app.example:8443",
        "https://xn--bcher-kva.example",
        "http://127.0.0.1:8080",
        "http://[::1]:5173",
        "chrome-extension://abcdefghijklmnop",
        "http://a",
    ],
)
def test_origins_are_taken(origin: str) -> None:
    """Sites, development servers, addresses of both kinds, and extensions."""
    check_origin(origin)


@pytest.mark.parametrize(
    ("origin", "reason"),
    [
        ("*", "list the origins one by one"),
        ("https://*.example", "list the origins one by one"),
        ("null", "sandboxed frames"),
        ("https://app.example/", "no slash at the end"),
        ("https://app.example/path", "is no origin"),
        ("HTTPS://app.example", "in lower case"),
        ("https://App.example", "in lower case"),
        ("app.example", "is no origin"),
        ("https://", "is no origin"),
        ("https://a b", "is no origin"),
        ("https://user@app.example", "is no origin"),
        ("https://b\u00fccher.example", "xn--"),
        ("https://app.example:443", "leave it out"),
        ("http://app.example:80", "leave it out"),
        ("http://app.example:65536", "browsers do not write"),
        ("http://app.example:0", "is no origin"),
        ("http://[::0001]", "write as [::1]"),
        ("http://[1.2.3]", "no address between its brackets"),
        ("https://a\r\nx: y", "is no origin"),
        ("https://" + "a" * 250, "is no origin"),
        ("", "is no origin"),
    ],
)
def test_others_are_refused(origin: str, reason: str) -> None:
    """Wildcards, null, paths, other spellings, and what could end a header."""
    with pytest.raises(ValueError, match="origin|port|address") as refused:
        check_origin(origin)
    assert reason in str(refused.value)
