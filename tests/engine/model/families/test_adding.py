"""The page about adding a family, followed: its pieces, as they stand there, make a family that is exact."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ModelLoadError
from engine.model.checkpoint import registry
from engine.model.checkpoint.registry import load_model_config
from engine.model.layers.decoder import Family
from tests.engine.model.families import table
from tests.engine.model.families.table import Row, save_reference
from tests.engine.model.families.test_families import run_and_compare

pytestmark = pytest.mark.usefixtures("one_thread")


def pieces(root: Path) -> list[str]:
    """The page's Python, in order."""
    parts = (root / "docs" / "add-a-model.md").read_text().split("```python\n")[1:]
    return [part.partition("```")[0] for part in parts]


@pytest.fixture
def added(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Row]:
    """The family of the page, added in the three places; gives its row of the table."""
    source, registered, row = pieces(root)
    module = types.ModuleType("engine.model.of_the_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, "add-a-model.md", "exec"), module.__dict__)
    for name, family in eval(registered, module.__dict__).items():
        assert isinstance(family, Family)
        monkeypatch.setitem(registry.FAMILIES, name, family)
    ((name, line),) = eval(row, {"Row": Row}).items()
    monkeypatch.setitem(table.FAMILIES, name, line)
    return name, line


def test_a_family_made_by_the_page_is_exact(
    added: tuple[str, Row], kernel_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Every variant of its row agrees with ``transformers`` as those of the other families do, on plain operations and,
    since layers without positions are theirs too, on compiled kernels."""
    name, row = added
    assert len(row.cases) >= 5
    for number, changes in enumerate(row.cases.values()):
        folder = tmp_path / str(number)
        reference = save_reference(folder, name, **changes)
        run_and_compare(reference, folder, 7, 64, "")
        run_and_compare(reference, folder, 7, 64, str(kernel_dir()))


def test_without_the_page_it_is_not_supported(root: Path, tmp_path: Path) -> None:
    """Control: the registry has no such family of its own."""
    _, registered, _ = pieces(root)
    name = registered.split('"')[1]
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{name}"]}}')
    with pytest.raises(ModelLoadError, match="must name one of"):
        load_model_config(str(tmp_path))


def test_every_name_that_the_page_points_to_is_there(root: Path) -> None:
    """Files that the page names exist."""
    text = (root / "docs" / "add-a-model.md").read_text()
    named = {word for word in text.split("`") if word.endswith(".py") and "/" in word}
    assert len(named) >= 4
    assert all((root / path).is_file() for path in named)
