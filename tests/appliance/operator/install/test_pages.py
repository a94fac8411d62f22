"""Manual pages and completions: whole, well formed, the same every time, and what shells and man make of them."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import pytest
import typer

from appliance.common.config import ApplianceConfig, SandboxConfig
from appliance.operator.cli.app import app
from appliance.operator.install import pages
from appliance.operator.reference import policy

SHARE = PurePosixPath("usr/share")


def test_every_command_and_every_key_has_its_place() -> None:
    """Each command has a page with its options and examples, which the program's page names; each key of both files has
    its entry."""
    texts = {name: text.replace("\\-", "-") for name, text in pages.page_texts(app).items()}
    for words, command in pages.commands(typer.main.get_command(app)):
        name = pages.page_name(words)
        text = texts[f"{name}.1"]
        assert f".BR {name} (1)" in texts["athanor.1"]
        assert f".B {' '.join(words)}\n" in text
        for param in command.params:
            assert param.param_type_name == "argument" or param.hidden or param.opts[0] in text
        for line in (command.epilog or "").strip().splitlines():
            assert line.partition("|")[0].strip().replace("\\", "\\e") in text
    for place, _, rows in policy.sections():
        for key, *_ in rows:
            assert f".B {key}\n" in texts["athanor-policy.5"].partition(f".SS {place or 'at the top'}\n")[2]
    keys = pages.configuration_page().replace("\\-", "-")
    for name in ApplianceConfig.model_fields:
        assert f".B {name}\n" in keys
    assert "Certificates of the HTTP and the gRPC listener." in keys
    assert "Memory of the KV cache of each engine." in keys and "at least 1048576 bytes, default 268435456" in keys
    for name in SandboxConfig.model_fields:
        assert f".B sandbox.{name}\n" in keys
    assert ".B models[].kv_bytes\n" in keys and ".B sandbox.spill.disk\n" in keys
    assert "Annotated" not in keys and "<class" not in keys


def test_the_formatter_has_nothing_to_say(tmp_path: Path) -> None:
    """groff with all warnings; a request that there is not would be told."""
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("no groff on this machine")
    several = "\n".join(text for _, text in sorted(pages.page_texts(app).items()))
    for text, quiet in ((several, True), (".XX what\n", False)):
        (tmp_path / "page").write_text(text)
        argv = [groff, "-man", "-Tascii", "-ww", "-z", str(tmp_path / "page")]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert (done.stderr == "") == quiet, done.stderr


def test_pages_are_the_same_bytes_every_time() -> None:
    """Compressed without a time."""
    first, second = pages.pages(app, SHARE), pages.pages(app, SHARE)
    assert first == second
    assert all(gzip.decompress(data).startswith(b".TH ATHANOR") for data in first.values())


def test_bash_takes_its_completion(tmp_path: Path, root: Path) -> None:
    """Sourced by a real bash, it is registered for the command, and completes a word of it."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    for path, data in pages.completions(app, SHARE).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    places = pages.completion_paths(SHARE)
    script = tmp_path / places["bash"]
    ask = (
        f"source {script}; complete -p athanor; COMP_WORDS=(athanor image ro) COMP_CWORD=2; "
        "_athanor_completion athanor; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(
        [bash, "--norc", "-c", ask],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PATH": f"{root / '.venv/bin'}:/usr/bin:/bin"},
    )
    assert done.stdout.splitlines()[-1] == "rollback", done
    for shell in ("zsh", "fish"):
        assert "_ATHANOR_COMPLETE" in (tmp_path / places[shell]).read_text()
