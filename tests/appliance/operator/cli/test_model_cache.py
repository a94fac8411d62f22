"""``athanor model pull`` and its companions: how they look, what other programs read, what the document says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from appliance.common.config_loader import load_config
from tests.appliance import golden
from tests.appliance.fetch.sample import make_model
from tests.appliance.operator.cli.conftest import Run

GOLDEN = Path(__file__).parent / "golden"

FILE = """\
models: [{name: served, digest: "%s"}]
policy: policy.yaml
credentials: credentials.json
pepper: pepper
run_dir: run
model_cache: {directory: cache}
listen: {admin: "127.0.0.1:1"}  # nobody listens: an appliance that runs on this machine is none of the test's
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models and a configuration that names the first by its digest."""
    monkeypatch.chdir(tmp_path)
    first = make_model(tmp_path / "models" / "served", (100,), seed=1)
    make_model(tmp_path / "models" / "llama", (5_000, 100), seed=2)
    (tmp_path / "athanor.yaml").write_text(FILE % first)
    return tmp_path


def masked(text: str, place: Path) -> str:
    """The text without its folder, times, durations and lines of progress, which differ from run to run."""
    text = re.sub(r"^pulling: .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "2026-11-25 12:00:00", text.replace(str(place), "/srv"))
    return re.sub(r"in [\d.]+ (ms|s)", "in 1.00 s", text)


def test_pulls_lists_and_models_look_as_agreed(run: Run, place: Path) -> None:
    """The digest alone on standard output of a pull; a table of the cache; a model with its lines for athanor.yaml."""
    pulled = run("model", "pull", "models/llama", "--pin", "-c", "athanor.yaml", columns=160)
    assert re.fullmatch(r"digest: [0-9a-f]{64}\n", pulled.stdout), pulled.output
    assert run("model", "pull", "models/served", "-c", "athanor.yaml").exit_code == 0
    listed, shown = (
        run("model", *words, "-c", "athanor.yaml", columns=160) for words in (("list",), ("show", "llama"))
    )
    text = "\n".join((pulled.stderr, listed.stdout, shown.stdout))
    golden.check(GOLDEN / "model-cache-160.txt", masked(text, place))


def test_the_documents_commands_work_in_their_order(run: Run, place: Path, root: Path) -> None:
    """Each command of docs/model-cache.md, as it is written there."""
    (block,) = re.findall(r"```sh\n(.*?)```", (root / "docs/model-cache.md").read_text(), re.DOTALL)
    commands = block.splitlines()
    assert len(commands) == 7
    for command in commands:
        words = command.split()
        assert words[0] == "athanor"
        done = run(*words[1:])
        assert done.exit_code == 0, (command, done.output)
    assert list((place / "cache" / "models").iterdir()) == []


def test_other_programs_can_read_what_a_pull_did(run: Run, place: Path) -> None:
    """JSON of a pull, of the list and of a model agree; a model of the configuration is marked."""
    pulled = json.loads(run("model", "pull", "models/served", "-c", "athanor.yaml", "-o", "json").stdout)
    listed = json.loads(run("model", "list", "-c", "athanor.yaml", "-o", "json").stdout)
    shown = json.loads(run("model", "show", "served", "-c", "athanor.yaml", "-o", "json").stdout)
    assert (pulled["hit"], pulled["fetched"]) == (False, pulled["size"])
    assert [(one["digest"], one["served"], one["bytes"]) for one in listed["models"]] == [
        (pulled["digest"], True, pulled["size"])
    ]
    assert shown["folder"] == pulled["folder"]
    assert sum(one["bytes"] for one in shown["files"]) == pulled["size"]


def test_a_model_of_the_cache_needs_no_path(run: Run, place: Path) -> None:
    """A digest in athanor.yaml names a folder of the cache; neither a digest nor a path is a problem with its line."""
    pulled = json.loads(run("model", "pull", "models/served", "-c", "athanor.yaml", "-o", "json").stdout)
    config = load_config(place / "athanor.yaml")
    assert str(config.models[0].folder) == pulled["folder"]
    assert run("model", "remove", "served", "-c", "athanor.yaml").exit_code == 1
    (place / "athanor.yaml").write_text(FILE % "")
    refused = run("model", "list", "-c", "athanor.yaml")
    assert "athanor.yaml:1:10: models[0]: a model needs a path, or the digest of a model of the cache" in refused.output


def test_verify_names_the_file_that_differs(run: Run, place: Path) -> None:
    """A flipped byte and a file too many are told, with exit code 1; control: before that it is whole."""
    done = json.loads(run("model", "pull", "models/llama", "-c", "athanor.yaml", "-o", "json").stdout)
    assert run("model", "verify", "-c", "athanor.yaml").exit_code == 0
    path = Path(done["folder"]) / "model-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[1_234] ^= 1
    path.write_bytes(data)
    flipped = run("model", "verify", "llama", "-c", "athanor.yaml")
    assert (flipped.exit_code, "model-00000.safetensors has the digest" in flipped.output) == (1, True)
    (path.parent / "more.safetensors").write_bytes(b"")
    more = run("model", "verify", "llama", "-c", "athanor.yaml")
    assert "a file more or less than was pulled: more.safetensors" in more.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pull", "nothing-here"), "is no folder"),
        (("pull", "models/llama", "--digest", "zz"), "64 hexadecimal digits"),
        (("pull", "models/llama", "--name", "../x"), "is no name of a model"),
        (("show", "llama"), "there is no model llama in the cache"),
        (("remove", "abcdef"), "there is no model abcdef in the cache"),
    ],
)
def test_what_cannot_be_done_is_told(run: Run, place: Path, words: tuple[str, ...], said: str) -> None:
    """Exit code 1, one line that says what to do, no traceback."""
    done = run("model", *words, "-c", "athanor.yaml")
    assert (done.exit_code, said in done.output) == (1, True), done.output
