"""``athanor fleet member-key | sign-members``: keys of a host, and the signed list of a fleet's members."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, output, print_data

if TYPE_CHECKING:
    from appliance.common.members import MemberList

MEMBER_KEY_EXAMPLES = """
athanor fleet member-key host-a --key member.key >> members | on each host, once; the line goes to who signs
athanor fleet member-key host-a --key member.key -o json | again: the keys that are there stay
"""

SIGN_MEMBERS_EXAMPLES = """
athanor fleet sign-members members --fleet edge-eu --key-server host-a --key authority.key --out fleet-members | first
athanor fleet sign-members members --key authority.key --out fleet-members | the next version, after a change
"""


def member_key(
    host: Annotated[str, typer.Argument(metavar="HOST", help="Name of this host in the list of members.")],
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="Its private keys; made when there are none.")],
    output_format: Output = Format.TABLE,
) -> None:
    """Make this host's keys as a member of a fleet, and print the line for the list of members.

    The file holds both private keys and stays on this host, readable for its supervisor alone. The line
    is public.
    """
    from appliance.common.members import FleetMember, check_host, read_member_line
    from isolation.keys.member import create_member_keys, read_member_keys

    check_host(host)  # Before any key is made.
    # A file that is there is never replaced: the fleet knows the host by it.
    keys = read_member_keys(key) if key.exists() else create_member_keys(key)
    member = read_member_line(FleetMember(host, keys.hpke.public, keys.signing.public).line)
    told = {"host": member.host, "x25519": member.hpke.hex(), "ed25519": member.signing.hex(), "line": member.line}
    if not print_data(told, output_format):
        output().print(member.line, soft_wrap=True, markup=False, highlight=False)


def sign_members(
    lines: Annotated[Path, typer.Argument(metavar="LINES", help="File of the members' lines, one for each host.")],
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="The authority's key; made when there is none.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The signed list; one that is there is replaced.")],
    fleet: Annotated[str, typer.Option(metavar="NAME", help="Name of the fleet; needed for a first list.")] = "",
    key_server: Annotated[
        str, typer.Option(metavar="HOST", help="Host that draws the keys. [as before; needed for a first list]")
    ] = "",
    version: Annotated[
        int, typer.Option(metavar="N", min=0, help="Version, where the last list is lost. [one more than it]")
    ] = 0,
    output_format: Output = Format.TABLE,
) -> None:
    """Sign the list of a fleet's members, offline, and print the authority's public key.

    Every host gets the list as a file. None accepts a list that is older than one that it has accepted.
    Who is not in the list gets no keys from hosts that have it. Keep the authority's key away from the
    hosts.
    """
    from appliance.common.errors import MembersError, os_errors_as
    from appliance.common.members import MAX_BYTES, read_member_line, read_members, signed_list, with_members
    from isolation.host.atomic_file import write_whole
    from isolation.keys.signing import load_or_make

    with os_errors_as(f"cannot read {lines}"), lines.open("rb") as file:
        text = file.read(MAX_BYTES).decode("ascii", "replace")
    members = [read_member_line(line) for line in text.splitlines() if line.strip()]
    signing, _ = load_or_make(key)
    last: MemberList | None = None
    if out.exists():
        with os_errors_as(f"cannot read {out}"):
            last = read_members(out.read_bytes()[: MAX_BYTES + 1], signing.public)
    if last is None and not (fleet and key_server):
        raise MembersError(f"there is no list at {out} yet: name --fleet and --key-server for the first one")
    if last is not None and version and version <= last.version:
        raise MembersError(f"the list at {out} has version {last.version}, and versions only grow")
    wanted = with_members(
        members,
        fleet or (last.fleet if last else ""),
        version or (last.version + 1 if last else 1),
        key_server or (last.key_server if last else ""),
    )
    data = signed_list(wanted, signing)
    with os_errors_as(f"cannot write {out}"):
        write_whole(out, data, 0o644)
    told = {
        "list": str(out),
        "fleet": wanted.fleet,
        "version": wanted.version,
        "key_server": wanted.key_server,
        "members": [one.host for one in wanted.members],
        "authority": signing.public.hex(),
    }
    if not print_data(told, output_format):
        output().print(signing.public.hex(), soft_wrap=True, highlight=False)
