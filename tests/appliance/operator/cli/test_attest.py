"""``athanor attest``: what is verified, what is not as expected, and what is said of one that cannot be asked."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.audit.attestation import sign_attestation
from tests.appliance.common.audit.test_attestation import EARLIER, KEY, ONE, VERIFIER
from tests.appliance.operator.cli.conftest import Run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an attestation, the public key and a tenant's API key."""
    (tmp_path / "text").write_text(sign_attestation(ONE, KEY), encoding="utf-8")
    (tmp_path / "public.key").write_text(VERIFIER.line() + "\n")
    (tmp_path / "api.key").write_text("ath_alpha-1_00\n")
    return tmp_path


def verify(run: Run, folder: Path, *more: str):
    """Verify the attestation."""
    return run("attest", "verify", str(folder / "text"), "--key", str(folder / "public.key"), *more)


def test_what_is_as_expected_is_said(run: Run, folder: Path) -> None:
    """With its nonce and fields it holds; without the nonce the answer warns of an old one; JSON has every field."""
    told = verify(run, folder, "--nonce", ONE.nonce, "--expect", "runtime=gvisor/systrap", "--expect", "tenant=alpha")
    assert (told.exit_code, "the nonce is yours" in told.stdout) == (0, True), told.stderr
    assert "it may be an old one" in verify(run, folder).stdout
    found = json.loads(verify(run, folder, "-o", "json").stdout)
    assert (found["ok"], found["fresh"], found["model_digest"]) == (True, False, ONE.asked.digest)
    assert (found["form"], [one["name"] for one in found["models"]]) == (3, ["athanor-large", "athanor-mini", "far"])
    assert found["adapters"] == [{"name": "athanor-mini:support", "digest": "45" * 32}]


def test_all_models_and_adapters_are_shown(run: Run, folder: Path) -> None:
    """The one that was asked about first; what is outside of the appliance, further flags and adapters stand out; each
    digest can be expected."""
    shown = verify(run, folder).stdout
    names = ("athanor-mini ", "athanor-large ", "far ", "athanor-mini:support ")
    assert sorted(names, key=shown.index) == list(names)
    assert "OUTSIDE of the appliance" in shown and "further flags --nvproxy" in shown
    right = ("--expect", f"models.far={'fa' * 32}", "--expect", f"adapters.athanor-mini:support={'45' * 32}")
    assert verify(run, folder, *right).exit_code == 0
    told = verify(run, folder, "--expect", "adapters.athanor-mini:other=00")
    assert (told.exit_code, "adapters.athanor-mini:other is not stated" in told.stdout) == (1, True)


def test_a_hostile_signer_steers_no_terminal(run: Run, folder: Path) -> None:
    """Texts with escapes, and a time that no calendar has, are shown as plain text: who holds the log's key may be
    hostile to who verifies. Control: the escapes are in what was signed."""
    bad = "x\x1b[2J\r"
    models = tuple(replace(one, digest=bad, signer=bad, flags=(bad,)) for one in ONE.models)
    adapters = tuple(replace(one, digest=bad) for one in ONE.adapters)
    names = ("isolation_class", "policy", "image", "program", "program_digest", "log", "limits", "version", "selftest")
    texts = dict.fromkeys(names, bad) | {"log": ONE.log, "runtime": f"gvisor/{bad}", "time": 10**400}
    hostile = replace(ONE, models=models, adapters=adapters, flags=(bad,), **texts)  # type: ignore[arg-type]
    (folder / "text").write_text(sign_attestation(hostile, KEY), encoding="utf-8")
    told = verify(run, folder)
    assert told.exit_code == 0 and "\x1b" not in told.stdout and "x?[2J?" in told.stdout
    assert "no calendar" in told.stdout and "\\u001b" in (folder / "text").read_text()


def test_one_of_an_earlier_release_is_verified(run: Run, folder: Path) -> None:
    """The text that an earlier release signed: its one model, its nonce, and that it tells of nothing else. Changed, it
    is refused (control)."""
    (folder / "text").write_bytes(EARLIER)
    told = verify(run, folder, "--nonce", ONE.nonce, "--expect", f"model_digest={'ab' * 32}")
    assert (told.exit_code, "the nonce is yours" in told.stdout, "it names one model" in told.stdout) == (0, True, True)
    (folder / "text").write_bytes(EARLIER.replace(b"alpha", b"omega"))
    assert verify(run, folder).exit_code == 1


def test_what_is_not_as_expected_is_told(run: Run, folder: Path) -> None:
    """Another nonce, another value, a sandbox that is none: exit code 1, with both values; no isolation shows."""
    told = verify(run, folder, "--nonce", "0" * 16)
    assert (told.exit_code, "not what is expected" in told.stdout) == (1, True)
    (folder / "text").write_text(sign_attestation(replace(ONE, runtime="unsafe/none", program=""), KEY))
    told = verify(run, folder, "--expect", "runtime=gvisor/systrap")
    assert (told.exit_code, "NOT ISOLATED" in told.stdout) == (1, True)
    assert "runtime is 'unsafe/none', not 'gvisor/systrap'" in told.stdout


def test_what_cannot_be_verified_is_refused(run: Run, folder: Path) -> None:
    """A changed text, missing files, a key that is none, a field that is none."""
    assert verify(run, folder, "--expect", "flags=x").exit_code == 2
    assert verify(run, folder, "--expect", "runtime").exit_code == 2
    text = (folder / "text").read_text(encoding="utf-8")
    (folder / "text").write_text(text.replace('"alpha"', '"omega"'), encoding="utf-8")
    told = verify(run, folder)
    assert (told.exit_code, "changed after it was signed" in told.stderr) == (1, True)
    (folder / "text").unlink()
    assert verify(run, folder).exit_code == 1
    (folder / "public.key").write_text("no key")
    assert (told := verify(run, folder)).exit_code == 1 and "verifier key" in told.stderr


@pytest.fixture
def other() -> Iterator[str]:
    """Address of a program that is no appliance: it answers by what it is asked for."""

    class Other(http.server.BaseHTTPRequestHandler):
        """Another server."""

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, text = {"page": (200, "<html>"), "list": (200, "[]"), "gone": (500, "oops")}[body["model"]]
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_words: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("model", "said"), [("page", "cannot ask"), ("list", "is no attestation"), ("gone", "answers 500")]
)
def test_another_program_is_told(run: Run, folder: Path, other: str, model: str, said: str) -> None:
    """Text that is no JSON, JSON that is no attestation, an error without a reason: exit code 1 and a line about it."""
    told = run("attest", "ask", "--url", other, "--model", model, "--key-file", str(folder / "api.key"))
    assert (told.exit_code, said in told.stderr) == (1, True), told.stderr


@pytest.mark.parametrize(("url", "said"), [("http://127.0.0.1:1", "cannot ask"), ("ftp://x", "is no address")])
def test_what_cannot_be_asked_is_told(run: Run, folder: Path, url: str, said: str) -> None:
    """Nothing listens, no address; a missing key file is told before anything is asked."""
    ask = ("attest", "ask", "--url", url, "--model", "m", "--key-file")
    told = run(*ask, str(folder / "api.key"))
    assert (told.exit_code, said in told.stderr) == (1, True), told.stderr
    assert run(*ask, str(folder / "none")).exit_code == 1
