"""Where the admin listener binds."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from appliance.common.errors import StartError
from appliance.gateway.watch.operator_server import bind


def test_a_file_in_the_sockets_place_is_told_and_kept(tmp_path: Path) -> None:
    """An address that names the operator's own file is refused and the file is still there; control: a socket that a
    killed gateway left is taken over."""
    (tmp_path / "policy.yaml").write_text("version: 1\n")
    with pytest.raises(StartError, match=r"policy\.yaml"):
        bind(f"unix:{tmp_path}/policy.yaml", "admin", 1)
    assert (tmp_path / "policy.yaml").read_text() == "version: 1\n"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "admin.sock"))
    bound = bind(f"unix:{tmp_path}/admin.sock", "admin", 1)
    assert bound.shown == f"unix:{tmp_path}/admin.sock"
    bound.close()
    assert not (tmp_path / "admin.sock").exists()
