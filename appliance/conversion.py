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

from appliance.errors import ConfigError
from isolation.errors import ProcessError
from isolation.process import MINIMAL_ENVIRONMENT, Child, start

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
    """Of the result."""
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
    try:
        parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.converting-", dir=parent))
    except OSError as error:
        raise ConfigError(f"cannot write to {parent}: {(error.strerror or str(error)).lower()}") from error
    try:
        done = _run([str(source.absolute()), str(made), dtype], progress)
        made.chmod(0o755)  # read by the sandbox, whose user owns nothing
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {(error.strerror or str(error)).lower()}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return Converted(folder, *done)


_Done = tuple[str, int, tuple[str, ...], str, int, bool]


def _run(arguments: list[str], progress: Progress) -> _Done:
    environment = {**MINIMAL_ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    reading, writing = os.pipe()
    done: _Done | None = None
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
                    done = _parsed(rest)
            status = _status(child)
        finally:
            child.end(grace_s=0)
    finally:
        os.close(reading)
    if status != 0 or done is None:
        raise ConfigError(problem or _ending(status))
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
            raise ConfigError("the converter says more than any conversion would: the file has taken it over")
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)


def _status(child: Child) -> int:
    """The status of a child that has closed its output, and may yet stay."""
    status = child.wait(timeout_s=10)
    return 1 if status is None else status


def _tell(rest: str, progress: Progress) -> None:
    words = rest.split()
    if len(words) == 2 and all(word.isdecimal() and len(word) < 20 for word in words):
        progress(int(words[0]), int(words[1]))


def _parsed(text: str) -> _Done | None:
    try:
        value = json.loads(text)
        types = tuple(str(one)[:16] for one in value["types"][:64])
        return (
            str(value["architecture"])[:64], int(value["tensors"]), types, str(value["dtype"])[:16],
            int(value["bytes"]), bool(value["chat_template"]),
        )  # fmt: skip
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _ending(status: int) -> str:
    if status == -signal.SIGSYS:
        return "the converter was ended by its lock-down: the file made it do what no conversion needs; do not trust it"
    if status in (-signal.SIGKILL, -signal.SIGXCPU):
        return "the converter was ended: it took more memory or time than there was"
    return f"the converter ended with status {status} and without a word"
