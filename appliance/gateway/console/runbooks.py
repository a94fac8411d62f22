"""The page that the alerts' ``runbook_url`` names: what each alert means and what to do, ``/runbooks#ALERT``.

It is the text of docs/observability.md, written by ``docs/monitoring/build.py``, the same for everybody: nothing on it
is about this machine. The admin listener and the metrics listener serve it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILE = Path(__file__).resolve().parent / "runbooks.html"

PATH = "/runbooks"

_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)


def runbooks_route() -> Route:
    """Return the route of the page.

    Raises:
        OSError: it cannot be read.
    """
    text = FILE.read_text()
    headers = {
        "content-security-policy": policy(text),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def runbooks(_: Request) -> Response:
        return Response(text, media_type="text/html; charset=utf-8", headers=headers)

    return Route(PATH, runbooks)


def policy(page: str) -> str:
    """Return the Content-Security-Policy of a page: its own styles, by their digest, and nothing else."""
    digests = (base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() for style in _STYLE.findall(page))
    styles = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return f"default-src 'none'; style-src {styles}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
