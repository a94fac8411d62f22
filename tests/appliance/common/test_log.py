"""Log lines: one shape for ours and the libraries', no credentials, no local variables."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
from pathlib import Path

import pytest
import structlog

from appliance.common.log import LogStyle, configure, report_callbacks
from tests.appliance.captured_logs import capture_logs

KEY = "ath_acme-7f3a_" + "ab" * 32


@pytest.fixture(autouse=True)
def _restore_logging() -> object:
    """Leave logging as it was."""
    with capture_logs():
        yield


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class FullDisk(io.StringIO):
    """A stream whose medium has no room."""

    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")


def test_json_line() -> None:
    """A line is one JSON object that begins with time, level and event."""
    stream = io.StringIO()
    configure(stream)
    structlog.get_logger("athanor.x").info("started", port=8080, tenant="\x1b[31mred")
    (line,) = stream.getvalue().splitlines()
    data = json.loads(line)
    assert list(data)[:3] == ["timestamp", "level", "event"]
    assert (data["event"], data["port"], data["logger"]) == ("started", 8080, "athanor.x")
    assert "\x1b" not in line


def test_library_lines_look_the_same() -> None:
    """The standard library's loggers end in the same format; chatty ones are silent."""
    stream = io.StringIO()
    configure(stream, LogStyle.JSON)
    logging.getLogger("some.library").warning("port %s in use", 8080)
    logging.getLogger("opentelemetry.exporter").error("again")
    logging.getLogger("some.library").debug("chatter")
    (data,) = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (data["event"], data["level"]) == ("port 8080 in use", "warning")


@pytest.mark.parametrize(("method", "priority"), [("info", 6), ("warning", 4), ("error", 3), ("critical", 2)])
def test_journal_lines_carry_their_priority(method: str, priority: int, tmp_path: Path) -> None:
    """For a journal that reads standard error alone each line begins with its syslog priority."""
    stream = io.StringIO()
    configure(stream, LogStyle.JOURNAL, journal=tmp_path / "nobody")
    getattr(structlog.get_logger(), method)("x")
    assert stream.getvalue().startswith(f"<{priority}>{{")


def test_terminal_gets_the_console() -> None:
    """On a terminal the line is for eyes, not for parsers."""
    stream = Terminal()
    configure(stream)
    structlog.get_logger().info("started", port=8080)
    assert "started" in stream.getvalue()
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(stream.getvalue())


@pytest.mark.parametrize("style", [LogStyle.JSON, LogStyle.CONSOLE])
def test_credentials_are_blotted_out(style: LogStyle) -> None:
    """Keys and bearer tokens vanish from fields, events and exceptions; the key id stays."""
    stream = io.StringIO()
    configure(stream, style)
    log = structlog.get_logger()
    log.info(f"got {KEY}", header=f"Bearer {KEY}", other="sk-proj-0123456789abcdefghij")
    secret = KEY
    try:
        raise ValueError(f"bad key {secret}")
    except ValueError:
        log.exception("failed")
        logging.getLogger("library").exception("failed")
    text = stream.getvalue()
    assert "ab" * 6 not in text
    assert "0123456789abcdef" not in text
    assert text.count("[redacted]") >= 5
    assert "ath_acme-7f3a_" in text


@pytest.mark.parametrize("style", [LogStyle.JSON, LogStyle.CONSOLE])
def test_tracebacks_show_no_local_variables(style: LogStyle) -> None:
    """A traceback names lines, never what a variable held: it may be a prompt."""
    stream = io.StringIO()
    configure(stream, style)
    parts = ["a-tenants", "private", "words"]
    prompt = "-".join(parts)
    try:
        prompt.index("zzz")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "substring not found" in stream.getvalue()
    assert "a-tenants-private-words" not in stream.getvalue()


async def test_what_fails_in_the_event_loop_is_told_without_what_it_was_given() -> None:
    """A callback's error is one line with its type and place; neither its arguments nor its message are shown, which
    may be a tenant's. Without it asyncio's own report is silent, which is the control."""
    stream = io.StringIO()
    configure(stream, LogStyle.JSON)
    loop = asyncio.get_running_loop()

    def fail(word: str) -> None:
        raise ValueError(f"bad {word}")

    loop.call_soon(fail, "private-words")
    await asyncio.sleep(0.01)
    assert stream.getvalue() == ""
    report_callbacks(loop)
    try:
        loop.call_soon(fail, "private-words")
        await asyncio.sleep(0.01)
        loop.call_exception_handler({"message": "private-words"})
    finally:
        loop.set_exception_handler(None)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["error"]) == ("error", "ValueError")
    assert first["at"].startswith("test_log.py:") and first["at"].endswith(" in fail")
    assert (second["error"], second["at"]) == ("none", "")
    assert "private-words" not in stream.getvalue()


async def test_what_fails_in_the_event_loop_a_hundred_times_has_few_lines() -> None:
    """A callback that fails at once again and again, as accept without a descriptor, fills no log; the first line of
    another place (control) is not lost among them."""
    stream = io.StringIO()
    configure(stream, LogStyle.JSON)
    loop = asyncio.get_running_loop()

    def fail() -> None:
        raise OSError

    def fail_elsewhere() -> None:
        raise KeyError

    report_callbacks(loop)
    try:
        for _ in range(1_000):
            loop.call_soon(fail)
        await asyncio.sleep(0.05)
        loop.call_soon(fail_elsewhere)
        await asyncio.sleep(0.01)
    finally:
        loop.set_exception_handler(None)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) <= 65
    assert [line["error"] for line in lines if line["error"] != "OSError"] == ["KeyError"]


def test_long_texts_are_cut() -> None:
    """A text of a megabyte becomes a line of a few kilobytes."""
    stream = io.StringIO()
    configure(stream, LogStyle.JSON)
    structlog.get_logger().info("x", text="y" * 1_000_000)
    assert len(stream.getvalue()) < 5_000


def test_levels() -> None:
    """Lines below the level are not written."""
    stream = io.StringIO()
    configure(stream, LogStyle.JSON, logging.WARNING)
    structlog.get_logger().info("no")
    structlog.get_logger().warning("yes")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["yes"]


def test_capture_gives_lines_and_restores() -> None:
    """The helper sees every line as data, and logging goes back to where it went before."""
    stream = io.StringIO()
    configure(stream, LogStyle.JSON)
    with capture_logs() as lines:
        structlog.get_logger().debug("inside", n=1)
    structlog.get_logger().info("outside")
    assert [(line["event"], line["n"]) for line in lines] == [("inside", 1)]
    assert "inside" not in stream.getvalue()
    assert "outside" in stream.getvalue()


def test_a_full_disk_loses_lines_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """A line that the medium refuses goes without a word; one that cannot be made is a defect and is told (control)."""
    configure(FullDisk(), LogStyle.JSON)
    structlog.get_logger("athanor").error("lost")
    assert capfd.readouterr().err == ""
    logging.getLogger("library").error("%d is no number", "this")
    assert "Logging error" in capfd.readouterr().err
