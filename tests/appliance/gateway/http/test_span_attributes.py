"""What a server span has of an HTTP request: the conventions' names, bounded, and no stranger's text."""

from __future__ import annotations

import pytest

from appliance.gateway.http.head import HeadReader, RequestHead
from appliance.gateway.http.span_attributes import MAX_AGENT, MAX_HOST, span_attributes


def head(host: str = "models.example.org", *lines: str, version: str = "1.1") -> RequestHead:
    """The head of a request as the parser gives it."""
    text = "\r\n".join((f"POST /v1/models HTTP/{version}", f"Host: {host}", *lines, "Content-Length: 0", "", ""))
    found = HeadReader().feed(text.encode("latin-1"))
    assert found is not None
    return found[0]


def test_a_request_is_described_by_the_conventions() -> None:
    """All attributes of a known route, with the version of the protocol; of an unknown path no text of its sender."""
    agent = "user-agent: curl/8"
    assert span_attributes(head("models.example.org:8443", agent), "https", "10.0.0.1", known=True) == {
        "http.request.method": "POST",
        "client.address": "10.0.0.1",
        "url.scheme": "https",
        "url.path": "/v1/models",
        "network.protocol.version": "1.1",
        "user_agent.original": "curl/8",
        "server.address": "models.example.org",
        "server.port": 8443,
    }
    stranger = span_attributes(head("secret.example.org", agent, version="1.0"), "http", "10.0.0.1", known=False)
    assert stranger == {
        "http.request.method": "POST",
        "client.address": "10.0.0.1",
        "url.scheme": "http",
        "network.protocol.version": "1.0",
    }


@pytest.mark.parametrize(
    ("host", "scheme", "address", "port"),
    [
        ("example.org", "http", "example.org", 80),
        ("example.org", "https", "example.org", 443),
        ("[2001:db8::1]:8080", "http", "2001:db8::1", 8080),
        ("[2001:db8::1]", "http", "2001:db8::1", 80),
        ("127.0.0.1:1", "http", "127.0.0.1", 1),
        ("a" * 400, "http", "a" * MAX_HOST, 80),
    ],
    ids=["name", "tls", "v6-port", "v6", "v4-port", "long"],
)
def test_the_server_is_as_the_client_has_called_it(host: str, scheme: str, address: str, port: int) -> None:
    """Name and port of the Host header; the scheme's port where it names none; a name has a bounded length."""
    found = span_attributes(head(host), scheme, "", known=True)
    assert (found["server.address"], found["server.port"]) == (address, port)


@pytest.mark.parametrize("host", ["example.org:99999", "example.org:x", ""], ids=["large", "no-number", "none"])
def test_a_host_that_is_none_is_left_out(host: str) -> None:
    """A port that there cannot be, and a header without a name, give neither attribute."""
    request = head()
    made = RequestHead(
        **{name: getattr(request, name) for name in RequestHead.__dataclass_fields__ if name != "host"}, host=host
    )
    assert not {"server.address", "server.port"} & span_attributes(made, "http", "", known=True).keys()


def test_an_agent_is_bounded_and_printable() -> None:
    """What a client calls itself is cut, and has no character that a terminal would obey."""
    found = span_attributes(head("h", "user-agent: " + "\xe9" * 900), "http", "", known=True)
    assert found["user_agent.original"] == "?" * MAX_AGENT
    assert "user_agent.original" not in span_attributes(head("h"), "http", "", known=True)
