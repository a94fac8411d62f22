"""Blocks of the device backend that leave the engine for the supervisor's real store and come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.cuda.runtime.staging import MOST_STAGED, DeviceContent
from isolation.ipc.spill import Forget, mark_of
from tests.engine.core.kv.spilled import alone, kv_of, prompt, spilling
from tests.engine.support import namespace, submit

pytestmark = pytest.mark.usefixtures("one_thread")

SPARES = 17
"""Blocks that the device keeps for rows, and the padding block."""


def test_restored_blocks_are_the_same_bits_and_forgotten_ones_are_gone(tmp_path: Path) -> None:
    """A prefix that others have pushed out comes back with the bytes that were computed and gives the tokens of the
    plain backend without spill; another tenant gets none of it. After the supervisor's word nothing of the tenant comes
    back, and its cached blocks and all buffers are zero."""
    with spilling(tmp_path, num_blocks=24 + SPARES, backend="device") as one:
        assert one.engine.spill is not None
        content, pool = one.engine.spill.contents, one.engine.spill.pool
        assert isinstance(content, DeviceContent) and len(content._out) == len(content._in) == MOST_STAGED
        one.run(submit(1, prompt(1)))
        before = kv_of(one.engine, prompt(1))
        one.run(*(submit(number, prompt(number)) for number in range(2, 8)))
        assert kv_of(one.engine, prompt(1)) == []
        one.run(submit(11, prompt(1)), submit(12, prompt(1), tenant=2))
        assert (one.cached[11], one.cached[12]) == (40, 0)
        assert kv_of(one.engine, prompt(1)) == before and len(before) == 10
        mine = [block for block in range(1, 25) if pool.owner(block) == namespace(1)]
        assert any(any(content.read(block)) for block in mine)
        one.wire.host.send(Forget(mark_of(namespace(1))))
        one.engine.look()
        one.run(submit(13, prompt(1)))
        assert one.cached[13] == 0
        assert not any(buffer.memory.any() for buffer in (*content._out, *content._in))
        expected = alone(submit(1, prompt(1)))[1]
    assert one.outputs[11] == one.outputs[12] == one.outputs[1] == expected
