"""Programs and commands of docs/grpc.md, run as they stand against whole appliances; only the address is another.

What needs Go, Node, grpcurl or buf is skipped with the reason where a machine has none (``make grpc-clients``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from appliance.common import errors
from appliance.common.errors import ApplianceError
from appliance.gateway.grpc import generate_code
from tests.appliance.gateway.front.pki import Authority
from tests.grpc_clients import programs
from tests.grpc_clients.call import Call
from tests.grpc_clients.python_clients import call_blocking
from tests.system.conftest import Appliance
from tests.system.grpc_server import SPIFFE_ID, serve_grpc

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

ADDRESS = "127.0.0.1:8081"
"""The address as the page has it."""

RUN_S = 120.0


@dataclass(frozen=True)
class Reader:
    """Somebody who does what the page says, in a folder of their own."""

    text: str
    folder: Path
    address: str
    key: str

    def block(self, title: str) -> str:
        """A program or commands of the page, with the appliance's own address."""
        (found,) = re.findall(rf"^```\w+ {re.escape(title)}\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)
        return str(found).replace(ADDRESS, self.address)

    def shell(self, commands: str, *path: Path) -> str:
        """Run commands, each of which has to end well; gives what they print."""
        places = [Path(sys.executable).parent, *path]
        environment = {
            **os.environ,
            "PATH": os.pathsep.join((*map(str, places), os.environ.get("PATH", ""))),
            "ATHANOR_KEY": self.key,
            "PROTO": str(generate_code.TENANTS.root),
        }
        done = subprocess.run(
            ["bash", "-euc", commands],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_S,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def python(self, title: str, code: str = "python-code") -> str:
        """Run a Python program of the page, after the code for its messages was made."""
        self.shell(self.block(code))
        (self.folder / title).write_text(self.block(title))
        return self.shell(f"python {title}")

    def typescript(self, title: str) -> str:
        """Run a TypeScript program of the page, after types were made from the .proto and it was compiled with all
        checks as the page says; the test is skipped without Node's packages."""
        (self.folder / "node_modules").symlink_to(programs.node_packages())
        self.shell(self.block("ts-code"))
        (self.folder / title).write_text(self.block(title))
        return self.shell(self.block("ts-run").replace("ask.", f"{title.partition('.')[0]}."))

    def go(self, title: str) -> str:
        """Run a Go program of the page, after its code was generated and it was compiled as the page says, but from
        Debian's packages in place of a module proxy's; the test is skipped without them."""
        go = programs.go_tools()
        package = self.folder / "src/ask"
        package.mkdir(parents=True)
        (package / title).write_text(self.block(title))
        self.shell("cd src/ask\n" + self.block("go-code"), go.plugins)
        return self.shell(str(go.build(package / title, self.folder)))


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    """The page."""
    return (root / "docs/grpc.md").read_text()


@pytest.fixture(scope="module")
def with_key(text: str, tmp_path_factory: pytest.TempPathFactory, appliance: Appliance) -> Reader:
    """A reader with a key, at a demo, which has no TLS."""
    return Reader(text, tmp_path_factory.mktemp("key"), appliance.ready["grpc"], appliance.key("alpha"))


@pytest.fixture(scope="module")
def with_certificate(text: str, tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Reader]:
    """A reader with the page's certificates, at an appliance that uses them too: the full count alone has one, and
    `make test` a client with a certificate in tests/system/test_grpc_clients.py and test_serve.py."""
    folder = tmp_path_factory.mktemp("certificate")
    Reader(text, folder, "", "").shell(Reader(text, folder, "", "").block("certificates"))
    tls = {"certificate": "server.pem", "key": "server.key", "client_ca": "ca.pem"}
    with serve_grpc(folder, tls) as served:
        yield Reader(text, folder, served.address, "")


def test_the_page_names_the_policy_s_id(text: str) -> None:
    """The id of the page's certificate is the one in its piece of a policy, and in the policy of these tests."""
    assert text.count(f'"{SPIFFE_ID}"') == 1 and f"URI:{SPIFFE_ID}\n" in text


def test_python_with_a_key(with_key: Reader) -> None:
    """The first program prints an answer and its count."""
    answer, _, count = with_key.python("ask.py").strip().rpartition("\n")
    assert answer != "" and 1 <= int(count.removeprefix("output tokens: ")) <= 32


@pytest.mark.full
def test_python_with_a_certificate(with_certificate: Reader) -> None:
    """The second one prints an answer, and of an error the code, the message and the reason."""
    *answer, error, reason = with_certificate.python("ask_mtls.py").splitlines()
    assert "".join(answer) != ""
    assert error.startswith("NOT_FOUND the model 'no-such-model' does not exist here; yours are: athanor-mini")
    assert reason == "reason: MODEL_NOT_FOUND"


@pytest.mark.full
def test_typescript_with_a_key(with_key: Reader) -> None:
    """The program prints an answer, and the code and the message of an error."""
    *answer, error = with_key.typescript("ask.ts").splitlines()
    assert "".join(answer) != ""
    assert error.startswith("NOT_FOUND: the model 'no-such-model' does not exist here")


@pytest.mark.full
def test_go_with_a_certificate(with_certificate: Reader) -> None:
    """The program prints an answer, and of an error the code, the message and the reason."""
    *answer, error, reason = with_certificate.go("ask.go").splitlines()
    assert "".join(answer) != ""
    assert error.startswith("NotFound: the model 'no-such-model' does not exist here")
    assert reason == "reason: MODEL_NOT_FOUND"


def test_grpcurl(with_key: Reader) -> None:
    """It lists the services and generates by reflection."""
    printed = with_key.shell(with_key.block("grpcurl"), Path(programs.grpcurl()).parent)
    assert "athanor.inference.v1.InferenceService\n" in printed and '"finished"' in printed


@pytest.mark.full
def test_grpcurl_with_a_certificate(with_certificate: Reader) -> None:
    """It lists the models by reflection."""
    place = Path(programs.grpcurl()).parent
    assert '"name": "athanor-mini"' in with_certificate.shell(with_certificate.block("grpcurl-mtls"), place)


@pytest.mark.full
def test_buf(with_key: Reader, with_certificate: Reader) -> None:
    """It lists the services, generates and lists the models by reflection."""
    place = Path(programs.buf()).parent
    printed = with_key.shell(with_key.block("buf"), place)
    assert "athanor.inference.v1.InferenceService\n" in printed
    assert '"finished"' in printed
    assert "athanor-mini" in with_certificate.shell(with_certificate.block("buf-mtls"), place)


def test_errors_are_those_of_the_table(text: str) -> None:
    """Every status that the appliance sends has a row that says what to do, and no other has one."""
    kinds = {one.wire.grpc for one in vars(errors).values() if isinstance(one, type) and _has_row(one)}
    table = text.partition("## Errors")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", table, re.MULTILINE)) == kinds


def _has_row(kind: type) -> bool:
    return issubclass(kind, ApplianceError) and kind is not ApplianceError


@pytest.mark.full
def test_what_a_client_says_without_a_connection_is_in_the_table(
    with_key: Reader, with_certificate: Reader, text: str, tmp_path: Path
) -> None:
    """No TLS where there should be, no certificate, an authority that is not known, and TLS where there is none: the
    words of the Python client stand in the row of each."""
    rows = re.findall(r'^\| (".*?) \| (.*?) \|$', text.partition("## When it does not connect")[2], re.MULTILINE)
    meant = {said: meaning for words, meaning in rows for said in re.findall(r'"(.+?)"', words)}
    ca, key = with_certificate.folder / "ca.pem", with_key.key
    other = tmp_path / "other.pem"
    other.write_bytes(Authority.create("other").pem)
    for call, meaning in (
        (Call(address=with_certificate.address, key=key), "the port has TLS and the client has none"),
        (Call(address=with_certificate.address, key=key, ca=ca), "demands a client certificate"),
        (Call(address=with_certificate.address, key=key, ca=other), "does not know the server's"),
        (Call(address=with_key.address, key=key, ca=ca), "the client speaks TLS and the port plain text"),
    ):
        answer = call_blocking(call)
        if answer.reason == "UNAUTHENTICATED" and "client certificate" in answer.message:
            continue  # a server that tells it itself
        assert (answer.code, answer.reason) == ("UNAVAILABLE", "")
        assert any(said in answer.message and meaning in row for said, row in meant.items()), answer.message
    look = f"openssl s_client -connect {with_certificate.address} -alpn h2 -CAfile ca.pem </dev/null || true"
    assert look.partition(" <")[0].replace(with_certificate.address, ADDRESS) in text
    shown = with_certificate.shell(look)
    assert "Requested Signature Algorithms" in shown
