"""Files of ``models.d``: entries of ``models:`` in files of their own beside athanor.yaml, so that a model can come
and go without an edit of that file.

Each file ``*.yaml`` has the key ``models`` alone, with one entry or more of the form that athanor.yaml has. They follow
the entries of athanor.yaml in the order of the files' names. Relative paths are taken from athanor.yaml's folder, so an
entry can be moved between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.common.config_text import ConfigText, Place
from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.figures import counted
from policy.positions import dotted

FOLDER = "models.d"
"""Name of the folder beside athanor.yaml."""

MAX_FILES = 64
"""Most files: one for each model that an appliance may serve."""

MODELS = "models"
"""The one key of such a file."""


def entries_folder(config: Path) -> Path:
    """Folder of the entries that belong to the configuration file ``config``. Beside the link, where the file is one:
    what is written there stays when the link is swapped."""
    return config.absolute().parent / FOLDER


class ModelEntries:
    """All entries of one folder, with the place of each; none where there is no folder."""

    def __init__(self, folder: Path) -> None:
        """Read the files.

        Raises:
            ConfigError: one cannot be read or is of another form; a line for each problem.
        """
        self.entries: list[Any] = []
        """Entries as they are written, not yet checked."""
        self._homes: list[tuple[ConfigText, int]] = []
        problems: list[str] = []
        for path in _files(folder):
            try:
                text = ConfigText(path)
                found = _entries(text)
            except ConfigError as error:
                problems += error.message.splitlines()
                continue
            self.entries += found
            self._homes += [(text, index) for index in range(len(found))]
        if problems:
            raise ConfigError("\n".join(problems))

    def place(self, index: int, rest: Place, *, of_key: bool = False) -> str:
        """``FILE:LINE:COLUMN`` of a value of the entry with this number."""
        text, own = self._homes[index]
        return text.place((MODELS, own, *rest), of_key=of_key)

    def name(self, index: int, rest: Place) -> str:
        """A value's key as its file has it: ``models[0].kv_bytes``."""
        return dotted((MODELS, self._homes[index][1], *rest))

    def has(self, index: int, rest: Place) -> bool:
        """Whether the entry writes this value."""
        text, own = self._homes[index]
        return text.has((MODELS, own, *rest))


class WrittenModels:
    """Places of all values: those of athanor.yaml, and behind its models those of the folder's entries."""

    def __init__(self, file: ConfigText, beside: ModelEntries, listed: int) -> None:
        """``listed``: number of models before the folder's entries."""
        self._file, self._beside, self._listed = file, beside, listed

    def entry(self, where: Place) -> tuple[int, Place] | None:
        """Number of the folder's entry that has this value, and the path in it; None for any other value."""
        if len(where) < 2 or where[0] != MODELS or not isinstance(where[1], int) or where[1] < self._listed:
            return None
        return where[1] - self._listed, where[2:]

    def place(self, where: Place, *, of_key: bool = False) -> str:
        """``FILE:LINE:COLUMN`` of a value, or of its key."""
        entry = self.entry(where)
        if entry is None:
            return self._file.place(where, of_key=of_key)
        return self._beside.place(*entry, of_key=of_key)

    def name(self, where: Place) -> str:
        """A value's key as its file has it."""
        entry = self.entry(where)
        return dotted(where) if entry is None else self._beside.name(*entry)

    def has(self, where: Place) -> bool:
        """Whether a file writes this value."""
        entry = self.entry(where)
        return self._file.has(where) if entry is None else self._beside.has(*entry)

    def same_names(self, models: list[Any]) -> Iterator[str]:
        """Yield a line for each entry of the folder whose name an earlier model has."""
        first: dict[str, int] = {}
        for index, entry in enumerate(models):
            name = entry.get("name") if isinstance(entry, dict) else None
            if not isinstance(name, str):
                continue
            if name in first and index >= self._listed:
                where, other = (MODELS, index, "name"), self.place((MODELS, first[name], "name"))
                yield f"{self.place(where)}: {self.name(where)}: {name} is the name of a model at {other} already"
            first.setdefault(name, index)


def _files(folder: Path) -> list[Path]:
    """Files with entries, by name.

    Raises:
        ConfigError: the folder cannot be read, or has what looks like an entry and is none.
    """
    if not folder.exists():
        return []
    with os_errors_as(f"cannot read {folder}"):
        names = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    if odd := [path for path in names if path.suffix == ".yml"]:
        raise ConfigError(f"{odd[0]}: files here end in .yaml, and this one is not read; rename it")
    found = [path for path in names if path.suffix == ".yaml"]
    if len(found) > MAX_FILES:
        raise ConfigError(f"{folder} has {counted(len(found), 'file')}, and {MAX_FILES} at most are read")
    return found


def _entries(text: ConfigText) -> list[Any]:
    """Entries of a file.

    Raises:
        ConfigError: it has another key, or no list of entries.
    """
    if other := next((key for key in text.values if key != MODELS), None):
        place = text.place((other,), of_key=True)
        raise ConfigError(f"{place}: {other}: unknown key; a file of {FOLDER} has the key `{MODELS}` alone")
    found = text.values.get(MODELS)
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{text.place((MODELS,))}: {MODELS}: must be a list with one entry or more")
    return found
