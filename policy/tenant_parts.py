"""Tenants as values of ``policy.model``, from what is in effect for them. Pure.

Most tenants of a large policy differ in few values. Equal parts of them become one object, made once: ten thousand
tenants then take little memory, and code that goes over all of them can remember a result by the part.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any, TypeVar

from policy.content_schema import ContentSchema
from policy.end_user_schema import EndUsersSchema
from policy.model import (
    ContentRules,
    Determinism,
    EndUserLimits,
    Exceeded,
    External,
    Features,
    IsolationClass,
    KvShare,
    Limits,
    ModelRegions,
    Namespace,
    Priority,
    Retention,
    Tenant,
)
from policy.prices import BILLIONTHS
from policy.rate_schema import flattened
from policy.rates import TREATMENTS
from policy.schema import FeaturesSchema, KvSchema, LimitsSchema, ModelRegionsSchema, TenantSchema
from policy.shares import share_of

S = TypeVar("S")
T = TypeVar("T")


class TenantParts:
    """Makes the tenants of one policy."""

    def __init__(self) -> None:
        self._equal: dict[Hashable, Any] = {}
        self._limits: dict[Hashable, Limits] = {}
        self._made: dict[int, tuple[object, Any]] = {}
        """Part by the id of the section that it was made from, with that section: inherited sections and defaults are
        one object for all tenants that have them."""

    def tenant(self, tenant_id: str, content: TenantSchema) -> Tenant:
        """Return a tenant."""
        isolation_class = IsolationClass(content.isolation_class)
        return Tenant(
            id=tenant_id,
            credentials=tuple(content.credentials),
            models=self._one(tuple(content.models)),
            isolation_class=isolation_class,
            retention=Retention(content.retention),
            namespace=Namespace(content.namespace),
            weight=content.weight,
            priority=Priority(content.priority),
            deterministic=Determinism.ALWAYS if isolation_class.exact else Determinism(content.deterministic),
            limits=self._limits_of(content.limits),
            features=self._part(content.features, _features),
            content=self._part(content.content, _content_rules),
            end_users=self._part(content.end_users, _end_user_limits),
            networks=self._one(tuple(content.networks)),
            regions=self._one(tuple(content.regions)),
            model_regions=self._one(tuple(map(_model_regions, content.model_regions))),
            hours=self._one(tuple(content.hours)),
            kv_export=content.kv_export,
            kv_fleet=content.kv_fleet,
            freeze_idle=content.freeze_idle,
            external=External(content.external),
            adapters=self._one(tuple(content.adapters)),
            unsafe_allow_all=content.unsafe_allow_all,
            kv=self._one(_partition(content.kv)) if isolation_class.partitions else self._part(content.kv, share_of),
        )

    def _one(self, value: T) -> T:
        """Return the object that stands for all values equal to this one."""
        found: T = self._equal.setdefault(value, value)
        return found

    def _part(self, section: S, make: Callable[[S], T]) -> T:
        """Return the part that a section says; a section has one maker."""
        found = self._made.get(id(section))
        if found is None:
            found = self._made[id(section)] = section, self._one(make(section))
        part: T = found[1]
        return part

    def _limits_of(self, content: LimitsSchema) -> Limits:
        """Return limits; most tenants write a number of their own, and many write the same."""
        values = _LIMITS(content)
        found = self._limits.get(values)
        if found is None:
            found = self._limits[values] = self._one(_limits(content))
        return found


_LIMITS = attrgetter(*LimitsSchema.model_fields)
"""All values of limits as they are written."""


def _limits(content: LimitsSchema) -> Limits:
    values = flattened(content.model_dump())
    for key in values.keys() & TREATMENTS.keys():
        values[key] = Exceeded(values[key])
    for key in ("spend_per_day", "spend_per_month"):
        if values[key] is not None:
            values[key] = round(values[key] * BILLIONTHS)
    return Limits(**values)


def _features(content: FeaturesSchema) -> Features:
    return Features(**dict(content))


def _end_user_limits(content: EndUsersSchema) -> EndUserLimits:
    return EndUserLimits(**dict(content))


def _content_rules(content: ContentSchema) -> ContentRules:
    return ContentRules(
        max_request_bytes=content.max_request_bytes,
        denied_fields=tuple(content.denied_fields),
        roles=tuple(sorted(set(content.roles))),
    )


def _partition(content: KvSchema) -> KvShare:
    return share_of(content.model_copy(update={"borrow": False}))


def _model_regions(content: ModelRegionsSchema) -> ModelRegions:
    return ModelRegions(models=tuple(sorted({*content.models})), regions=tuple(sorted({*content.regions})))
