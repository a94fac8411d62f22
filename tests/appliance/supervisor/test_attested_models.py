"""What an attestation takes of plans: digests of files, GPUs, single tenants' engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from appliance.supervisor.attested_models import ServedModel, served_models
from isolation.ipc.messages import Role


def plan(model: str, role: Role, *, tenant: str = "", card: object = None) -> Any:
    """A boot of a sandbox."""
    return SimpleNamespace(model=model, role=role, tenant=tenant, card=card)


def planned(name: str, runner: str, *plans: Any, adapters: tuple[str, ...] = ()) -> Any:
    """A model with its files and boots."""
    found = [SimpleNamespace(name=f"{name}:{one}", digest=one * 64) for one in adapters]
    files = SimpleNamespace(digest=name[0] * 64, signer="", adapters=found)
    return SimpleNamespace(entry=SimpleNamespace(name=name, runner=runner), files=files, plans=plans)


def test_facts_of_models_come_from_their_plans() -> None:
    """By name: digests of the files, whether a cluster outside computes, a GPU of the shared engine, and of each tenant
    with an engine of its own whether that one has a GPU, which decides for that tenant alone."""
    models = [
        planned("here", "model", plan("here", Role.ENGINE, card=1), plan("here", Role.TEXT), adapters=("a", "b")),
        planned("far", "external", plan("far", Role.ENGINE), plan("far", Role.TEXT)),
    ]
    own = [
        plan("here", Role.ENGINE, tenant="alpha"),
        plan("here", Role.ENGINE, tenant="beta", card=2),
        plan("here", Role.TEXT, tenant="gamma"),
        plan("gone", Role.ENGINE, tenant="gamma", card=2),
    ]
    far, here = served_models(models, own)
    assert far == ServedModel("far", "f" * 64, external=True)
    assert (here.digest, here.external, here.adapters) == ("h" * 64, False, {"here:a": "a" * 64, "here:b": "b" * 64})
    assert [here.has_gpu(one) for one in ("alpha", "beta", "gamma")] == [False, True, True]
