"""The native protocol against a datagram socket in journald's place; the journal itself is in
``tests/test_systemd_boot.py``."""

from __future__ import annotations

import io
import json
import logging
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from appliance.common.journald import MAX_FIELDS, PREFIX, datagram, fields_of
from appliance.common.log import LogStyle, configure
from tests.appliance.captured_logs import capture_logs

DATAGRAM_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """Leave logging as it was."""
    with capture_logs():
        yield


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    """A socket that takes datagrams at ``tmp_path / "socket"``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "socket"))
        bound.settimeout(5.0)
        yield bound


def parse(data: bytes) -> dict[str, str]:
    """A datagram's fields, as journald takes them apart: by their lengths."""
    fields: dict[str, str] = {}
    while data:
        name, _, data = data.partition(b"\n")
        (size,) = struct.unpack_from("<Q", data)
        value, end, data = data[8 : 8 + size], data[8 + size : 9 + size], data[9 + size :]
        assert end == b"\n"
        assert name.decode() not in fields
        fields[name.decode()] = value.decode()
    return fields


def test_a_line_is_an_entry_with_fields(journal: socket.socket, tmp_path: Path) -> None:
    """The message is the line of JSON; priority, tenant, request and numbers are fields; the stream stays empty."""
    stream = io.StringIO()
    configure(stream, LogStyle.JOURNAL, journal=tmp_path / "socket")
    log = structlog.get_logger("athanor.request")
    log.error("request", request_id="req_1", tenant="acme", output_tokens=3, ok=True)
    fields = parse(journal.recv(DATAGRAM_BYTES))
    message = json.loads(fields.pop("MESSAGE"))
    assert (message["event"], message["tenant"], message["level"]) == ("request", "acme", "error")
    assert fields == {
        "PRIORITY": "3",
        "SYSLOG_IDENTIFIER": "athanor",
        "ATHANOR_LOGGER": "athanor.request",
        "ATHANOR_REQUEST": "req_1",
        "ATHANOR_TENANT": "acme",
        "ATHANOR_OUTPUT_TOKENS": "3",
        "ATHANOR_OK": "true",
    }
    assert stream.getvalue() == ""


def test_no_value_becomes_a_field(journal: socket.socket, tmp_path: Path) -> None:
    """Line ends and halves of characters in a value stay in it, and a credential is blotted out of fields as well."""
    configure(io.StringIO(), LogStyle.JOURNAL, journal=tmp_path / "socket")
    hostile = "a\nPRIORITY=0\nATHANOR_TENANT\n\x05\0\0\0\0\0\0\0other\n\ud800"
    structlog.get_logger().info("x", tenant=hostile, header="Bearer " + "s" * 40)
    fields = parse(journal.recv(DATAGRAM_BYTES))
    assert fields["PRIORITY"] == "6"
    assert fields["ATHANOR_TENANT"] == hostile.replace("\ud800", "?")
    assert "sss" not in "".join(fields.values())


def test_names_and_numbers_of_fields_are_bounded() -> None:
    """What journald would drop is left out, what has parts stays in the message alone, and fields are counted."""
    odd = {"_pid": 1, "MESSAGE": "x", "a b": 1, "": 1, "n" * 41: 1, "parts": [1], "none": None, "event": "x"}
    assert fields_of({**odd, "tenant": "a"}) == {"ATHANOR_TENANT": "a"}
    assert len(fields_of({f"n{number}": number for number in range(1_000)})) == MAX_FIELDS
    assert all(name.startswith(PREFIX) for name in fields_of({"priority": 1, "message": "x"}))
    assert parse(datagram({"A": "", "B": "\n"})) == {"A": "", "B": "\n"}


def test_without_the_journal_lines_go_to_the_stream(journal: socket.socket, tmp_path: Path) -> None:
    """A journal that is full, or was started again, costs nobody a line and keeps nobody waiting."""
    stream = io.StringIO()
    configure(stream, LogStyle.JOURNAL, journal=tmp_path / "socket")
    log, count = structlog.get_logger(), 5_000
    for number in range(count):
        log.info("x", n=number)
    spilled = [json.loads(line[3:])["n"] for line in stream.getvalue().splitlines()]
    assert spilled, "nobody reads the socket, so it is full some time"
    taken = 0
    journal.setblocking(False)
    with pytest.raises(BlockingIOError):
        while journal.recv(DATAGRAM_BYTES):
            taken += 1
    assert taken + len(spilled) == count
    (tmp_path / "socket").unlink()
    log.warning("gone")
    assert "gone" in stream.getvalue()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as again:
        again.bind(str(tmp_path / "socket"))
        log.warning("back")
        assert parse(again.recv(DATAGRAM_BYTES))["PRIORITY"] == "4"


def test_a_line_beyond_a_datagram_goes_to_the_stream(journal: socket.socket, tmp_path: Path) -> None:
    """Nothing is cut or lost."""
    stream = io.StringIO()
    configure(stream, LogStyle.JOURNAL, journal=tmp_path / "socket")
    logging.getLogger("library").warning("long", extra={})
    structlog.get_logger().warning("x", parts=["y" * 1_000] * 1_000)
    assert json.loads(stream.getvalue()[3:])["parts"][999] == "y" * 1_000
    assert json.loads(parse(journal.recv(DATAGRAM_BYTES))["MESSAGE"])["event"] == "long"
