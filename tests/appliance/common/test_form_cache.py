"""Remembered forms: what an engine chose once holds; what cannot be trusted is not used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from appliance.common.form_cache import MAX_FORMS, KeptForm, open_form_cache, read_forms
from engine.backends.native.manifest import PLAIN

FORM = KeptForm("k1", "m", "x86-64-v3", "2026-11-23", "compiled kernels x86-64-v3; ms a layer at 1 rows: 0.02")


def test_a_form_is_found_by_the_next_start(tmp_path: Path) -> None:
    """By its key alone; the newest of a key holds; nobody else may read the file."""
    path = tmp_path / "forms.json"
    cache = open_form_cache(path)
    assert cache.find("k1") is None
    cache.keep(FORM)
    cache.keep(replace(FORM, form=PLAIN))
    again = open_form_cache(path)
    assert again.find("k1") == replace(FORM, form=PLAIN)
    assert again.find("k2") is None
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_file_nothing_is_remembered(tmp_path: Path) -> None:
    """Where the configuration names none, and where the folder is gone, which is logged."""
    cache = open_form_cache(None)
    cache.keep(FORM)
    assert cache.find("k1") is None
    with capture_logs() as lines:
        open_form_cache(tmp_path / "gone" / "forms.json").keep(FORM)
    assert [line["event"] for line in lines] == ["the chosen form is not remembered"]


def test_the_oldest_forms_go(tmp_path: Path) -> None:
    """The file is bounded."""
    path = tmp_path / "forms.json"
    cache = open_form_cache(path)
    for number in range(MAX_FORMS + 2):
        cache.keep(replace(FORM, key=f"k{number}"))
    assert [one.key for one in read_forms(path)] == [f"k{number}" for number in range(2, MAX_FORMS + 2)]


GOOD = {name: getattr(FORM, name) for name in KeptForm.__slots__}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("nothing", "Expecting value"),
        ("[]", "another release"),
        (json.dumps({"version": 2, "forms": []}), "another release"),
        (json.dumps({"version": 1, "forms": 5}), "another release"),
        (json.dumps({"version": 1, "forms": ["x"]}), "other fields"),
        (json.dumps({"version": 1, "forms": [GOOD | {"tried": 5}]}), "other fields"),
        (json.dumps({"version": 1, "forms": [GOOD | {"more": "x"}]}), "other fields"),
        (json.dumps({"version": 1, "forms": [GOOD | {"form": "../../etc"}]}), "does not know"),
        (json.dumps({"version": 1, "forms": [GOOD | {"form": ""}]}), "does not know"),
    ],
)
def test_a_damaged_file_is_not_used(tmp_path: Path, content: str, problem: str) -> None:
    """The log says why, and the next trial replaces it; the control: a good file is used."""
    path = tmp_path / "forms.json"
    path.write_text(content)
    path.chmod(0o600)
    with capture_logs() as lines:
        cache = open_form_cache(path)
    assert [line["event"] for line in lines] == ["remembered forms are not used"]
    assert problem in lines[0]["problem"]
    cache.keep(FORM)
    with capture_logs() as lines:
        assert open_form_cache(path).find("k1") == FORM
    assert not lines


def test_a_file_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    """It is shown all the same, as to a doctor that is not the supervisor; one behind a symbolic link is neither."""
    path = tmp_path / "forms.json"
    open_form_cache(path).keep(FORM)
    path.chmod(0o666)
    with pytest.raises(ValueError, match="somebody else"):
        read_forms(path)
    assert read_forms(path, shown_only=True) == (FORM,)
    path.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        read_forms(link)
