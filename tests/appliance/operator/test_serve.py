"""What a start of both host processes refuses before it starts anything, and which file a process reads again."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def test_a_process_reads_again_what_the_link_of_its_file_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration lies behind a link that is swapped, as in the volume of a ConfigMap, and the file of the
    start is removed: a reload reads the new one. A relative path of the command line counts from where it was given."""
    text = "models: [{name: m, path: /m}]\npolicy: /p\ncredentials: /c\npepper: /s\nrun_dir: /r\nsandbox: {cores: %d}\n"
    for number in (1, 2):
        (tmp_path / f"at-{number}").mkdir()
        (tmp_path / f"at-{number}/athanor.yaml").write_text(text % number)
    (tmp_path / "data").symlink_to("at-1")
    (tmp_path / "athanor.yaml").symlink_to("data/athanor.yaml")
    given: dict[str, Any] = {}
    monkeypatch.setattr(serve.child, "run_role", lambda role, load, **rest: given.update(rest, load=load) or 0)
    monkeypatch.chdir(tmp_path)
    assert serve.run(Path("athanor.yaml"), "gateway") == 0
    monkeypatch.chdir("/")
    assert given["load"]().sandbox.cores == 1 and given["reread"]().config.sandbox.cores == 1
    (tmp_path / "new").symlink_to("at-2")
    os.replace(tmp_path / "new", tmp_path / "data")
    (tmp_path / "at-1/athanor.yaml").unlink()
    assert given["reread"]().config.sandbox.cores == 2
