"""What the service manager says in the environment is read as it is meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = "from appliance.common import notify; print(notify.logs_to_journal())"


def test_standard_error_is_the_journal_only_where_it_is(tmp_path: Path, root: Path) -> None:
    """Device and inode must be those of the stream: a variable inherited beyond a redirection does not count."""

    def asked(stream: str) -> str:
        with (tmp_path / "stream").open("wb") as stderr:
            place = os.fstat(stderr.fileno())
            environment = {"JOURNAL_STREAM": stream or f"{place.st_dev}:{place.st_ino}"}
            argv = [sys.executable, "-c", CODE]
            done = subprocess.run(argv, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=stderr, check=True)
        return done.stdout.decode().strip()

    assert [asked(stream) for stream in ("", "1:2", "junk")] == ["True", "False", "False"]
