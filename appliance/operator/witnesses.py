"""Asks witnesses to cosign the last checkpoint of exported tiles: by a program with a network, or by a folder. Blocks.

This process opens no connection. For an address it starts the poster (``appliance.fetch.post``), which is given the
checkpoint and hashes alone: neither entries nor keys. For a folder it writes ``request`` and reads ``response``, which
a program of the witness's operator carries to and fro; a response to an earlier request counts for that request's tree.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.common.audit.checkpoint import CheckpointError, Verifier, read_checkpoint
from appliance.common.audit.cosignature import Witness, first_note, signature_lines
from appliance.common.audit.tiles import CHECKPOINT, TileError, TileReader
from appliance.common.audit.verify import read_verifier
from appliance.common.audit.witnessing import (
    WitnessState,
    answered,
    read_states,
    request_body,
    states_file,
    states_text,
    unreached,
)
from appliance.common.errors import ConfigError, os_errors_as, reason_of
from isolation.errors import ProcessError
from isolation.host.atomic_file import write_whole
from isolation.host.process import start

PROGRAM = "appliance.fetch.post"
FILE_MODE = 0o644
"""States and checkpoints are for all to read."""

ANSWER_S = 60.0
"""Seconds for which a poster is waited for: its own deadlines are shorter."""

END_S = 5.0
MAX_ANSWER_BYTES = 1 << 17
MAX_RESPONSE_BYTES = 1 << 14
ADD_CHECKPOINT = "add-checkpoint"
REQUEST, RESPONSE = "request", "response"


@dataclass(frozen=True, slots=True)
class Asked:
    """A witness and where it is asked: an address or a folder."""

    witness: Witness
    url: str = ""
    folder: Path | None = None


class NoAnswerError(Exception):
    """A witness gave none; the message says why."""


Post = Callable[[str, str], tuple[int, str]]
"""Posts a body to an address; returns status and body, or raises ``NoAnswerError``."""


def ask_witnesses(
    tiles: Path, asked: Sequence[Asked], clock: Callable[[], float] = time.time, post: Post | None = None
) -> list[WitnessState]:
    """Ask each witness to cosign the checkpoint of ``tiles``, write its cosignature below the checkpoint, and keep what
    is known of each. One that does not answer keeps none from the others.

    Raises:
        ConfigError: the tiles cannot be read or written.
    """
    with os_errors_as(f"cannot use the tiles in {tiles}"):
        text = (tiles / CHECKPOINT).read_text(encoding="utf-8")
        try:
            verifier = read_verifier(tiles / "public.key")
            note = first_note(text)
            size = read_checkpoint(note, verifier).size
        except (CheckpointError, UnicodeDecodeError) as error:
            raise ConfigError(f"{tiles}: {error}; see athanor audit tiles") from error
        round_ = _Round(note, size, TileReader(tiles, size), verifier, int(clock()), post or post_by_program)
        known = read_states(tiles)
        lines = {one.split(" ")[1]: one for one in signature_lines(text)}
        states = []
        for one in asked:
            state, line = round_.ask(one, known.get(one.witness.name, WitnessState(one.witness.name)))
            states.append(state)
            if line:
                lines[one.witness.name] = line
        names = {one.witness.name for one in asked}
        kept = "".join(line for name, line in lines.items() if name in names)
        write_whole(tiles / CHECKPOINT, (note + kept).encode(), FILE_MODE)
        write_whole(states_file(tiles), states_text(states), FILE_MODE)
    return states


@dataclass(frozen=True, slots=True)
class _Round:
    """What all witnesses are asked."""

    note: str
    size: int
    reader: TileReader
    verifier: Verifier
    now: int
    post: Post

    def ask(self, one: Asked, state: WitnessState) -> tuple[WitnessState, str]:
        """Ask one witness; returns what is known of it now, and its cosignature of the checkpoint."""
        try:
            return self._by_folder(one, state) if one.folder is not None else self._by_url(one, state)
        except TileError as error:
            raise ConfigError(f"the tiles lack what a proof needs: {error}") from error
        except NoAnswerError as error:
            return unreached(state, str(error), self.now), ""

    def _body(self, old: int) -> str:
        return request_body(old if old <= self.size else 0, self.note, self.size, self.reader.subtree)

    def _by_url(self, one: Asked, state: WitnessState) -> tuple[WitnessState, str]:
        url = f"{one.url.rstrip('/')}/{ADD_CHECKPOINT}"
        for _attempt in range(2):
            status, body = self.post(url, self._body(state.size))
            found = answered(state, one.witness, self.note, self.size, status, body, self.now)
            state = found.state
            if not found.retry:
                return state, found.line
        return unreached(state, "it names another size each time", self.now), ""

    def _by_folder(self, one: Asked, state: WitnessState) -> tuple[WitnessState, str]:
        assert one.folder is not None
        line = ""
        try:
            one.folder.mkdir(exist_ok=True)
            earlier, response = (_text(one.folder / name) for name in (REQUEST, RESPONSE))
            note = earlier.partition("\n\n")[2]
            if response and note:
                size = read_checkpoint(note, self.verifier).size
                is_number = response.strip().isdecimal()
                found = answered(state, one.witness, note, size, 409 if is_number else 200, response, self.now)
                state, line = found.state, found.line if note == self.note else ""
            body = self._body(state.size)
            if body != earlier:
                write_whole(one.folder / REQUEST, body.encode(), FILE_MODE)
                (one.folder / RESPONSE).unlink(missing_ok=True)
        except (OSError, CheckpointError) as error:
            raise NoAnswerError(str(error)) from error
        return state, line


def post_by_program(url: str, body: str) -> tuple[int, str]:
    """Post a body by a program with a network; returns status and body of the answer.

    Raises:
        NoAnswerError: there is none.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        try:
            child = start((sys.executable, "-m", PROGRAM, str(its.fileno())), descriptors=(its.fileno(),))
        except ProcessError as error:
            raise NoAnswerError(str(error)) from error
        finally:
            its.close()
        try:
            ours.settimeout(ANSWER_S)
            ours.sendall(json.dumps({"url": url, "body": body}).encode() + b"\n")
            with ours.makefile("rb") as lines:
                answer = json.loads(lines.readline(MAX_ANSWER_BYTES))
        except (OSError, ValueError) as error:
            raise NoAnswerError(f"the program that posts gave no answer: {error}") from error
        finally:
            child.wait(END_S)
            child.end()
    match answer:
        case {"status": int(status), "body": str(text)}:
            return status, text
        case {"problem": str(problem)}:
            raise NoAnswerError(problem)
    raise NoAnswerError("the program that posts gave no answer")


def _text(path: Path) -> str:
    """Content of a file of an exchange; empty where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_ANSWER_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise NoAnswerError(f"{path}: {reason_of(error)}") from error
