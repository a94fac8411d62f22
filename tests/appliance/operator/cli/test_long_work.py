"""Long work says how far it is, in lines on standard error that need no terminal, and how much longer it takes."""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.operator import conversion, gpu_kernels, kernels
from appliance.operator.cli import image, long_work
from appliance.operator.cli.long_work import LongWork, of_bytes, of_counted
from appliance.operator.install import deb
from engine.backends.native.manifest import Variant
from tests.appliance.operator.cli.conftest import Run

INTERVAL_S = 0.05
"""Seconds between two lines."""

LINE_S = 10.0
"""How long pretended work waits for a line: on a busy machine one comes late. Without it the work ends and the check of
what was printed fails."""


class Lines:
    """Counts the lines that are made, so that pretended work lasts until one tells of it."""

    def __init__(self) -> None:
        self._made, self._changed = 0, threading.Condition()

    def make(self, work: LongWork, line: Callable[[LongWork], str]) -> str:
        """Make a line while nobody begins to wait: a line that ends a wait tells what was reached before the wait."""
        with self._changed:
            text = line(work)
            self._made += 1
            self._changed.notify_all()
        return text

    def wait(self) -> None:
        """Return once one more line was made; it is printed before the work's block ends."""
        with self._changed:
            before = self._made
            self._changed.wait_for(lambda: self._made > before, LINE_S)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Lines at short intervals, also of what is over at once."""
    lines, line = Lines(), LongWork.line
    monkeypatch.setattr(long_work, "LEAST_LEFT_S", 0.0)
    monkeypatch.setattr(long_work, "INTERVAL_S", INTERVAL_S)
    monkeypatch.setattr(LongWork, "line", lambda work: lines.make(work, line))
    return lines


def test_a_line_says_what_how_far_and_how_much_longer() -> None:
    """With nothing known there is only the time so far; with a share, what is left is the time of this part by the rest
    of it, and becomes less while nothing new is reached, until it is over; a new part begins anew, and a part that is
    complete has nothing left."""
    now = [100.0]
    work = LongWork("packaging", of_bytes, clock=lambda: now[0])
    now[0] = 110.0
    assert work.line() == "packaging: 10 s so far"
    work.stage("copying what it needs")
    now[0] = 140.0
    work.reach(256 << 20, 1024 << 20)
    assert work.line() == ("packaging: copying what it needs, 256 of 1,024 MiB (25 %), 40 s so far, about 90 s left")
    now[0] = 180.0
    assert work.line().endswith("80 s so far, about 50 s left")
    now[0] = 240.0
    assert work.line().endswith("2 min 20 s so far")
    now[0] = 140.0
    work.reach(1024 << 20, 1024 << 20, "closing")
    assert work.line() == "packaging: closing, 1,024 of 1,024 MiB (100 %), 40 s so far"
    work.reach(1, 1000)
    assert "left" not in work.line(), "of a thousandth nothing can be said"
    work.follow(lambda: (3, 4))
    assert "(75 %)" in work.line()
    work.stage("packing")
    assert work.line() == "packaging: packing, 40 s so far"


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """What ends within the interval prints no line; control: with a short interval there are several."""
    with LongWork("x"):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_lines_are_whole_and_go_to_standard_error(quick: Lines, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line ends with a line end; no carriage return, no escape, nothing on standard output. After an error there
    are no more."""
    with pytest.raises(RuntimeError), LongWork("working", of_counted("step")) as work:
        for done in range(1, 4):
            work.reach(done, 40)
            quick.wait()
        raise RuntimeError
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith("\n")
    assert not set("\r\x1b\b") & set(said.err)
    lines = said.err.splitlines()
    assert len(lines) >= 3 and all(re.match(r"working: \d of 40 steps \(\d+ %\), ", line) for line in lines)
    assert any("left" in line for line in lines)
    time.sleep(2 * INTERVAL_S)
    assert capsys.readouterr().err == ""


def slowly(lines: Lines, result: Any = None) -> Callable[..., Any]:
    """Work that lasts until a line tells of it."""

    def work(*_: Any, **__: Any) -> Any:
        lines.wait()
        return result

    return work


def test_kernels_are_told_as_they_are_compiled(
    quick: Lines, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``athanor kernels build`` counts libraries; ``kernels gpu``, which cannot, says that it goes on."""
    variants = tuple(Variant(f"v{number}", "x", (), ()) for number in range(6))
    monkeypatch.setattr(kernels, "variants_of", lambda _: variants)
    monkeypatch.setattr(kernels, "_compile", slowly(quick, ""))
    monkeypatch.setattr(kernels, "_install", lambda *_: [])
    result = run("kernels", "build", str(tmp_path / "k"))
    assert result.exit_code == 0, result.output
    pattern = r"^compiling kernels: [1-5] of 6 libraries \(\d+ %\), .* so far, about .* left$"
    assert re.search(pattern, result.stderr, re.MULTILINE), result.stderr
    monkeypatch.setattr(gpu_kernels, "build", slowly(quick, gpu_kernels.BuiltKernels(tmp_path / "g", 1, "d" * 64)))
    result = run("kernels", "gpu", str(tmp_path), "--model", str(tmp_path), "--architecture", "sm_90")
    assert "compiling kernels for sm_90: " in result.stderr and "(1 kernel, " in result.stdout


def test_models_are_told_by_bytes(
    quick: Lines, run: Run, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``athanor model digest`` and ``model convert`` say how many bytes of all are read or written, also where no
    person watches; the digest itself is what it is without lines."""
    from appliance.common import model_digests

    model = root / "images/mini/athanor-mini"
    quiet = run("model", "digest", str(model)).stdout
    read = model_digests.os.read

    def slow(fd: int, count: int) -> bytes:
        quick.wait()
        return read(fd, min(count, 2 << 20))

    monkeypatch.setattr(model_digests, "os", SimpleNamespace(**{**vars(model_digests.os), "read": slow}))
    result = run("model", "digest", str(model))
    assert result.exit_code == 0 and result.stdout == quiet
    assert re.search(r"^reading the model: \d+ of \d+ MiB \(\d+ %\), .* left$", result.stderr, re.M), result.stderr

    def convert(*_: Any, progress: Callable[[int, int], None], **__: Any) -> conversion.Converted:
        progress(1 << 30, 4 << 30)
        quick.wait()
        return conversion.Converted(tmp_path, "llama", 1, ("F16",), "float16", 4 << 30, True)

    monkeypatch.setattr(conversion, "convert", convert)
    for words in ((), ("-o", "json")):
        result = run("model", "convert", "x.gguf", str(tmp_path / "m"), *words)
        assert "converting: 1,024 of 4,096 MiB (25 %), " in result.stderr


def test_an_image_and_a_package_are_told_by_parts(
    quick: Lines, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``athanor image build`` says which part it is at and which share of the work is done, ``athanor package deb``
    what is copied and packed. The builder's parts are in their order, each with a smaller share before it than the
    next."""

    class Builder:
        @staticmethod
        def build(target: Path, cache: Path | None, variant: str, reached: Callable[[float, str], None]) -> Any:
            reached(0.4, "compiling modules of the engine sandbox")
            quick.wait()
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(image.importlib, "import_module", lambda _: Builder)
        result = run("image", "build", str(tmp_path / "image"))
    assert "building the image: compiling modules of the engine sandbox, 40 %, " in result.stderr
    shares = [share for share, _ in importlib.import_module("images.build").PARTS.values()]
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[-1] < 1.0

    def fill(_root: Path, _app: Any, progress: deb.PackingProgress, **_: Any) -> None:
        progress.stage("copying what it needs")
        progress.reach(1 << 30, 2 << 30)
        quick.wait()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(deb, "fill", fill)
    monkeypatch.setattr(deb.shutil, "which", lambda *_, **__: "/usr/bin/dpkg-deb")
    result = run("package", "deb", str(tmp_path / "dist"), "--image", "none")  # building one takes a minute
    assert "packaging: copying what it needs, 1,024 of 2,048 MiB (50 %), " in result.stderr
