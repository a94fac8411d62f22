"""What a policy names that is nowhere: models that are not served, keys not in force, unknown issuers. Pure.

It is no reason to refuse a policy: a model may come with the next start, and a key be withdrawn before its tenant is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from policy.adapters import is_adapter
from policy.errors import Problem
from policy.inheritance import Inheritance
from policy.loader import Source
from policy.match import glob_matches
from policy.model import PolicySet, Route
from policy.origins import written_files
from policy.positions import Path, dotted
from policy.written import WrittenFile

API_KEY = "key:"
"""Beginning of a credential that is an API key; SPIFFE URIs are the ones that nothing lists."""

ISSUED = "oidc:"
"""Beginning of a credential that is a token of an issuer, whose name follows."""


@dataclass(frozen=True, slots=True)
class Dangling:
    """A name in a policy that leads nowhere."""

    path: Path
    """Place in the policy file; empty for what no file names."""
    message: str

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.message}" if self.path else self.message


def dangling(
    policy: PolicySet,
    models: Collection[str],
    keys: Collection[str] | None,
    *,
    whole: bool = True,
    issuers: Collection[str] | None = None,
) -> list[Dangling]:
    """Return what leads nowhere, in the order of the policy.

    Args:
        policy: the policy.
        models: names of the models that are served, and whole names of their adapters.
        keys: ids of the API keys in force; None: not known, and not compared.
        issuers: names of the issuers whose tokens are taken; None: not known, and not compared.
        whole: the policy is all there is, so that a key it does not name belongs to nobody.
    """
    found = [
        *_models(policy, models),
        *_routes(policy, models),
        *(() if keys is None else _keys(policy, frozenset(keys))),
        *(() if issuers is None else _tokens(policy, issuers)),
    ]
    if whole and keys is not None:
        free = sorted(set(keys) - {name.removeprefix(API_KEY) for name in policy.principals})
        found += [Dangling((), f"key {name!r} belongs to no tenant: calls with it are refused") for name in free]
    return found


def located(found: Sequence[Dangling], sources: Sequence[Source], keys: str) -> list[Problem]:
    """Return the same with file, line and column, once for all tenants that inherit it.

    Args:
        found: names in the policy that ``sources`` describe.
        sources: the policy's texts.
        keys: name of the file of what no policy file names, with line 0.
    """
    if not found:
        return []
    files = written_files(sources)
    inheritance = Inheritance(files)
    return inheritance.told(_located(one, files, inheritance, keys) for one in found)


def _located(one: Dangling, files: Sequence[WrittenFile], inheritance: Inheritance, keys: str) -> Problem:
    for file in files:
        if one.path and one.path[1] in getattr(file.content, str(one.path[0])):
            return inheritance.problem(file, one.path, one.message)
    return Problem(keys, 0, 0, "", one.message)


def _models(policy: PolicySet, models: Collection[str]) -> Iterator[Dangling]:
    names = _served(models)
    patterns = {pattern for tenant in policy.tenants.values() for pattern in tenant.models}
    known = {*(name for name in models if not is_adapter(name)), *policy.routes}
    loose = {pattern for pattern in patterns if not any(glob_matches(pattern, name) for name in known)}
    for tenant in policy.tenants.values():
        for index, pattern in enumerate(tenant.models):
            if pattern in loose:
                yield Dangling(("tenants", tenant.id, "models", index), f"no model is named {pattern!r}{names}")
        for index, name in enumerate(tenant.adapters):
            if name not in models:
                message = f"no adapter is named {name!r}; the configuration has adapters at models"
                yield Dangling(("tenants", tenant.id, "adapters", index), message)
    for prefix in policy.public.values():
        if prefix.model not in models:
            yield Dangling(("public_prefixes", prefix.id, "model"), f"no model is named {prefix.model!r}{names}")


def _routes(policy: PolicySet, models: Collection[str]) -> Iterator[Dangling]:
    names = _served(models)
    for route in policy.routes.values():
        if route.id in models:
            message = "a model of this name is served too: requests for it go where the route leads, and none to it"
            yield Dangling(("routes", route.id), message)
        for place, model in _led_to(route):
            if model not in models:
                yield Dangling(("routes", route.id, *place), f"no model is named {model!r}{names}")


def _served(models: Collection[str]) -> str:
    return f"; served: {', '.join(sorted(name for name in models if not is_adapter(name)))}" if models else ""


def _led_to(route: Route) -> Iterator[tuple[Path, str]]:
    for index, target in enumerate(route.to):
        yield ("to", index, "model"), target.model
    for index, model in enumerate(route.fallback):
        yield ("fallback", index), model


def _keys(policy: PolicySet, keys: frozenset[str]) -> Iterator[Dangling]:
    for path, credential in _credentials(policy, API_KEY):
        if credential not in keys:
            yield Dangling(path, f"no key in force has the id {credential!r}")


def _tokens(policy: PolicySet, issuers: Collection[str]) -> Iterator[Dangling]:
    names = f"; known: {', '.join(sorted(issuers))}" if issuers else "; the configuration has no section `tokens`"
    for path, credential in _credentials(policy, ISSUED):
        issuer = credential.partition(":")[0]
        if issuer not in issuers:
            yield Dangling(path, f"no issuer of tokens is named {issuer!r}{names}")


def _credentials(policy: PolicySet, kind: str) -> Iterator[tuple[Path, str]]:
    """Yield the place of each credential of a kind and what follows its beginning."""
    for tenant in policy.tenants.values():
        for index, credential in enumerate(tenant.credentials):
            if credential.startswith(kind):
                yield ("tenants", tenant.id, "credentials", index), credential.removeprefix(kind)
