"""``demo``, ``serve`` and ``image``: what they pass on, what they print, how they fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from appliance.common.errors import ConfigError, StartError
from appliance.operator import demo as appliance_demo
from appliance.operator import serve as appliance_serve
from appliance.operator.demo import DemoOptions, DemoReady
from appliance.operator.launcher import Addresses
from tests.appliance import golden
from tests.appliance.common.image.samples import make_image
from tests.appliance.operator.cli.conftest import Run

GOLDEN = Path(__file__).parent / "golden"

READY = DemoReady(
    Addresses("http://127.0.0.1:8080", "127.0.0.1:8081", "http://127.0.0.1:8082", ["athanor-mini"], "gvisor-systrap"),
    {"alpha": "ath_alpha-1_" + "ab" * 32, "beta": "ath_beta-1_" + "cd" * 32},
    Path("state"),
)

Starter = Callable[[DemoOptions, Callable[[DemoReady], None]], int]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[DemoOptions]:
    """A demo that is ready at once and ends well; gives the options it was started with."""
    seen: list[DemoOptions] = []

    def start(options: DemoOptions, on_ready: Callable[[DemoReady], None], **_: object) -> int:
        seen.append(options)
        on_ready(READY)
        return 0

    monkeypatch.setattr(appliance_demo, "run", start)
    monkeypatch.setattr("shutil.which", lambda _: "athanor")
    return seen


def test_demo_banner(run: Run, started: list[DemoOptions]) -> None:
    """The banner has addresses, keys and commands to paste, none of them wrapped or indented."""
    result = run("demo")
    assert result.exit_code == 0
    golden.check(GOLDEN / "demo-80.txt", result.stdout)
    assert started == [DemoOptions()]


def test_demo_without_a_sandbox_is_loud(run: Run, started: list[DemoOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line of an unsafe demo says so."""
    unsafe = replace(READY, addresses=replace(READY.addresses, sandbox="none"))

    def start(_: DemoOptions, on_ready: Callable[[DemoReady], None], **__: object) -> int:
        on_ready(unsafe)
        return 0

    monkeypatch.setattr(appliance_demo, "run", start)
    result = run("demo", "--unsafe-no-sandbox")
    assert result.stdout.split("\n")[1].startswith(" NO SANDBOX")


def test_demo_json(run: Run, started: list[DemoOptions]) -> None:
    """--json prints one line and nothing else."""
    result = run("demo", "--json")
    assert result.stdout == READY.to_json() + "\n"
    assert result.stderr == ""
    assert json.loads(result.stdout)["tenants"]["beta"]["api_key"] == READY.api_keys["beta"]


def test_demo_options(run: Run, started: list[DemoOptions], tmp_path: Path) -> None:
    """Every option reaches the demo; a model folder that is not there is a usage error."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    ports = ("--http-port", "0", "--grpc-port", "1", "--admin-port", "2")
    models = ("--model", str(one), "--model", str(two))
    assert run("demo", *ports, "--unsafe-no-sandbox", "--state-dir", "s", *models).exit_code == 0
    assert started == [
        DemoOptions(
            http_port=0, grpc_port=1, admin_port=2, state_dir=Path("s"), models=(one, two), unsafe_no_sandbox=True
        )
    ]
    assert run("demo", "--model", str(tmp_path / "none")).exit_code == 2
    assert run("demo", "--http-port", "65536").exit_code == 2


def test_demo_that_cannot_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps it from starting is printed in its own words; the end is 4."""

    def start(*_: object, **__: object) -> int:
        raise StartError("port 8080 is in use; choose another with --http-port")

    monkeypatch.setattr(appliance_demo, "run", start)
    result = run("demo")
    assert result.exit_code == 4
    assert result.stdout == ""
    assert result.stderr == "error: port 8080 is in use; choose another with --http-port\n"


def test_the_demos_exit_code_is_the_commands(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo that ends with a code ends the command with it."""
    monkeypatch.setattr(appliance_demo, "run", lambda *_, **__: 7)
    assert run("demo").exit_code == 7


@contextmanager
def openai_server(answer: str) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """A server that answers any chat completion; gives its URL and the requests it got."""
    seen: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append({"path": self.path, "key": self.headers["authorization"], **body})
            message = {"role": "assistant", "content": answer}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            data = json.dumps(
                {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
            ).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("block", [0, 1])
def test_pasted_commands_work(run: Run, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """What the banner prints, pasted into a real shell, is a good request by curl and by openai."""
    if shutil.which("bash") is None or (block == 0 and shutil.which("curl") is None):
        pytest.skip("needs bash and curl")
    with openai_server("it-answers") as (url, seen):
        addresses = replace(READY.addresses, http=url)

        def start(_: DemoOptions, on_ready: Callable[[DemoReady], None], **__: object) -> int:
            on_ready(replace(READY, addresses=addresses))
            return 0

        monkeypatch.setattr(appliance_demo, "run", start)
        text = run("demo").stdout
        titles = ("Ask it as tenant alpha:", "With any OpenAI client:", "See what happened:")
        pasted = text.partition(titles[block])[2].partition(titles[block + 1])[0]
        ended = subprocess.run(
            ["bash", "-c", pasted.replace("python3", sys.executable)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"no_proxy": "*"},
        )
    assert ended.returncode == 0, ended.stderr
    assert "it-answers" in ended.stdout
    (request,) = seen
    assert request["path"] == "/v1/chat/completions"
    assert request["key"] == f"Bearer {READY.api_keys['alpha']}"
    assert request["model"] == "athanor-mini"


def test_serve_passes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, role and settings reach the appliance; the role is both when none is named."""
    seen: list[tuple[Path, str, list[str]]] = []

    def start(path: Path, role: str, settings: Sequence[str]) -> int:
        seen.append((path, role, list(settings)))
        return 0

    monkeypatch.setattr(appliance_serve, "run", start)
    assert run("serve", "-c", "a.yaml").exit_code == 0
    assert run("serve", "--config", "b.yaml", "--role", "gateway", "--set", "a=1", "--set", "b=2").exit_code == 0
    assert seen == [(Path("a.yaml"), "both", []), (Path("b.yaml"), "gateway", ["a=1", "b=2"])]
    assert run("serve", "--config", "b.yaml", "--role", "cook").exit_code == 2


def test_serve_with_a_bad_configuration(run: Run, tmp_path: Path) -> None:
    """The real configuration reader's problems are printed, a line each; the end is 4."""
    path = tmp_path / "athanor.yaml"
    result = run("serve", "--config", str(path))
    assert result.exit_code == 4
    assert "cannot read" in result.stderr
    path.write_text("modles: []\n")
    result = run("serve", "--config", str(path))
    assert result.exit_code == 4
    assert "modles" in result.stderr
    assert f"{path}:1:" in result.stderr.replace("\n", "")


def test_errors_of_several_lines_align(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second line of an error stands under the first one's words."""

    def start(*_: object) -> int:
        raise ConfigError("one\ntwo")

    monkeypatch.setattr(appliance_serve, "run", start)
    assert run("serve", "-c", "x").stderr == "error: one\n       two\n"


def test_image(run: Run, tmp_path: Path) -> None:
    """Verify prints the digest of a real image; another digest than the wanted one, or a changed byte, ends with 1."""
    make_image(tmp_path / "x")
    image = str(tmp_path / "x")
    digest = run("image", "verify", image).stdout.strip()
    assert len(digest) == 64
    assert run("image", "verify", image, "--digest", digest).exit_code == 0
    result = run("image", "verify", image, "--digest", "other")
    assert result.exit_code == 1
    assert f"has the digest {digest}, not other" in " ".join(result.stderr.split())
    changed = next(path for path in sorted((tmp_path / "x").rglob("*")) if path.is_file() and path.suffix != ".json")
    changed.chmod(0o644)
    changed.write_bytes(changed.read_bytes() + b"x")
    assert run("image", "verify", image).exit_code == 1


def test_the_builders_errors_and_hints(run: Run, tmp_path: Path) -> None:
    """The real builder's refusal ends with 1 and keeps its hint apart."""
    (tmp_path / "file").write_text("mine")
    result = run("image", "verify", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path} is no image: ")
    assert "hint:  build one with `athanor image build`" in result.stderr
    result = run("image", "build", str(tmp_path))
    assert result.exit_code == 1
    assert "holds something else than an image" in result.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_image_without_a_builder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed appliance has no builder, and says where there is one."""
    monkeypatch.setitem(sys.modules, "images.build", None)
    result = run("image", "build")
    assert result.exit_code == 1
    assert "source checkout" in result.stderr
