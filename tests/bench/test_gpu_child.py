"""A bench's child process is read as it tells; a part that stands still ends it, and what was told is not lost."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bench.gpu_child import PartError, told

PRELUDE = "import json, os, sys, time\nsay = lambda **v: print(json.dumps(v), flush=True)\n"


def test_lines_come_until_the_process_ends() -> None:
    """Every line of JSON but those that name parts is given; other output is passed over."""
    code = PRELUDE + "say(begins='one', limit_s=20); say(a=1); print('noise'); say(a=2)"
    assert list(told(["-c", code], first_s=60, whole_s=60)) == [{"a": 1}, {"a": 2}]


def test_a_part_that_stands_still_ends_the_process(tmp_path: Path) -> None:
    """What came before is given, the error names the part, and the process and its children are gone."""
    pid = tmp_path / "pid"
    code = PRELUDE + (
        f"open({str(pid)!r}, 'w').write(str(os.getpid())); say(begins='good', limit_s=20); say(a=1);"
        "say(begins='bad', limit_s=0.2); time.sleep(600)"
    )
    lines, began = [], time.monotonic()
    with pytest.raises(PartError, match="bad took too long"):
        for line in told(["-c", code], first_s=60, whole_s=60):
            lines.append(line)
    assert lines == [{"a": 1}]
    assert time.monotonic() - began < 50
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_process_that_fails_says_why() -> None:
    """Its status and the end of what it printed are in the error."""
    with pytest.raises(PartError, match="it ended with 3: no such card"):
        list(told(["-c", PRELUDE + "sys.stderr.write('no such card'); sys.exit(3)"], first_s=60, whole_s=60))
