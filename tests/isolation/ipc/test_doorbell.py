"""Bells: rung, heard, full, and with nobody at the other end."""

from __future__ import annotations

import os

import pytest

from isolation.ipc.doorbell import BellReader, BellWriter, adopt, create_pipe
from isolation.ipc.errors import PeerGoneError


@pytest.fixture
def pipe():
    """Both ends of a bell; a test may have closed one."""
    ends = create_pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def test_a_ring_is_heard_once(pipe):
    """A bell rings until drained, however often it was rung."""
    reader, writer = BellReader(pipe[0]), BellWriter(pipe[1])
    assert not reader.wait(0)
    for _ in range(3):
        writer.ring()
    assert reader.wait(0)
    assert reader.drain()
    assert not reader.wait(0)
    assert reader.drain()


def test_a_full_pipe_is_a_rung_bell(pipe):
    """Ringing never blocks and never fails while somebody holds the other end."""
    writer = BellWriter(pipe[1])
    for _ in range(70_000):
        writer.ring()
    assert BellReader(pipe[0]).wait(0)


def test_nobody_at_the_other_end(pipe):
    """A closed reader is told when ringing, a closed writer when listening."""
    other_in, other_out = create_pipe()
    os.close(other_out)
    reader = BellReader(other_in)
    assert reader.wait(5)
    assert not reader.drain()
    os.close(other_in)
    os.close(pipe[0])
    with pytest.raises(PeerGoneError):
        BellWriter(pipe[1]).ring()


def test_flags():
    """Both ends are non-blocking and close-on-exec, also after a way that lost the flags."""
    for end in create_pipe():
        assert not os.get_blocking(end)
        assert not os.get_inheritable(end)
        os.set_blocking(end, True)
        os.set_inheritable(end, True)
        adopt(end)
        assert not os.get_blocking(end)
        assert not os.get_inheritable(end)
        os.close(end)
