"""What a start of both host processes refuses before it starts anything."""

from __future__ import annotations

import socket

import pytest

from appliance.common.errors import StartError
from appliance.common.listen_config import ListenConfig
from appliance.operator.serve import check_free


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
