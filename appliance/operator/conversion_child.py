"""Runs a conversion program of the engine, and gives its result a name only when it is whole.

Files of models come from strangers, so nothing here looks into them: a child does, locked down before it reads the
first byte. What the child says is taken as hostile text: a few words, bounded.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.common.errors import ConfigError, os_errors_as
from isolation.errors import ProcessError
from isolation.host.process import MINIMAL_ENVIRONMENT, start

MAX_SAID_BYTES = 1 << 20
"""Bytes that a converter may say: a line for each 64 MiB of weights is 30 bytes."""

MAX_SENTENCE = 1_000
"""Characters of its error that are repeated."""

_READ_BYTES = 1 << 12

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Make a folder that does not exist yet, or is empty: give another one to write to, which gets the name at the end.

    Raises:
        ConfigError: the folder has something in it, or cannot be made; the message says why.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; name another one, or remove it first")
    parent = folder.absolute().parent
    with os_errors_as(f"cannot write to {parent}"):
        parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.converting-", dir=parent))
    try:
        with os_errors_as(f"cannot make {folder}"):
            yield made
            made.chmod(0o755)  # read by the sandbox, whose user owns nothing
            if folder.exists():
                folder.rmdir()
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def run_converter(program: str, arguments: list[str], progress: Progress) -> object:
    """Run a program of the engine package. Gives the value that it reports at its end, as hostile as the file.

    Raises:
        ConfigError: it cannot convert the file; the message says why.
    """
    environment = {**MINIMAL_ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    reading, writing = os.pipe()
    done = ""
    problem = ""
    try:
        try:
            child = start([sys.executable, "-I", "-m", program, *arguments], env=environment, stdio=writing)
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
                    done = rest
            # It has closed its output, and may yet stay.
            status = child.wait(timeout_s=10)
        finally:
            child.end(grace_s=0)
    finally:
        os.close(reading)
    if status != 0:
        raise ConfigError(problem or _ending(1 if status is None else status))
    try:
        return json.loads(done)
    except (ValueError, RecursionError) as error:
        raise ConfigError(problem or _ending(status)) from error


def without_a_word(status: int = 0) -> ConfigError:
    """Error for a converter that reports nothing that can be used."""
    return ConfigError(_ending(status))


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


def _ending(status: int) -> str:
    if status == -signal.SIGSYS:
        return "the converter was ended by its lock-down: the file made it do what no conversion needs; do not trust it"
    if status in (-signal.SIGKILL, -signal.SIGXCPU):
        return "the converter was ended: it took more memory or time than there was"
    return f"the converter ended with status {status} and without a word"
