"""The forms in which engines computed fastest on this machine, remembered between starts.

A trial of forms takes up to half a second of a start, and a little noise decides between forms that are nearly equally
fast, whose numbers differ in their last bits. So the first trial's choice holds until the model, its configuration, the
kernels, the sandbox's runtime or the processor is another one. To try again, remove the file.

What is remembered comes from an engine that has served nobody yet. A form is believed if it is one of the known names;
the sentence with its figures is for people.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from engine.backends.native.manifest import FORMS
from isolation.host.atomic_file import write_whole

log = structlog.get_logger()

VERSION = 1

MAX_FORMS = 256
"""Most forms that are kept, the newest: four configurations of each of 64 models."""

MAX_FILE_BYTES = 1 << 20
"""Most bytes of the file: 256 forms with sentences of 300 characters take a tenth of it."""


@dataclass(frozen=True, slots=True)
class KeptForm:
    """Result of one trial."""

    key: str
    """Digest of all that the times depend on."""
    model: str
    form: str
    tried: str
    """Day of the trial, ISO 8601."""
    said: str
    """What the engine said that it computes with: the form, and the times of the trial."""


class FormCache:
    """Forms by key. Without a path nothing is remembered. Boots call it from their threads."""

    def __init__(self, path: Path | None = None, kept: tuple[KeptForm, ...] = ()) -> None:
        self._path = path
        self._kept = {one.key: one for one in kept}
        self._lock = threading.Lock()

    def find(self, key: str) -> KeptForm | None:
        """Form of an earlier trial; None where there was none."""
        return self._kept.get(key)

    def keep(self, form: KeptForm) -> None:
        """Remember a form; a failure costs the next start a trial and nothing else."""
        if self._path is None:
            return
        with self._lock:
            self._kept.pop(form.key, None)
            self._kept[form.key] = form
            while len(self._kept) > MAX_FORMS:
                del self._kept[next(iter(self._kept))]
            rows = [asdict(one) for one in self._kept.values()]
            try:
                write_whole(self._path, json.dumps({"version": VERSION, "forms": rows}, indent=1).encode())
            except OSError as error:
                log.warning("the chosen form is not remembered", file=str(self._path), problem=str(error))


def open_form_cache(path: Path | None) -> FormCache:
    """What an earlier run left; empty where there is nothing, or nothing to be trusted."""
    try:
        return FormCache(path, read_forms(path) if path is not None else ())
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("remembered forms are not used", file=str(path), problem=str(error))
    return FormCache(path)


def read_forms(path: Path, *, shown_only: bool = False) -> tuple[KeptForm, ...]:
    """Read the file of a cache, the oldest form first.

    Args:
        path: of the file.
        shown_only: the forms are for people, so the file may be another user's: the doctor's is not the supervisor.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file, or somebody else may write to it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        foreign = status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022
        if foreign and not shown_only:
            raise ValueError("somebody else may write to it")
        values = json.loads(file.read(MAX_FILE_BYTES))
    if not isinstance(values, dict) or values.get("version") != VERSION or not isinstance(values.get("forms"), list):
        raise ValueError("it is of another release")
    return tuple(_kept(row) for row in values["forms"][-MAX_FORMS:])


def _kept(row: object) -> KeptForm:
    names = KeptForm.__slots__
    if not isinstance(row, dict) or set(row) != set(names) or not all(isinstance(row[name], str) for name in names):
        raise ValueError("a form has other fields")
    if row["form"] not in FORMS[1:]:
        raise ValueError("it names a form that this release does not know")
    return KeptForm(**row)
