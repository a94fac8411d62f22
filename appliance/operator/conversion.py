"""Converts a GGUF file into a model folder: ``athanor model convert SRC.gguf DIR``.

The file comes from strangers, so nothing here looks into it: a child does (``engine.convert``), locked down before it
reads the first byte. What the child says is taken as hostile text: a few words, bounded. The result appears under its
name at once or not at all; a conversion that fails or is broken off leaves nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.common.errors import ConfigError, os_errors_as
from isolation.errors import ProcessError
from isolation.host.process import MINIMAL_ENVIRONMENT, start

PROGRAM = "engine.convert"

MAX_SAID_BYTES = 1 << 20
"""Bytes that a converter may say: a line for each 64 MiB of weights is 30 bytes."""

MAX_SENTENCE = 1_000
"""Characters of its error that are repeated."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Dtypes of the result."""

_READ_BYTES = 1 << 12

Progress = Callable[[int, int], None]
"""Called with bytes written and bytes in all."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What came of it."""

    folder: Path
    architecture: str
    tensors: int
    types: tuple[str, ...]
    """Types of numbers in the source."""
    dtype: str
    weight_bytes: int
    """Bytes of the converted weights."""
    chat_template: bool


def convert(source: Path, folder: Path, *, dtype: str, progress: Progress) -> Converted:
    """Convert a file into a folder that does not exist yet, or is empty.

    Raises:
        ConfigError: the file is not there or cannot be converted, or the folder cannot be made; the message says why.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"the dtype must be one of: {', '.join(DTYPES)}")
    if not source.is_file():
        raise ConfigError(f"{source} is not a file")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; name another one, or remove it first")
    parent = folder.absolute().parent
    with os_errors_as(f"cannot write to {parent}"):
        parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.converting-", dir=parent))
    try:
        with os_errors_as(f"cannot make {folder}"):
            done = _run([str(source.absolute()), str(made), dtype], folder, progress)
            made.chmod(0o755)  # read by the sandbox, whose user owns nothing
            if folder.exists():
                folder.rmdir()
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return done


def _run(arguments: list[str], folder: Path, progress: Progress) -> Converted:
    environment = {**MINIMAL_ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    reading, writing = os.pipe()
    done: Converted | None = None
    problem = ""
    try:
        try:
            child = start([sys.executable, "-I", "-m", PROGRAM, *arguments], env=environment, stdio=writing)
        except ProcessError as error:
            raise ConfigError(str(error)) from error
        finally:
            os.close(writing)
        try:
            for line in _lines(reading):
                word, _, rest = line.partition(" ")
                if word == "progress":
                    _tell(rest, progress)
                elif word == "error":
                    problem = rest[:MAX_SENTENCE]
                elif word == "done":
                    done = _parsed(rest, folder)
            # It has closed its output, and may yet stay.
            status = child.wait(timeout_s=10)
        finally:
            child.end(grace_s=0)
    finally:
        os.close(reading)
    if status != 0 or done is None:
        raise ConfigError(problem or _ending(1 if status is None else status))
    return done


def _lines(descriptor: int) -> Iterator[str]:
    """What the child says, line by line.

    Raises:
        ConfigError: it says more than any conversion would.
    """
    said, rest = 0, b""
    while chunk := os.read(descriptor, _READ_BYTES):
        said += len(chunk)
        if said > MAX_SAID_BYTES:
            raise ConfigError("the converter was ended: it printed more than a conversion does; distrust the file")
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)


def _tell(rest: str, progress: Progress) -> None:
    words = rest.split()
    if len(words) == 2 and all(word.isdecimal() and len(word) < 20 for word in words):
        progress(int(words[0]), int(words[1]))


def _parsed(text: str, folder: Path) -> Converted | None:
    try:
        value = json.loads(text)
        return Converted(
            folder,
            architecture=str(value["architecture"])[:64],
            tensors=int(value["tensors"]),
            types=tuple(str(one)[:16] for one in value["types"][:64]),
            dtype=str(value["dtype"])[:16],
            weight_bytes=int(value["bytes"]),
            chat_template=bool(value["chat_template"]),
        )
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _ending(status: int) -> str:
    if status == -signal.SIGSYS:
        return "the converter was ended by its lock-down: the file made it do what no conversion needs; do not trust it"
    if status in (-signal.SIGKILL, -signal.SIGXCPU):
        return "the converter was ended: it took more memory or time than there was"
    return f"the converter ended with status {status} and without a word"
