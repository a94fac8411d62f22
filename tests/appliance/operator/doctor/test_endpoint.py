"""The doctor names an external model's endpoint that does not serve it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from appliance.common.external_config import ExternalConfig
from appliance.operator.doctor.endpoint import endpoint_problem
from appliance.operator.doctor.facts import Model
from appliance.operator.doctor.service_checks import check_model

LISTED = b'{"data": [{"id": "there"}, {"id": "other"}]}'


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """An endpoint whose list of models is this."""

    class Handler(BaseHTTPRequestHandler):
        """Answers alike whatever is asked for, but a wrong key with 401."""

        def do_GET(self) -> None:
            """Answer."""
            wrong = self.headers["authorization"] == "Bearer wrong"
            self.send_response(401 if wrong else status if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (200, LISTED, ""),
        (200, b'{"data": [{"id": "other"}]}', "it serves no model there"),
        (200, b"[]", "it gives no list of models"),
        (200, b"{", "not acceptable JSON"),
        (500, b"", "it answers 500"),
        (302, b"", "it answers 302"),
    ],
)
def test_what_an_endpoint_says_of_its_models(status: int, body: bytes, problem: str) -> None:
    """Only one that lists the model is well."""
    with answering(status, body) as url:
        found = endpoint_problem(ExternalConfig(url=url, model="there"))
    assert (problem in found) if problem else not found


def test_a_key_that_is_refused_and_one_that_is_missing(tmp_path: Path) -> None:
    """The status is told; a key that cannot be read is told by its file."""
    (tmp_path / "key").write_text("wrong\n")
    with answering(200, LISTED) as url:
        config = {"url": url, "model": "there"}
        assert "401" in endpoint_problem(ExternalConfig(**config, api_key_file=tmp_path / "key"))
        assert "none" in endpoint_problem(ExternalConfig(**config, api_key_file=tmp_path / "none"))
    assert "does not answer" in endpoint_problem(ExternalConfig(**config))


def test_the_finding_says_that_its_requests_fail() -> None:
    """Without a problem the finding says where the model is computed."""
    url = "https://cluster.example.com/v1"
    bad = check_model(Model(name="far", external=url, endpoint_problem="it answers 401"))
    assert (bad.level.name, bad.means) == ("PROBLEM", "its requests fail") and url in bad.what
    assert "outside of this appliance" in check_model(Model(name="far", external=url)).what
