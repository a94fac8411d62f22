"""Manual pages and completions: whole, well formed, the same every time, and what shells and man make of them."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from appliance.common.config import ApplianceConfig, SandboxConfig
from appliance.operator.cli.app import app
from appliance.operator.install import pages


def test_every_command_and_every_key_has_its_place() -> None:
    """No command line or key without its entry."""
    text = pages.command_page(app).replace("\\-", "-")
    root = typer.main.get_command(app)
    for name, one in root.commands.items():
        for words in [f"{name} {inner}" for inner in one.commands] if hasattr(one, "commands") else [name]:
            assert f".SS athanor {words}" in text
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
    for text, quiet in ((pages.command_page(app), True), (pages.configuration_page(), True), (".XX what\n", False)):
        (tmp_path / "page").write_text(text)
        argv = [groff, "-man", "-Tascii", "-ww", "-z", str(tmp_path / "page")]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert (done.stderr == "") == quiet, done.stderr


def test_pages_are_the_same_bytes_every_time() -> None:
    """Compressed without a time."""
    first, second = pages.pages(app), pages.pages(app)
    assert first == second
    assert all(gzip.decompress(data).startswith(b".TH ATHANOR") for data in first.values())


def test_bash_takes_its_completion(tmp_path: Path, root: Path) -> None:
    """Sourced by a real bash, it is registered for the command, and completes a word of it."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    pages.write(tmp_path, app)
    script = tmp_path / pages.COMPLETIONS["bash"]
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
        assert "_ATHANOR_COMPLETE" in (tmp_path / pages.COMPLETIONS[shell]).read_text()
