"""A grammar's process alone: what it does of itself before and after it has compiled."""

from __future__ import annotations

import os
import sys

import pytest

from engine.sandbox.shared_pipe import SharedMemory, SharedPipe
from engine.text.grammar_child import COMMAND, COMPILED, OPEN, REFUSED, RESULT, ROW, run_child
from engine.text.token_bytes import Words, build_tokenizer
from isolation.ipc.codec import encode
from isolation.ipc.grammar import GrammarKind, OpenGrammar

WORDS = Words([bytes([byte]) for byte in range(256)], lambda text: list(text.encode()))
GIB = 1 << 30


def life(source: str, *commands: bytes, look: bool = False) -> tuple[list[int], list[str]]:
    """Tags of what a real forked process answers, and the paths that it opened."""
    tokenizer = build_tokenizer(WORDS)
    (orders, to_child), (from_child, results) = os.pipe(), os.pipe()
    shared = SharedMemory(None)
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        sys.addaudithook(lambda name, given: os.write(tell, f"{given[0]}\n".encode()) if name == "open" else None)
        os.close(to_child)
        if look:
            open("/proc/self/statm").close()
        os._exit(run_child(tokenizer, WORDS, SharedPipe(shared, orders, results, first=False), 4 * GIB))
    for fd in (orders, results, tell):
        os.close(fd)
    pipe = SharedPipe(shared, from_child, to_child, first=True)
    job = OpenGrammar(1, bytes(16), GrammarKind.REGEX, source.encode())
    pipe.write(encode(job) + b"".join(commands))
    os.close(to_child)
    data = b"".join(iter(pipe.read, None))
    paths = b"".join(iter(lambda: os.read(told, 1 << 16), b"")).decode().splitlines()
    os.waitpid(pid, 0)
    tags = []
    while data:
        tag, _, _, _, length = RESULT.unpack_from(data)
        tags.append(tag)
        data = data[RESULT.size + length :]
    return tags, paths


def command(operation: int, request: int) -> bytes:
    """An order as the keeper gives it."""
    return COMMAND.pack(operation, request, 0)


@pytest.mark.parametrize(("source", "tags"), [("[a-z]+", [COMPILED, ROW]), ("(open", [REFUSED])])
def test_it_opens_nothing(source: str, tags: list[int]) -> None:
    """No file is opened in its life: gVisor keeps 115 KiB for each process that looked at its own /proc, so tenants
    whose grammars are refused would fill the sandbox. One that does look is seen."""
    assert life(source, command(OPEN, 1)) == (tags, [])
    assert life(source, command(OPEN, 1), look=True) == (tags, ["/proc/self/statm"])
