"""G10 for models: a sandbox gets exactly what is pinned, and a single changed bit is refused.

A model's folder is copied, pinned, and damaged: a bit of any of its files is flipped and the file's times are restored,
as a knowing attacker would, both before a start and between two boots of one run. A whole appliance is also started on
such a folder, and must refuse with the reason. Controls: the untouched folder passes, with and without remembered
digests, and an appliance that pins the same digest serves the folder of which the changed one is a copy.

Not covered: changes between the check and the sandbox's read, by anyone with write access; root, who can set the times
that the kernel keeps; the model's origin, because nothing is signed.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from appliance.common.catalog import ModelFiles, check_files, embedded_model, read_model
from appliance.common.errors import ModelDigestError, StartError
from appliance.common.figures import counted
from appliance.common.model_digests import DigestCache
from appliance.operator.cli.bench_target import own_appliance
from appliance.selftest.result import Result, judged

COMMAND = "athanor selftest --only G10"
SHORT, FULL = 24, 400
"""Number of flipped bits in the short and the full form."""

SEED = 11
KV_BYTES = 16 << 20


def run(full: bool) -> Iterator[Result]:
    """Run the rows about models."""
    yield from file_rows(FULL if full else SHORT)
    yield from start_rows()


def file_rows(count: int) -> list[Result]:
    """Count flipped bits that the check missed."""
    draw = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="ath-g10-") as name:
        folder = copy_of_model(Path(name))
        cache = DigestCache(Path(name) / "digests")
        files = read_model("m", folder, cache)
        cache.save()
        remembered = DigestCache.load(Path(name) / "digests")
        whole = _passes(read_model("m", folder, remembered), files.digest)
        passed = sum(not _refused(files, Path(name) / "digests", draw, number) for number in range(count))
    return [
        judged(
            "G10.model", not passed, figure=f"{passed} of {count} flipped bits passed over", bar="0", command=COMMAND
        ),
        judged(
            "G10.model.control",
            whole and not remembered.num_read,
            figure=f"the untouched folder passes, from remembered digests ({counted(remembered.num_read, 'file')} read)"
            if whole
            else "the untouched folder is refused",
            bar="it passes",
            command=COMMAND,
        ),
    ]


def start_rows(sandbox: Mapping[str, Any] = MappingProxyType({})) -> list[Result]:
    """Start a whole appliance on a folder with one flipped bit, and on the untouched folder that it is a copy of.
    ``sandbox``: further keys of that section of the configuration."""
    with tempfile.TemporaryDirectory(prefix="ath-g10-") as name:
        folder = copy_of_model(Path(name))
        pinned = read_model("m", folder).digest

        def pin(_state: Path, config: dict[str, Any]) -> None:
            config["models"][0]["digest"] = pinned
            config["sandbox"] |= sandbox

        with own_appliance(None, KV_BYTES, "float32", adjust=pin) as target:
            served = bool(target.url)
        flip_bit(folder / "model.safetensors", random.Random(SEED))
        try:
            with own_appliance(folder, KV_BYTES, "float32", adjust=pin):
                said = "it served"
        except StartError as error:
            said = error.message
    return [
        judged(
            "G10.refusal",
            "the configuration pins" in said,
            figure="an appliance on a changed model "
            + ("does not start and says why" if "the configuration pins" in said else said[:200]),
            bar="refused",
            command=COMMAND,
        ),
        judged("G10.refusal.control", served, figure="on the pinned one it serves", bar="it serves", command=COMMAND),
    ]


def copy_of_model(parent: Path) -> Path:
    """Copy the embedded model's folder, without links to the original files."""
    folder = parent / "mini"
    shutil.copytree(embedded_model(), folder, copy_function=shutil.copy)
    return folder


def flip_bit(path: Path, draw: random.Random) -> None:
    """Flip one bit of a file in place, and restore its times."""
    status = path.stat()
    place = draw.randrange(status.st_size)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _refused(files: ModelFiles, digests: Path, draw: random.Random, number: int) -> bool:
    """Flip a bit, check that a start or a later boot is refused, and flip it back."""
    path = draw.choice(files.hashed).path
    whole = path.read_bytes()
    flip_bit(path, draw)
    if number % 2:
        refused = not _passes(files, files.digest)
    else:
        refused = not _passes(read_model("m", files.folder, DigestCache.load(digests)), files.digest)
    path.write_bytes(whole)
    return refused


def _passes(files: ModelFiles, pinned: str) -> bool:
    try:
        check_files(files, pinned)
    except ModelDigestError:
        return False
    return True
