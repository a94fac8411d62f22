"""What a start of both host processes refuses before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.common.errors import StartError
from appliance.common.listen_config import ListenConfig
from appliance.common.lock import exclusive
from appliance.operator import serve
from appliance.operator.serve import LOCK, check_free, launch


@pytest.mark.parametrize("name", ["http", "grpc", "admin", "metrics"])
def test_a_taken_port_is_told_with_its_key(name: str) -> None:
    """A port on which somebody listens is refused with its address and the key that has it. Control: the same ports
    once they are free, twice, and sockets, of which a killed gateway may have left the file."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = dict.fromkeys(("http", "grpc", "admin"), "127.0.0.1:0")
        address = f"127.0.0.1:{other.getsockname()[1]}"
        listen = ListenConfig.model_validate({**free, name: address})
        with pytest.raises(StartError, match=f"cannot listen for {name} on {address}: .*`listen: {name}`"):
            check_free(listen)
    check_free(listen)
    check_free(listen)
    check_free(ListenConfig.model_validate({**free, "admin": "unix:/nowhere/admin.sock"}))


def test_a_second_start_touches_no_port_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start in a run directory that is in use ends with that, before it holds a port that the first one's gateway may
    be about to bind. Control: once the directory is free the same start finds that the port is taken."""
    held: list[ListenConfig] = []
    monkeypatch.setattr(serve, "check_free", lambda listen: (held.append(listen), check_free(listen)))
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = ListenConfig.model_validate({"http": f"127.0.0.1:{other.getsockname()[1]}"})
        config = {"listen": listen, "run_dir": tmp_path, "wipe_memory": False}
        absent = dict.fromkeys(("model_cache", "kv_store", "operator_api"))
        monkeypatch.setattr(serve, "load_config", lambda *_: SimpleNamespace(**config, **absent))
        monkeypatch.setattr(serve, "Handover", lambda **_: None)
        monkeypatch.setattr(serve, "sealed", lambda _: (tmp_path / "resolved").open("w"))
        with exclusive(tmp_path / LOCK, "it"), pytest.raises(StartError, match="another athanor is using"):
            launch(tmp_path / "athanor.yaml", lambda _: None)
        assert held == []
        with pytest.raises(StartError, match="the port is taken"):
            launch(tmp_path / "athanor.yaml", lambda _: None)
    assert held == [listen]
