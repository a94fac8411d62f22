"""Where the admin listener binds, and who asks there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import httpx
import pytest

from appliance.common.errors import StartError
from appliance.common.operator_calls import LOGIN_HEADER
from appliance.gateway.telemetry.admin import admin_app
from appliance.gateway.watch.admin_listener import LIMITS
from appliance.gateway.watch.operator_server import bind, serving
from tests.appliance.admin_server import FakeAppliance


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


async def test_a_reload_names_the_user_who_asked(tmp_path: Path) -> None:
    """Over a Unix socket it is the peer's, by the kernel's word, with the one who had logged in where a command tells
    another; over an address it is nobody's, and a header that is no number is none."""
    fake, bound, user = FakeAppliance(), bind(f"unix:{tmp_path}/a.sock", "admin", 1), os.getuid()
    async with serving(admin_app(fake.parts()), bound, LIMITS):
        transport = httpx.AsyncHTTPTransport(uds=f"{tmp_path}/a.sock")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for login in ("", str(user), "4242", "root", "9" * 11):
                assert (await client.post("/reload", headers={LOGIN_HEADER: login})).status_code == 200
    bound = bind("127.0.0.1:0", "admin", 1)
    async with serving(admin_app(fake.parts()), bound, LIMITS) as url, httpx.AsyncClient(base_url=url) as client:
        await client.post("/reload", headers={LOGIN_HEADER: "4242"})
    own = f"user {user}"
    assert fake.asked == [own, own, f"{own}, logged in as 4242", own, own, "over an address, logged in as 4242"]
