"""Models and adapters that an attestation may name to a tenant: those that the policy gives it, and none of others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from appliance.common.audit.attestation import OUTSIDE, AttestedAdapter, AttestedModel
from appliance.common.external_config import EXTERNAL
from appliance.supervisor.boot import BootPlan
from appliance.supervisor.model_keepers import PlannedModel
from isolation.gvisor.runtime import Program
from isolation.ipc.messages import Role
from policy.model import PolicySet, Tenant
from policy.outside import may_leave, region_rule
from policy.routes import reachable


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the supervisor knows of a model that it serves."""

    name: str
    digest: str
    """Digest of its files."""
    signer: str = ""
    """Id of the key that has signed them; empty where none must have."""
    external: bool = False
    """Whether a cluster outside of the appliance computes its tokens."""
    gpu: bool = False
    """Whether the sandbox of its shared engine has a GPU."""
    own_gpu: frozenset[str] = frozenset()
    """Tenants whose own engine of this model has one."""
    own: frozenset[str] = frozenset()
    """Tenants that have an own engine of this model now."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Digest of each of its adapters by whole name."""

    def has_gpu(self, tenant: str) -> bool:
        """Return whether the engine that serves a tenant has a GPU: its own, or without one the shared engine."""
        return tenant in self.own_gpu if tenant in self.own else self.gpu


def served_models(models: Iterable[PlannedModel], own: Iterable[BootPlan]) -> list[ServedModel]:
    """Return the models that are served, by name; ``own`` are the plans of single tenants' sandboxes."""
    engines = [plan for plan in own if plan.role is Role.ENGINE]
    found = []
    for one in models:
        of_model = [plan for plan in engines if plan.model == one.entry.name]
        found.append(
            ServedModel(
                one.entry.name,
                one.files.digest,
                one.files.signer,
                one.entry.runner == EXTERNAL,
                any(plan.card is not None for plan in one.plans),
                frozenset(plan.tenant for plan in of_model if plan.card is not None),
                frozenset(plan.tenant for plan in of_model),
                {adapter.name: adapter.digest for adapter in one.files.adapters},
            )
        )
    return sorted(found, key=lambda model: model.name)


def usable_models(served: Sequence[ServedModel], policy: PolicySet, tenant: Tenant, region: str) -> list[ServedModel]:
    """Return those that a tenant may use in this region, by their own names, by an alias, or with an adapter alone."""
    granted = frozenset(reachable(policy.routes, tenant.models, tenant.adapters, [one.name for one in served]))
    return [
        one
        for one in served
        if one.name in granted
        and (may_leave(tenant) or not one.external)
        and region_rule(tenant, one.name, region) is None
    ]


def attested_models(
    usable: Iterable[ServedModel], tenant: Tenant, runtime: str, program: Program
) -> tuple[AttestedModel, ...]:
    """Return what an attestation says of models that the tenant may use."""
    return tuple(
        AttestedModel(
            name=one.name,
            digest=one.digest,
            signer=one.signer,
            sandbox=OUTSIDE if one.external else runtime,
            flags=program.gpu_flags if one.has_gpu(tenant.id) and not one.external else (),
        )
        for one in usable
    )


def attested_adapters(usable: Iterable[ServedModel], tenant: Tenant) -> tuple[AttestedAdapter, ...]:
    """Return what an attestation says of the tenant's adapters of these models: of those alone that it has."""
    held = frozenset(tenant.adapters)
    digests = {name: digest for one in usable for name, digest in one.adapters.items() if name in held}
    return tuple(AttestedAdapter(name=name, digest=digests[name]) for name in sorted(digests))
