"""The operator's API on a real socket, over a configuration in a folder, with a real admin listener beside it."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from appliance.common.account_roles import Roles
from appliance.common.policy_history import PolicyHistory, relative
from appliance.operator.api.front import METHODS, OperatorFront
from appliance.operator.api.server import serving
from appliance.operator.cli.key import create_key
from policy.files import read_sources
from policy.loader import load_policy

POLICY = """version: 1
tenants:
  alpha: {credentials: ["key:alpha-1"], models: ["*"], limits: {concurrency: 4}}
"""

OWN_POOL = [("grpc.use_local_subchannel_pool", 1)]
"""Another test's server was at the same path; its connections are not ours."""

NEW = POLICY.replace("concurrency: 4", "concurrency: 8")


@dataclass(frozen=True)
class Place:
    """A folder with a configuration, a policy, and a key table with one key that the policy does not name."""

    folder: Path
    admin: str
    audit: bool = False

    @property
    def config(self) -> Path:
        """The configuration."""
        return self.folder / "athanor.yaml"

    @property
    def policy(self) -> Path:
        """The policy."""
        return self.folder / "policy.yaml"

    @property
    def socket(self) -> Path:
        """Socket of the API."""
        return self.folder / "api.sock"

    @property
    def digest(self) -> str:
        """Digest of the policy on the disk."""
        return load_policy(read_sources(self.policy)).digest

    def write(self) -> None:
        """Write all files."""
        model = {"name": "athanor-mini", "path": str(self.folder)}
        values: dict[str, Any] = {"run_dir": "run", "policy": "policy.yaml", "models": [model]}
        values |= {
            "credentials": "keys.json",
            "pepper": "pepper",
            "listen": {"admin": self.admin.removeprefix("http://")},
        }
        values |= {"operator_api": {"socket": str(self.socket)}}
        if self.audit:
            values |= {"audit": {"directory": "audit"}}
            (self.folder / "audit").mkdir()
        self.config.write_text(json.dumps(values))
        self.policy.write_text(POLICY)
        (self.folder / "run").mkdir()
        create_key("alpha", "alpha-0", self.folder / "keys.json", self.folder / "pepper")

    def keep(self, now: int, by: str = "") -> None:
        """Keep the policy in the history, as the supervisor does."""
        sources = read_sources(self.policy)
        PolicyHistory(self.folder / "audit").record(self.digest, *relative(sources, self.policy), now, by)


@contextlib.contextmanager
def a_place(admin: str, *, audit: bool = False) -> Iterator[Place]:
    """A fresh place, in a short folder."""
    with tempfile.TemporaryDirectory(prefix="api") as folder:
        place = Place(Path(folder), admin, audit)
        place.write()
        yield place


@contextlib.asynccontextmanager
async def calling(place: Place, roles: Roles | None = None) -> AsyncIterator[Client]:
    """Serve the API, and give a client of it."""
    roles = roles or Roles(frozenset({0, place.folder.stat().st_uid}))
    front = OperatorFront(place.config)
    address = f"unix:{place.socket}"
    async with serving(place.socket, front, roles, 5.0), grpc.aio.insecure_channel(address, OWN_POOL) as channel:
        yield Client(channel)


class Client:
    """Calls methods by their names."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def __call__(self, service: Any, method: str, request: Message | None = None) -> Any:
        """The answer of a method of a service; ``service`` is its descriptor."""
        found = service.methods_by_name[method]
        path = f"/{service.full_name}/{method}"
        assert path in METHODS
        answer = _class_of(found.output_type)
        call = self.channel.unary_unary(
            path, request_serializer=lambda one: one.SerializeToString(), response_deserializer=answer.FromString
        )
        return await call(_class_of(found.input_type)() if request is None else request)


def _class_of(descriptor: Any) -> Any:
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(descriptor)
