"""G2: the namespace of a request follows from the proved identity, and from nothing that its sender can choose.

Every route and method is called with every field, header, query and metadata key that could name a tenant, alone and in
random combinations: requests must reach the sandboxes under the namespace of the authenticated tenant. Not covered:
stolen keys, and what an operator writes into the policy.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from array import array
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor

from appliance.common.figures import counted
from appliance.common.keys import KeyTable
from appliance.gateway.front.auth import Auth, Resolver
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.servicer import SERVICE, GrpcFrontEnd
from appliance.gateway.http.app import ROUTES
from appliance.selftest.raw_http import request_bytes, status_of, talk
from appliance.selftest.result import Result, judged
from appliance.selftest.scripted_gateway import (
    EMBED_MODEL,
    MODEL,
    NAMESPACES,
    PUBLIC_KEYS,
    TENANTS,
    ScriptedGateway,
    scripted_gateway,
)
from appliance.selftest.words import BODIES, FIELDS, HEADERS, QUERIES, values_for
from engine.core.kv.prefix_cache import block_id

COMMAND = "athanor selftest --only G2"
RANDOM_REQUESTS = (300, 20_000)
SPLITS = (20_000, 1_000_000)
SEED = 20_261_122

VARYING_ROWS = (b"date:", b"x-request-id:", b"openai-processing-ms:")
"""Beginnings of the headers that differ between any two answers."""


@dataclass(slots=True)
class Count:
    """Counts over the requests."""

    sent: int = 0
    reached: int = 0
    """Submissions that reached the sandboxes."""
    changed: int = 0
    """Those of them under another namespace, or with another tenant as owner of the grammar."""
    public: int = 0
    """Submissions that began with the public prefix of their tenant."""
    foreign: int = 0
    """Submissions that began with another tenant's."""
    example: str = ""

    def look(self, gateway: ScriptedGateway, tenant: str, what: str, owners: dict[str, bytes]) -> None:
        """Judge the submissions since the last call."""
        self.sent += 1
        heard = gateway.heard
        wrong = [one for one in heard.namespaces if one != NAMESPACES[tenant]]
        wrong += [one for one in heard.grammar_owners if owners.setdefault(tenant, one) != one]
        self.foreign += sum(one not in (b"", PUBLIC_KEYS[tenant]) for one in heard.publics)
        self.reached += len(heard.namespaces)
        self.public += heard.publics.count(PUBLIC_KEYS[tenant])
        if wrong:
            self.changed += len(wrong)
            self.example = self.example or what
        heard.clear()


def run(full: bool) -> list[Result]:
    """Run every row."""
    return [*asyncio.run(_over_the_apis(full)), *framing(SPLITS[full])]


async def _over_the_apis(full: bool) -> list[Result]:
    owners: dict[str, bytes] = {}
    async with scripted_gateway() as gateway:
        found = Count()
        await walk_http(gateway, found, owners, every_value=full)
        await walk_random(gateway, found, owners, RANDOM_REQUESTS[full])
        await walk_grpc(gateway, found, owners)
        control = Count()
        await other_key(gateway, control)
        doors = [await strangers(gateway), await known(gateway), *await own_listeners(gateway)]
        lost = list(gateway.links_lost)
    apart = len(set(owners.values())) == len(owners)
    figure = f"{counted(found.changed, 'change')} in {counted(found.sent, 'request')}, {found.reached} at an engine"
    figure += f"; first: {found.example}" if found.example else ""
    figure += "" if apart else "; two tenants own each other's grammars"
    return [
        judged(
            "G2.namespace", found.changed == 0 and apart and not lost, figure=figure, bar="0 changes", command=COMMAND
        ),
        judged(
            "G2.namespace.control",
            control.changed == control.reached > 0,
            figure=f"{control.changed} of {counted(control.reached, 'request')} with another key: another namespace",
            bar="all",
            command=COMMAND,
        ),
        judged(
            "G2.public",
            found.foreign == 0,
            bar="0",
            command=COMMAND,
            figure=f"{counted(found.foreign, 'request')} began with another tenant's public prefix",
        ),
        judged(
            "G2.public.control",
            found.public > 0 and control.foreign > 0,
            bar="some; some",
            command=COMMAND,
            figure=f"{found.public} began with their own; {control.foreign} of {control.reached} "
            "with another key began with that one's",
        ),
        *doors,
    ]


async def _post(gateway: ScriptedGateway, tenant: str, path: str, document: Any, *headers: tuple[str, str]) -> int:
    proof = ("authorization", f"Bearer {gateway.keys[tenant]}")
    method = "GET" if document is None else "POST"
    body = b"" if document is None else json.dumps(document).encode()
    return status_of(await talk(gateway.ends.http_port, request_bytes(method, path, body, proof, *headers)))


async def walk_http(gateway: ScriptedGateway, found: Count, owners: dict[str, bytes], *, every_value: bool) -> None:
    """Call every route with every field, header and query, one at a time, as both tenants in turn; each field with
    every value that could help, or with two of them."""
    for path, base in BODIES.items():
        cases: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [(path, base, [])]
        other = TENANTS[found.sent % 2 - 1]
        words = values_for(other, gateway.keys[other], NAMESPACES[other])
        cases += [
            (path, {**base, name: value}, [])
            for place, name in enumerate(FIELDS)
            for value in (words if every_value else (words[place % 5], words[5 + place % (len(words) - 5)]))
        ]
        cases += [(path, base, [(name, str(words[0]))]) for name in HEADERS]
        cases += [(f"{path}?{query}={words[0]}", base, []) for query in QUERIES]
        for target, document, headers in cases:
            tenant = TENANTS[found.sent % 2]
            await _post(gateway, tenant, target, document, *headers)
            found.look(gateway, tenant, f"{target} {sorted(document.keys() - base.keys())} {headers}", owners)


async def walk_random(gateway: ScriptedGateway, found: Count, owners: dict[str, bytes], requests: int) -> None:
    """Call the routes with several fields, headers and queries at once, drawn at random."""
    draw = random.Random(SEED)
    for _ in range(requests):
        tenant, other = draw.sample(TENANTS, 2)
        words = values_for(other, gateway.keys[other], NAMESPACES[other])
        path = draw.choice(list(BODIES))
        document = dict(BODIES[path])
        for _ in range(draw.randint(0, 5)):
            document[draw.choice(FIELDS)] = draw.choice(words)
        headers = [(draw.choice(HEADERS), str(draw.choice(words[:4]))) for _ in range(draw.randint(0, 5))]
        target = path + (f"?{draw.choice(QUERIES)}={draw.choice(words[:4])}" if draw.random() < 0.5 else "")
        await _post(gateway, tenant, target, document, *headers)
        found.look(gateway, tenant, f"{target} {document} {headers}", owners)


async def walk_grpc(gateway: ScriptedGateway, found: Count, owners: dict[str, bytes]) -> None:
    """Set every text field of both requests, unknown fields, and every metadata key."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ends.grpc_port}") as channel:
        for number, (method, message, metadata) in enumerate(_grpc_cases(gateway)):
            tenant = TENANTS[number % 2]
            proof = ("authorization", f"Bearer {gateway.keys[tenant]}")
            call = channel.unary_stream(f"/{SERVICE}/{method}")
            try:
                async for _ in call(message, metadata=(proof, *metadata), timeout=10):
                    pass
            except grpc.aio.AioRpcError:
                pass  # refused: only submissions to the engine count
            found.look(gateway, tenant, f"{method} {message[:80]!r} {metadata}", owners)


def _grpc_cases(gateway: ScriptedGateway) -> list[tuple[str, bytes, list[tuple[str, str]]]]:
    other = TENANTS[1]
    word = str(values_for(other, gateway.keys[other], NAMESPACES[other])[0])
    cases: list[tuple[str, bytes, list[tuple[str, str]]]] = []
    bases = {
        "Generate": pb.GenerateRequest(model=MODEL, text="hi"),
        "Embed": pb.EmbedRequest(model=EMBED_MODEL, inputs=[pb.EmbedInput(text="hi")]),
        "Rerank": pb.RerankRequest(model=EMBED_MODEL, query="hi", documents=["hi"]),
    }
    for method, base in bases.items():
        plain = base.SerializeToString()
        cases += [(method, plain, [])] * 2
        cases += [(method, plain, [(name.lower(), word)]) for name in HEADERS if name.lower() != "host"]
        for at in base.DESCRIPTOR.fields:
            if at.type == FieldDescriptor.TYPE_STRING:
                message = type(base)()
                message.CopyFrom(base)
                part = getattr(message, at.name)
                if isinstance(part, str):
                    setattr(message, at.name, word)
                else:
                    part.append(word)
                cases.append((method, message.SerializeToString(), []))
        # Fields that no version of the service has: numbers 100 to 139, as texts (wire type 2).
        for number in range(100, 140):
            tag = number << 3 | 2
            unknown = bytes([tag & 0x7F | 0x80, tag >> 7, len(word)]) + word.encode()
            cases.append((method, plain + unknown, []))
    return cases


async def other_key(gateway: ScriptedGateway, found: Count) -> None:
    """Run the control: these requests with the other tenant's key arrive under another namespace."""
    for path, base in BODIES.items():
        await _post(gateway, TENANTS[1], path, base)
        found.look(gateway, TENANTS[0], path, {})


async def strangers(gateway: ScriptedGateway) -> Result:
    """Call every route and method of the two tables, and some that are in neither, without a credential."""
    open_ones: list[str] = []
    asked = 0
    for route in ROUTES:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            target = route.path.replace("{model:path}", MODEL)
            body = json.dumps(BODIES.get(route.path, {})).encode()
            status = status_of(await talk(gateway.ends.http_port, request_bytes(method, target, body)))
            asked += 1
            health = route.auth is Auth.PUBLIC and method in ("GET", "HEAD")
            if (status == 401) == health:
                open_ones.append(f"{method} {target}: {status}")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ends.grpc_port}") as channel:
        for name, auth in grpc_methods(gateway).items():
            asked += 1
            if (await _stranger(channel, name)) != (auth is Auth.PUBLIC):
                open_ones.append(name)
    reached = len(gateway.heard.namespaces)
    gateway.heard.clear()
    figure = (
        f"{len(open_ones)} of {asked} routes and methods open to strangers, {counted(reached, 'request')} at an engine"
    )
    figure += "".join(f"; {one}" for one in open_ones[:5])
    bar = "0 but health"
    return judged("G2.doors", not open_ones and not reached, figure=figure, bar=bar, command=COMMAND)


def grpc_methods(gateway: ScriptedGateway) -> dict[str, Auth]:
    """Return the method table and one unknown method."""
    front = GrpcFrontEnd(gateway.service, Resolver(gateway.service, lambda: KeyTable(b"", {})))
    return {**front.methods(), f"/{SERVICE}/Unknown": Auth.TENANT}


async def _stranger(channel: grpc.aio.Channel, method: str, key: str = "") -> bool:
    """Return whether the method answers a caller without a credential, or with a key."""
    call = channel.unary_stream(method)
    proof = (("authorization", f"Bearer {key}"),) if key else ()
    try:
        async for _ in call(b"", metadata=proof, timeout=10):
            return True
    except grpc.aio.AioRpcError as error:
        return error.code() is not grpc.StatusCode.UNAUTHENTICATED
    return True


async def known(gateway: ScriptedGateway) -> Result:
    """Run the control: no endpoint rejects a caller with a key for lack of one."""
    closed = []
    for route in ROUTES:
        target = route.path.replace("{model:path}", MODEL)
        document = BODIES.get(route.path)
        if await _post(gateway, TENANTS[0], target, document) in (0, 401):
            closed.append(route.path)
    gateway.heard.clear()
    figure = f"{len(ROUTES) - len(closed)} of {len(ROUTES)} routes answer somebody with a key"
    return judged("G2.doors.control", not closed, figure=figure, bar="all", command=COMMAND)


async def own_listeners(gateway: ScriptedGateway) -> list[Result]:
    """Call every route and method at the first tenant's own listeners with the second one's key: none takes it, and the
    answer is that to a key that nobody has. The control: the tenant's own key is taken there."""
    owner, other = TENANTS
    ports = {name: int(gateway.ends.own[f"{name}-{owner}"].rpartition(":")[2]) for name in ("http", "grpc")}
    nobody = gateway.keys[other][:-64] + "0" * 64
    open_ones: list[str] = []
    taken = asked = 0
    for route in ROUTES:
        if route.auth is Auth.PUBLIC:
            continue
        target = route.path.replace("{model:path}", MODEL)
        body = json.dumps(BODIES.get(route.path, {})).encode()
        answers = []
        for key in (gateway.keys[other], nobody, gateway.keys[owner]):
            proof = ("authorization", f"Bearer {key}")
            data = await talk(ports["http"], request_bytes(route.method, target, body, proof))
            answers.append((status_of(data), _without_request(data)))
        asked += 1
        taken += answers[2][0] not in (0, 401)
        if answers[0][0] != 401 or answers[0] != answers[1]:
            open_ones.append(f"{route.method} {target}: {answers[0][0]}")
    reached = list(gateway.heard.namespaces)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
        for name, auth in grpc_methods(gateway).items():
            if auth is Auth.PUBLIC or "Reflection" in name or name.endswith("/Watch"):
                continue
            asked += 1
            if await _stranger(channel, name, gateway.keys[other]):
                open_ones.append(name)
            taken += await _stranger(channel, name, gateway.keys[owner])
    foreign = sum(one != NAMESPACES[owner] for one in (*reached, *gateway.heard.namespaces))
    gateway.heard.clear()
    figure = f"{len(open_ones)} of {asked} routes and methods take another tenant's key"
    figure += f", {counted(foreign, 'request')} of it at an engine"
    figure += "".join(f"; {one}" for one in open_ones[:5])
    return [
        judged("G2.own_listener", not open_ones and not foreign, figure=figure, bar="0; 0", command=COMMAND),
        judged(
            "G2.own_listener.control",
            taken == asked and bool(reached),
            figure=f"{taken} of {asked} take the tenant's own key, {counted(len(reached), 'request')} at an engine",
            bar="all; some",
            command=COMMAND,
        ),
    ]


def _without_request(data: bytes) -> bytes:
    """Return an answer without what differs between any two: date, request id and time."""
    rows = [row for row in data.split(b"\r\n") if not row.lower().startswith(VARYING_ROWS)]
    return re.sub(rb"req_[0-9A-Za-z]+", b"req_", b"\r\n".join(rows))


def framing(splits: int) -> list[Result]:
    """Hash short sequences of few ids under two keys and many parents: no two block ids may collide. The control: ids
    made by concatenating salt and ids do collide."""
    draw = random.Random(SEED)
    met = careless = 0
    seen: dict[bytes, tuple[bytes, bytes, bytes]] = {}
    plain: dict[str, tuple[bytes, bytes, bytes]] = {}
    for _ in range(splits):
        namespace = draw.choice(tuple(NAMESPACES.values()))
        parent = draw.randbytes(16) if draw.random() < 0.5 else bytes(16)
        ids = array("I", [draw.randrange(32) for _ in range(draw.randint(1, 6))])
        what = (namespace, parent, ids.tobytes())
        met += seen.setdefault(block_id(namespace, parent, ids), what) != what
        written = f"org-{namespace[0]}{parent[0]}" + "".join(map(str, ids))
        careless += plain.setdefault(written, what) != what
    figure = f"{met} of {counted(splits, 'combination')} of namespace, parent and ids share a name"
    return [
        judged("G2.framing", met == 0, figure=figure, bar="0", command=COMMAND),
        judged(
            "G2.framing.control",
            careless > 0,
            figure=f"{careless} share one that is written without lengths",
            bar="at least 1",
            command=COMMAND,
        ),
    ]
