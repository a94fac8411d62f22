"""The documents name only what exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from ruamel.yaml import YAML

from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.config_loader import load_config
from appliance.common.errors import InvalidRequestError
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import Operation
from appliance.gateway.http import openai, unsupported
from appliance.operator.cli import exits
from appliance.operator.cli.app import app
from policy.loader import Source, load_policy
from policy.schema import PolicySchema, TenantSchema

DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "SECURITY.md",
    "docs/sampling.md",
    "docs/install.md",
    "docs/operate.md",
    "docs/proxies.md",
    "docs/console.md",
    "docs/observability.md",
    "docs/coming-from.md",
    "docs/models.md",
    "docs/model-cache.md",
    "docs/kv-quotas.md",
    "docs/policy.md",
    "docs/identity.md",
    "docs/classes.md",
    "docs/images.md",
    "docs/upgrade.md",
    "docs/weights.md",
    "docs/compressed-weights.md",
    "docs/retention-and-spill.md",
    "docs/structured-output.md",
    "docs/gpu.md",
    "docs/grpc.md",
    "docs/soak.md",
    "docs/door.md",
    "docs/add-a-model.md",
    "docs/usage.md",
    "docs/batches.md",
    "docs/stored-responses.md",
    "docs/adapters.md",
    "docs/fleet.md",
    "docs/kubernetes.md",
)
PLACES = ("", "docs/", "docs/monitoring/", "appliance/", "engine/", "isolation/")
"""Where a path in a document may begin."""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_in_a_document_exists(root: Path, name: str) -> None:
    """What looks like a file or folder of ours is one."""
    text = (root / name).read_text()
    words = re.findall(r"[`(]([a-zA-Z_][\w./-]*(?:\.py|\.md|\.yaml|/))[`)]", text)
    assert words
    made = ("policy.yaml", "policy.shadow.yaml", "athanor.yaml", ".athanor/", "new/", "old/")
    missing = [
        word for word in words if word not in made and not any((root / place / word).exists() for place in PLACES)
    ]
    assert missing == []


def test_every_link_leads_somewhere(root: Path) -> None:
    """Each relative link of each document names a file that is there, and a heading of it where it names one."""
    documents = [root / name for name in ("README.md", "ARCHITECTURE.md", "SECURITY.md", "CHANGELOG.md")]
    documents += sorted((root / "docs").glob("*.md")) + sorted(root.glob("*/README.md"))
    dead, seen = [], 0
    for document in documents:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            seen += 1
            path, _, anchor = target.partition("#")
            file = (document.parent / path).resolve() if path else document
            if not file.exists() or (anchor and anchor not in anchors(file)):
                dead.append(f"{document.name}: {target}")
    assert seen > 20
    assert dead == []


def anchors(file: Path) -> set[str]:
    """The headings of a document as links name them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def block(root: Path, title: str) -> str:
    """The code block of a title in the page for those who come from other servers."""
    (found,) = re.findall(rf"```yaml {title}\n(.*?)```", (root / "docs/coming-from.md").read_text(), re.DOTALL)
    return str(found)


def test_what_the_page_of_adapters_shows_is_understood(root: Path) -> None:
    """Both its blocks are valid, and the adapter that the policy grants, by name and by a route, is one of the
    configuration's."""
    text = (root / "docs/adapters.md").read_text()
    shown = dict(re.findall(r"```yaml (\S+)\n(.*?)```", text, re.DOTALL))
    (entry,) = YAML(typ="safe").load(shown["athanor.yaml"])["models"]
    model = ModelConfig.model_validate(entry)
    policy = load_policy([Source("policy.yaml", shown["policy.yaml"])])
    (name,) = policy.tenants["alpha"].adapters
    assert name in model.adapter_digests
    assert policy.routes["help-desk"].models == (name,)


def test_what_those_who_come_from_other_servers_paste_is_understood(root: Path, tmp_path: Path) -> None:
    """Both files of the page are valid, and each key that its table of options names in code is one."""
    (tmp_path / "athanor.yaml").write_text(block(root, "athanor.yaml"))
    config = load_config(tmp_path / "athanor.yaml")
    policy = load_policy([Source("policy.yaml", block(root, "policy.yaml"))])
    assert [model.name for model in config.models] == ["qwen3-8b"]
    assert sorted(policy.tenants) == ["nightly", "web"]
    text = (root / "docs/coming-from.md").read_text()
    last = [row.split(" | ")[-1] for row in text.partition("## Options")[2].partition("##")[0].splitlines()]
    named = {word for cell in last for word in re.findall(r"\b(?:model|tenant): `([a-z_]+)", cell)}
    assert len(named) >= 10
    assert named <= {*ModelConfig.model_fields, *TenantSchema.model_fields}


def yaml_blocks(text: str) -> list[dict[str, Any]]:
    """The fenced and indented blocks of a document that begin with a key of one of our two files."""
    blocks = re.findall(r"```yaml[^\n]*\n(.*?)```", text, re.DOTALL)
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    blocks += [dedent(block) for block in re.findall(r"(?:^|\n\n)((?:    .*\n|\n(?=    ))+)", plain)]
    keys = "|".join((*PolicySchema.model_fields, *ApplianceConfig.model_fields))
    return [YAML(typ="safe").load(block) for block in blocks if re.match(rf"(?:#.*\n)?(?:{keys}):", block)]


def test_pieces_of_configuration_in_the_documents_are_valid(root: Path) -> None:
    """Each piece of a policy or an athanor.yaml is what the schemas take, whatever it leaves out."""
    machine = {
        "models": [{"name": "m", "path": "p"}],
        "policy": "p",
        "credentials": "c",
        "pepper": "p",
        "run_dir": "r",
        "keys": {"root_key": "r", "keyring": "k"},
    }
    members = {"host": "a", "file": "f", "authority": "0" * 64, "key": "k", "accepted": "a"}
    shares = {
        "sandbox": {"spill": {"memory": 1 << 30}},
        "kv_store": {"store": "s:1", "size": 1 << 30, "members": members},
    }
    found = [(path.name, one) for path in (root / "docs").glob("*.md") for one in yaml_blocks(path.read_text())]
    assert len(found) >= 12
    for name, piece in found:
        try:
            if piece.keys() & PolicySchema.model_fields.keys():
                PolicySchema.model_validate({"version": 1, "tenants": {}} | piece)
            else:
                ApplianceConfig.model_validate(machine | (shares if "split" in piece else {}) | piece)
        except ValidationError as error:
            wrong = [one for one in error.errors() if one["type"] != "missing"]
            assert wrong == [], (name, piece)


def test_fields_of_a_request_are_met_as_the_page_says(root: Path) -> None:
    """Its list of served fields is whole, refused ones are a 400 of their name, the others are reported as ignored."""
    part = (root / "docs/coming-from.md").read_text().partition("## Fields of a request")[2].partition("\n## ")[0]
    kinds = re.split(r"\n\n(?=Refused|Every)", part)
    served, refused, ignored = (set(re.findall(r"`([a-z_]+)`", one)) for one in kinds)
    assert served == set().union(*openai._SERVED.values())
    begin = {"model": "m", "messages": [{"role": "user", "content": "x"}]}

    def parse(**fields: object) -> openai.Parsed:
        return openai.parse(Operation.CHAT, json.dumps(begin | fields).encode(), Stamp("r"))

    assert parse(tools=[], tool_choice="none").ignored == ()
    assert refused == set(unsupported.FIELDS)
    for name in refused:
        with pytest.raises(InvalidRequestError, match=name) as caught:
            parse(**{name: "something"})
        assert caught.value.param == name
    others = ignored - served - refused
    assert {"mirostat", "n_predict"} <= others
    assert set(parse(**dict.fromkeys(others, 1)).ignored) == others


def test_make_targets_in_the_documents_exist(root: Path) -> None:
    """Every `make X` that a document names is a target."""
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    pattern = re.compile(r"(?:`|^    )make ([a-z]+)", re.MULTILINE)
    named = {word for name in DOCUMENTS for word in pattern.findall((root / name).read_text())}
    assert {"run", "test"} <= named <= targets


def test_every_command_is_documented_and_every_documented_one_exists(root: Path) -> None:
    """The table of docs/operate.md and the command line name the same commands."""
    text = (root / "docs/operate.md").read_text()
    table = text.partition("## Commands")[2].partition("##")[0]
    documented = set(re.findall(r"`athanor ([a-z]+(?:[ -][a-z]+)*)`", table))
    command = typer.main.get_command(app)
    existing = set()
    for name, one in command.commands.items():  # type: ignore[attr-defined]
        below = getattr(one, "commands", None)
        existing |= {name} if below is None else {f"{name} {inner}" for inner in below}
    assert documented == existing


def test_every_command_that_is_named_anywhere_can_be_typed(root: Path) -> None:
    """Documents, hints, mends and alerts name commands and options that there are."""
    files = [*root.glob("*.md"), *root.glob("docs/**/*.md"), root / "bench/README.md"]
    files += [root / "docs/monitoring/alerts.yaml"]
    files += [*(root / "appliance").rglob("*.py"), *(root / "systemd").glob("*")]
    named = set()
    for file in files:
        before = r"`|\b(?:mend|command)=f?\"|^" if file.suffix == ".py" else r"^ {4}|^|`|\.venv/bin/|&& |; |mend: "
        for words in re.findall(rf"(?:{before})athanor ([a-z][^`\"\n#|;]*)", file.read_text(), re.MULTILINE):
            named.add((words.strip(), file.relative_to(root).as_posix()))
    assert len(named) > 150
    command = typer.main.get_command(app)
    wrong = [f"{file}: {words}" for words, file in sorted(named) if not can_be_typed(command, words.split())]
    assert wrong == []


def can_be_typed(command: Any, words: list[str]) -> bool:
    """Whether these name a command below this one, and options of it."""
    while words and (below := getattr(command, "commands", None)) is not None:
        if words[0].rstrip(".,:)") not in below:
            return words[0].startswith("-")
        command, words = below[words[0].rstrip(".,:)")], words[1:]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    return all(re.split(r"[=.,:)']", word)[0] in known for word in words if word.startswith("--"))


def test_exit_codes_are_documented(root: Path) -> None:
    """The table of docs/operate.md has each code of the command line, and no other."""
    codes = {value for name, value in vars(exits).items() if name.isupper()}
    table = (root / "docs/operate.md").read_text().partition("## Exit codes")[2].partition("##")[0]
    assert {int(code) for code in re.findall(r"^\| (\d) \|", table, re.MULTILINE)} == codes


def test_indented_commands_of_the_operators_guide_run(root: Path, tmp_path: Path) -> None:
    """The doctor's line ends well on any machine where nothing is a problem, and prints the summary."""
    (line,) = re.findall(r"^    (athanor .*)$", (root / "docs/operate.md").read_text(), re.MULTILINE)
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "'problem':" in done.stdout
