"""Process of one grammar: compiles it under limits of time and memory, then computes masks until it is released.

It is forked with the tokenizer already built (``grammar_process``). A shared pipe connects it with the keeper. The
first input is the frame of an ``OpenGrammar``, whose request id appears only in a refusal. Commands are ``op u8,
request u64, token u32``; results ``tag u8, request u64, position u32, state u8, length u32`` and that many bytes: a
mask, or the reason of a refusal.
"""

from __future__ import annotations

import resource
import signal
import struct
import time
from collections.abc import Iterator
from typing import Any

from engine.errors import RequestRejectedError
from engine.sandbox.shared_pipe import SharedPipe
from engine.text.grammar_matcher import CompiledGrammar, Row
from engine.text.reasons import presentable
from engine.text.token_bytes import Words
from isolation.ipc.codec import decode
from isolation.ipc.frame import HEADER_BYTES
from isolation.ipc.grammar import OpenGrammar

COMMAND = struct.Struct("<BQI")
RESULT = struct.Struct("<BQIBI")

OPEN, ADVANCE, CLOSE = 0, 1, 2
ROW, COMPILED, REFUSED = 0, 1, 2

COMPILE_CPU_S = 0.4
"""Processor seconds of compiling after which the process is ended: three times what the largest published schemas take
on a slow core, and short enough that a refusal comes within a second."""

MEMORY_BYTES = 512 << 20
"""Address space in bytes beyond what the process starts with."""

EXIT_DONE = 0
EXIT_DEFECT = 1

ROOM_WAIT_S = 0.0002
"""Seconds between two tries while the keeper has not made room; it always reads."""


def run_child(tokenizer: Any, words: Words, pipe: SharedPipe, held_bytes: int) -> int:
    """Compile, then serve until the keeper closes its end; return the exit status. The memory limit stays in force.

    Args:
        tokenizer: result of ``build_tokenizer``.
        words: of the model.
        pipe: brings commands and takes results; its inbound bell blocks.
        held_bytes: address space that the process starts with.
    """
    resource.setrlimit(resource.RLIMIT_AS, (held_bytes + MEMORY_BYTES, held_bytes + MEMORY_BYTES))
    held = bytearray()
    while len(held) < HEADER_BYTES or len(held) < _length(held):
        if (data := pipe.read()) is None:
            return EXIT_DONE
        held += data
    job = decode(bytes(held[: _length(held)]))
    del held[: _length(held)]
    assert isinstance(job, OpenGrammar)
    signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)
    try:
        grammar = CompiledGrammar(tokenizer, job.kind, job.source, words, job.whitespace, job.thinking)
    except RequestRejectedError as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        reason = presentable(error.reason).encode()
        _write(pipe, RESULT.pack(REFUSED, job.request, 0, error.code, len(reason)) + reason)
        return EXIT_DONE
    signal.setitimer(signal.ITIMER_PROF, 0)
    _write(pipe, RESULT.pack(COMPILED, job.request, 0, 0, 0))
    for operation, request, token_id in _commands(pipe, held):
        row: Row | None = None
        if operation == OPEN:
            row = grammar.open(request)
        elif operation == ADVANCE:
            row = grammar.advance(request, token_id)
        else:
            grammar.close(request)
        if row is not None:
            _write(pipe, RESULT.pack(ROW, row.request, row.position, row.state, len(row.words)) + row.words)
    return EXIT_DONE


def _length(frame: bytearray) -> int:
    return int.from_bytes(frame[:4], "little")


def _commands(pipe: SharedPipe, held: bytearray) -> Iterator[tuple[int, int, int]]:
    while True:
        whole = len(held) - len(held) % COMMAND.size
        yield from COMMAND.iter_unpack(bytes(held[:whole]))
        del held[:whole]
        if (data := pipe.read()) is None:
            return
        held += data


def _write(pipe: SharedPipe, data: bytes) -> None:
    view = memoryview(data)
    while view := view[pipe.write(view) :]:
        time.sleep(ROOM_WAIT_S)
