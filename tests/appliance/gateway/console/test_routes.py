"""The console over HTTP: files, headers, who is refused, what is bounded."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from hatchling.builders.wheel import WheelBuilder

from appliance.gateway.console.page_head import HEADS, MARK
from appliance.gateway.console.routes import CONTENT_TYPES, FOLDER, read_assets, read_question
from appliance.operator.install.deb import OUR_PACKAGES
from tests.appliance.gateway.console.conftest import Console

MAX_LINES = 300
"""Lines of a file of the page."""


def test_the_page_and_all_its_files_are_served(console: Console) -> None:
    """Each file has its type, and whatever the page and its modules name is there."""
    assets = read_assets()
    for name, asset in assets.items():
        answer = httpx.get(f"{console.url}/console/{name}")
        assert (answer.status_code, answer.content) == (200, asset.body), name
        assert answer.headers["content-type"] == asset.content_type
    named = {
        word
        for asset in assets.values()
        for word in re.findall(r'(?:href|src|from) ?=? ?"(?:\./)?([a-z]+\.(?:js|css|svg))"', asset.body.decode())
    }
    assert {"main.js", "base.css", "icon.svg", "dom.js"} <= named <= set(assets)
    assert httpx.get(f"{console.url}/console/").content == assets["index.html"].body


@pytest.mark.parametrize("path", ["/", "/console"])
def test_short_addresses_lead_to_the_page(console: Console, path: str) -> None:
    """What an operator types by heart ends on the page."""
    answer = httpx.get(f"{console.url}{path}", follow_redirects=True)
    assert answer.status_code == 200
    assert str(answer.url).endswith("/console/")


def test_browsers_are_told_to_trust_nothing_else(console: Console) -> None:
    """Every answer has the policy: own files only, nothing inline, no frame, no markup from strings, no sniffing."""
    for path in ("/console/", "/console/main.js", "/console/look", "/console/nothing", "/console/requests/123456"):
        headers = httpx.get(f"{console.url}{path}").headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "set-cookie" not in headers
        assert "access-control-allow-origin" not in headers


def test_a_file_that_is_known_is_not_sent_again(console: Console) -> None:
    """An ETag gives 304 with nothing in it; another one the file."""
    etag = httpx.get(f"{console.url}/console/main.js").headers["etag"]
    again = httpx.get(f"{console.url}/console/main.js", headers={"if-none-match": f'W/"x", {etag}'})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.get(f"{console.url}/console/main.js", headers={"if-none-match": '"x"'}).status_code == 200


@pytest.mark.parametrize("path", ["/console/look", "/console/requests/req_7f3a9c01de5544aa90b1c2d3"])
def test_pages_of_others_get_nothing(console: Console, path: str) -> None:
    """A rebound name, another origin and another site's fetch are refused; the page itself is answered."""
    url = f"{console.url}{path}"
    assert httpx.get(url).status_code == 200
    own = {"sec-fetch-site": "same-origin", "origin": console.url}
    assert httpx.get(url, headers=own).status_code == 200
    for headers in (
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1:1"},
    ):
        assert httpx.get(url, headers=headers).status_code == 403, headers


@pytest.mark.parametrize("name", ["../picture.py", "..%2fpicture.py", "index.html%00", "%2e%2e/assets.py", "x" * 5_000])
def test_only_the_page_is_served(console: Console, name: str) -> None:
    """No name leads out of the folder."""
    assert httpx.get(f"{console.url}/console/{name}").status_code == 404


@pytest.mark.parametrize(
    "query",
    [
        "after=x",
        "after=nan",
        "after=inf",
        "offset=-1",
        "offset=1234567",
        "offset=x",
        f"find={'x' * 65}",
        "outcome=all",
        "offset=%D9%A3",
    ],
)
def test_odd_questions_are_refused_in_words(console: Console, query: str) -> None:
    """Bad input is a 400 that says which field."""
    answer = httpx.get(f"{console.url}/console/look?{query}")
    assert answer.status_code == 400
    assert query.partition("=")[0] in answer.json()["error"]["message"]


def test_what_is_not_named_has_its_default() -> None:
    """An empty query asks for everything from the beginning."""
    question = read_question({})
    assert (question.after, question.offset, question.find, question.outcome) == (0.0, 0, "", "")


def test_nothing_but_looking_is_taken(console: Console) -> None:
    """Every other method is refused."""
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/console/", "/console/look", "/console/main.js"):
            assert httpx.request(method, f"{console.url}{path}").status_code == 405


def test_the_files_are_small_and_whole() -> None:
    """Every file below 300 lines, no inline script or style, no other host, none left out by its suffix."""
    for path in FOLDER.iterdir():
        assert path.suffix in CONTENT_TYPES
        text = path.read_text()
        assert text.count("\n") < MAX_LINES, path
        assert text.isascii(), path
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", text), path
    pages = [asset.body.decode() for name, asset in read_assets().items() if name.endswith(".html")]
    assert len(pages) == len(HEADS) and all("</head>" in page and MARK not in page for page in pages)
    assert not any(re.search(r"<script(?![^>]*src=)|<style|style=|\son[a-z]+=", page) for page in pages)


def test_an_installation_has_the_files(root: Path) -> None:
    """The wheel holds the page; the Debian package copies the whole folder of each package of ours."""
    packed = {file.distribution_path for file in WheelBuilder(str(root)).recurse_included_files()}
    assert {f"appliance/gateway/console/web/{path.name}" for path in FOLDER.iterdir()} <= packed
    assert "appliance" in OUR_PACKAGES
