"""Origins of pages that may call the API (RFC 6454; the Fetch standard, section 3.3): how one is written."""

from __future__ import annotations

import ipaddress
import re

MAX_ORIGINS = 64
"""Origins of one listener: each is a site of the operator's."""

MAX_ORIGIN_CHARS = 255
"""Characters of one origin: the longest host name has 253."""

_ORIGIN = re.compile(
    r"([a-z][a-z0-9+.-]*)://([a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\])(?::([1-9][0-9]{0,4}))?"
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def check_origin(text: str) -> None:
    """Check that a text is an origin as browsers write it, since it is compared with theirs character by character.

    Raises:
        ValueError: it is none; the message says what to write.
    """
    if "*" in text:
        raise ValueError(
            f"{text!r} is no origin: any page that a caller's browser opens could use the appliance from inside the "
            "caller's network; list the origins one by one"
        )
    if text == "null":
        raise ValueError(
            "null is the origin of local files and of sandboxed frames of any page; serve the page by HTTPS"
        )
    match = _ORIGIN.fullmatch(text)
    if match is None or len(text) > MAX_ORIGIN_CHARS:
        raise ValueError(
            f"{text!r} is no origin; write SCHEME://HOST or SCHEME://HOST:PORT in lower case, with no slash at the "
            "end, and a name with other letters than a to z in its ASCII form (xn--)"
        )
    scheme, host, port = match.groups()
    if port is not None and (int(port) > 65_535 or port == _DEFAULT_PORTS.get(scheme)):
        raise ValueError(f"{text!r} has a port that browsers do not write; leave it out where it is the scheme's own")
    if host.startswith("["):
        _check_ipv6(host[1:-1], text)


def _check_ipv6(address: str, text: str) -> None:
    try:
        written = ipaddress.IPv6Address(address).compressed
    except ValueError:
        raise ValueError(f"{text!r} has no address between its brackets") from None
    if written != address:
        raise ValueError(f"{text!r} has an address that browsers write as [{written}]")
