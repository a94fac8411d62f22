"""The operator's API over TLS, for operators on other machines: the same methods, roles by certificate and by token.

The socket is made here, or comes from the service manager, whose socket unit may have it made in the host's network
while this process has none. Who has which role is read again when the configuration's file changes, within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import structlog

from appliance.common.account_roles import OVERFLOW, Identity
from appliance.common.config import ApplianceConfig
from appliance.common.config_changes import roles_in_force
from appliance.common.config_loader import load_config
from appliance.common.errors import ApplianceError, RateLimitedError, UnauthenticatedError
from appliance.common.held_sockets import HeldSockets
from appliance.common.kept_tasks import kept
from appliance.common.operator_config import RemoteOperatorsConfig
from appliance.gateway.front.allowance import StrangersAllowances
from appliance.gateway.front.connections import Slot
from appliance.gateway.front.key_file import Stamp, stamp_of
from appliance.gateway.front.listener import Opened
from appliance.gateway.front.operator_access import SECTION, OperatorResolver
from appliance.gateway.front.operator_door import OperatorDoor, bind_port
from appliance.gateway.front.tokens import TokenVerifier
from appliance.gateway.grpc.call import GrpcCall
from appliance.gateway.grpc.connection import STRANGER, GrpcConnection, GrpcShared
from appliance.operator.api.front import OperatorFront
from appliance.operator.api.server import MAX_MESSAGE_BYTES, ROLELESS_MESSAGE_BYTES, STALL_S
from appliance.operator.api.shares import CALLS_RETRY_S

HELD = "operator-grpc"
"""Name under which the service manager gives the listening socket (``FileDescriptorName=``)."""

LOOK_S = 1.0
"""Between two looks at the configuration's file."""

log = structlog.get_logger()


class FollowedRoles:
    """The section of the configuration that says who has which role, read again when its file changes."""

    def __init__(self, config: ApplianceConfig, path: Path) -> None:
        self._started = config.remote_operators
        self.section: RemoteOperatorsConfig | None = self._started
        """That in force; a file that cannot be used changes nothing."""
        self._path = path
        self._stamp: Stamp = stamp_of(path)

    async def follow(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Read the roles again where the file has changed."""
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            wanted = (await asyncio.to_thread(load_config, self._path)).remote_operators
            self.section = roles_in_force(self._started, wanted)
        except ApplianceError as error:
            log.error("the roles of operators elsewhere cannot be read; those in force stay", problem=error.message)


def identify(resolver: OperatorResolver, wire: GrpcCall) -> Identity:
    """Return whose a call is.

    Raises:
        UnauthenticatedError: nothing that holds was shown.
        RateLimitedError: this operator has as many connections as it may.
    """
    authorization = [value for name, value in wire.metadata if name == "authorization"]
    try:
        found = resolver.resolve(authorization, wire.peer_names)
    except UnauthenticatedError:
        wire.unproved()
        raise
    if found.roles:
        if not wire.claim(found.who):
            raise RateLimitedError("this operator has too many connections at once", retry_after_s=CALLS_RETRY_S)
        wire.bound(MAX_MESSAGE_BYTES)
    else:
        wire.unproved()
    return Identity(OVERFLOW, found.roles, found.who, SECTION)


@contextlib.asynccontextmanager
async def serving_remote(
    front: OperatorFront, config: ApplianceConfig, path: Path, failed: Callable[[str], None] = lambda _why: None
) -> AsyncIterator[str]:
    """Serve the API over TLS while the block runs, where the configuration has an address for it; gives the address, or
    an empty text.

    Args:
        front: the methods.
        config: the configuration at the start.
        path: its file, which is followed for who has which role.
        failed: told why it serves no more, in one line.

    Raises:
        StartError: the address cannot be bound, or a certificate not be used.
    """
    section = config.remote_operators
    if section is None or section.grpc is None:
        yield ""
        return
    address = section.grpc
    tokens, roles = TokenVerifier(section.tokens), FollowedRoles(config, path)
    resolver = OperatorResolver(tokens, lambda: roles.section)
    strangers = StrangersAllowances(STRANGER, time.monotonic)

    def make(opened: Opened, slot: Slot) -> GrpcConnection:
        serve = partial(front.serve, partial(identify, resolver))
        most = ROLELESS_MESSAGE_BYTES
        return GrpcConnection(GrpcShared(opened, serve, strangers, most, STALL_S), slot)

    bound = HeldSockets().listen(HELD, address, lambda: bind_port(address, f"{SECTION}.grpc"))
    try:
        door = OperatorDoor(bound, section.tls.files, lambda contexts: contexts.grpc, make)
    except BaseException:
        bound.close()
        raise
    host, port = bound.getsockname()[:2]
    works = {
        "the listener of operators elsewhere": door.run(),
        "the keys of token issuers": tokens.run(),
        "following the roles of operators": roles.follow(),
    }
    try:
        with kept(works, failed):
            yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        door.close()
