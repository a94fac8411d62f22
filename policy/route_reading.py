"""Routes as the policy file has them to values, with every contradiction in its place. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from policy.errors import Problem
from policy.model import Choose, ModelState, Route, Target
from policy.positions import Path
from policy.route_schema import MAX_ROUTES, RouteSchema
from policy.schema import PolicySchema


class RouteFile(Protocol):
    """Policy file with the positions of its parts."""

    @property
    def name(self) -> str:
        """Name shown in problems."""
        ...

    @property
    def content(self) -> PolicySchema:
        """Content, with each value checked by itself."""
        ...

    def problem(self, path: Path, message: str, *, at_key: bool = False) -> Problem:
        """Return a problem with the place of ``path`` in the file."""
        ...


def read_routes(files: Sequence[RouteFile], problems: list[Problem]) -> dict[str, Route]:
    """Collect the routes of all files, and add what contradicts itself to ``problems``."""
    found: dict[str, Route] = {}
    origin: dict[str, str] = {}
    names = {name for file in files for name in file.content.routes}
    priced = any(file.content.prices is not None for file in files)
    for file in files:
        for name, content in file.content.routes.items():
            path: Path = ("routes", name)
            if name in origin:
                message = f"route {name!r} stands in {origin[name]} already"
                problems.append(file.problem(path, message, at_key=True))
                continue
            origin[name] = file.name
            if len(origin) == MAX_ROUTES + 1:
                message = f"there are more than {MAX_ROUTES} routes together"
                problems.append(file.problem(path, message, at_key=True))
            for place, message in _contradictions(content, names, priced=priced):
                problems.append(file.problem((*path, *place), message))
            found[name] = _route(name, content)
        for tenant_id, tenant in file.content.tenants.items():
            for index, adapter in enumerate(tenant.adapters):
                if adapter in names:
                    message = f"{adapter!r} is a route; requests for it would not reach an adapter of this name"
                    problems.append(file.problem(("tenants", tenant_id, "adapters", index), message))
        for prefix, published in file.content.public_prefixes.items():
            if published.model in names:
                message = f"{published.model!r} is a route; a public prefix belongs to a model"
                problems.append(file.problem(("public_prefixes", prefix, "model"), message))
    return found


def _route(name: str, content: RouteSchema) -> Route:
    return Route(
        id=name,
        to=tuple([Target(model=target.model, weight=target.weight) for target in content.to]),
        choose=Choose(content.choose),
        fallback=tuple(content.fallback),
        fall_back_when=tuple(sorted(map(ModelState, content.fall_back_when))),
    )


def _contradictions(content: RouteSchema, names: set[str], *, priced: bool) -> Iterator[tuple[Path, str]]:
    """Find what a route may not say, with the place below it; ``names`` are those of all routes."""
    cheapest = content.choose == Choose.CHEAPEST.value
    places: dict[str, Path] = {}
    for index, target in enumerate(content.to):
        path: Path = ("to", index, "model")
        if target.model in names:
            yield path, _chained(target.model)
        elif target.model in places:
            yield path, f"model {target.model!r} is in the list already; give it one weight"
        if cheapest and "weight" in target.model_fields_set:
            yield ("to", index, "weight"), "where the cheapest is chosen there are no shares; leave weight out"
        places.setdefault(target.model, path)
    if cheapest and not priced:
        yield ("choose",), "without prices nothing is cheaper: write prices, or leave choose out"
    yield from _fallback(content, names, places, cheapest=cheapest)
    if len(set(content.fall_back_when)) < len(content.fall_back_when):
        yield ("fall_back_when",), "each condition stands in the list once"
    others = content.fallback or (cheapest and len(content.to) > 1)
    if not others and "fall_back_when" in content.model_fields_set:
        yield ("fall_back_when",), "there is no other model to fall back to: write fallback, or leave this out"


def _fallback(
    content: RouteSchema, names: set[str], targets: Mapping[str, Path], *, cheapest: bool
) -> Iterator[tuple[Path, str]]:
    seen: set[str] = set()
    for index, model in enumerate(content.fallback):
        path: Path = ("fallback", index)
        if model in names:
            yield path, _chained(model)
        elif model in seen:
            yield path, f"model {model!r} is in the list already"
        elif model in targets and (cheapest or len(targets) == 1):
            yield path, f"model {model!r} was tried before any fallback; name another one"
        seen.add(model)


def _chained(name: str) -> str:
    return f"{name!r} is a route, and routes do not lead to routes: name a model"
