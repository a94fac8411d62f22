"""Fleets for tests: signed lists, hosts' keys and configurations in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from appliance.common.kv_store_config import MembersConfig
from appliance.common.members import FleetMember, MemberList, signed_list, with_members
from appliance.supervisor.fleet_keys.membership import Membership, join
from isolation.keys.member import create_member_keys, read_member_keys
from isolation.keys.signing import SigningKey, key_of

AUTHORITY = key_of(bytes(range(32)))
HOSTS = ("host-a", "host-b", "host-c")


def member_of(folder: Path, host: str) -> FleetMember:
    """A host's entry; its keys are made in the folder at first."""
    path = folder / f"{host}.key"
    keys = read_member_keys(path) if path.exists() else create_member_keys(path)
    return FleetMember(host, keys.hpke.public, keys.signing.public)


def sign(
    folder: Path,
    hosts: Sequence[str] = HOSTS,
    version: int = 1,
    server: str = "host-a",
    key: SigningKey = AUTHORITY,
    fleet: str = "edge",
) -> MemberList:
    """Sign a list of these hosts and bring it to all of them."""
    found = with_members([member_of(folder, host) for host in hosts], fleet, version, server)
    (folder / "members").write_bytes(signed_list(found, key))
    return found


def config(folder: Path, host: str, authority: SigningKey = AUTHORITY) -> MembersConfig:
    """A host's section."""
    values = {"file": folder / "members", "key": folder / f"{host}.key", "accepted": folder / f"{host}.accepted"}
    return MembersConfig.model_validate({"host": host, "authority": authority.public.hex(), **values})


def joined(folder: Path, hosts: Sequence[str] = HOSTS) -> list[Membership]:
    """All hosts of a new fleet as members of it."""
    sign(folder, hosts)
    return [join(config(folder, host)) for host in hosts]
