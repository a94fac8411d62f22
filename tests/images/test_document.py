"""docs/images.md, command by command; and the commands of the store when something is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from isolation.image.manifest import read_manifest
from tests.appliance.common.image.samples import make_image
from tests.appliance.operator.cli.conftest import Run, run

__all__ = ["run"]

CONFIG = {
    "models": [{"name": "m", "path": "m"}],
    "policy": "p",
    "credentials": "c",
    "pepper": "p",
    "run_dir": "run",
    "sandbox": {"image_store": "images", "image_pin": "image.json"},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration with a store and a pin beside it."""
    path = tmp_path / "athanor.yaml"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_command_of_the_document_ends_well(config: Path, root: Path) -> None:
    """In its order, in one shell; afterwards the image that was built is the one that is pinned, and is signed."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (root / "docs/images.md").read_text(), re.DOTALL | re.MULTILINE)
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(root)}
    done = subprocess.run(
        ["sh", "-ec", "".join(blocks)], cwd=config.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no image was pinned before" in done.stderr
    told = json.loads(done.stdout[done.stdout.index("{") :])
    (image,) = told["images"]
    assert image["state"] == "pinned"
    assert len(image["signed_by"]) == 1
    assert image["digest"] == read_manifest(config.parent / "out")[0].digest


def test_use_and_rollback(config: Path, run: Run) -> None:
    """Two images, one after the other and back; the list shows which runs; the pinned one is not removed."""
    folder, more = config.parent, ("--config", str(config))
    digests = [make_image(folder / name, content=name, version=name).digest for name in ("1.0", "1.1")]
    for name, digest in zip(("1.0", "1.1"), digests, strict=True):
        assert run("image", "add", str(folder / name), *more).stdout.strip() == digest
        used = run("image", "use", digest[:10], *more)
        assert (used.exit_code, digest in used.stdout) == (0, True)
    listed = json.loads(run("image", "list", "-o", "json", *more).stdout)["images"]
    assert {one["version"]: one["state"] for one in listed} == {"1.0": "before", "1.1": "pinned"}
    assert "pinned" in run("image", "list", *more).stdout
    refused = run("image", "remove", digests[1][:10], *more)
    assert (refused.exit_code, "is pinned" in refused.stderr) == (1, True)
    assert run("image", "rollback", *more).exit_code == 0
    assert json.loads((folder / "image.json").read_text()) == {"pinned": digests[0], "before": []}
    assert run("image", "rollback", *more).exit_code == 1
    assert run("image", "remove", digests[1][:10], *more).exit_code == 0
    assert len(list((folder / "images").glob("[0-9a-f]*"))) == 1


def test_a_changed_image_is_not_pinned(config: Path, run: Run) -> None:
    """One byte in the store, and it is neither chosen nor does the pin change; unknown digests and stores are told."""
    folder, more = config.parent, ("--config", str(config))
    digest = make_image(folder / "one").digest
    run("image", "add", str(folder / "one"), *more)
    victim = folder / "images" / digest / "text/opt/f"
    victim.write_text("changed")
    refused = run("image", "use", digest, *more)
    assert (refused.exit_code, str(victim) in refused.stderr) == (1, True)
    assert not (folder / "image.json").exists()
    assert run("image", "use", "0" * 64, *more).exit_code == 1
    config.write_text(json.dumps({**CONFIG, "sandbox": {}}))
    assert "names no store" in run("image", "list", *more).stderr


def test_sign_and_verify(config: Path, run: Run) -> None:
    """The public key that signing prints is the one to verify with; another one, or another digest, is refused."""
    folder = config.parent
    digest = make_image(folder / "one").digest
    public = run("image", "sign", str(folder / "one"), "--key", str(folder / "image.key")).stdout.strip()
    assert (folder / "image.key").stat().st_mode & 0o777 == 0o600
    assert run("image", "verify", str(folder / "one"), "--signed-by", public).stdout.strip() == digest
    assert run("image", "verify", str(folder / "one"), "--signed-by", "0" * 64).exit_code == 1
    assert run("image", "verify", str(folder / "one"), "--digest", "0" * 64).exit_code == 1
    (folder / "one/text/opt/f").write_text("changed")
    refused = run("image", "sign", str(folder / "one"), "--key", str(folder / "image.key"))
    assert (refused.exit_code, "is not what the image was built with" in refused.stderr) == (1, True)
