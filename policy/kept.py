"""What of a tenant may be kept beyond its requests. Pure."""

from __future__ import annotations

from policy.model import Namespace, Retention, Tenant


def keeps_files(tenant: Tenant) -> bool:
    """Return whether a tenant may leave files and batches."""
    return tenant.features.batches and tenant.retention is not Retention.NONE


def keeps_responses(tenant: Tenant) -> bool:
    """Return whether responses of a tenant are kept."""
    return tenant.features.stored_responses and tenant.retention is not Retention.NONE


def leaves_machine(tenant: Tenant) -> bool:
    """Return whether sealed KV of a tenant may lie in a store outside of the machine."""
    return tenant.kv_export and tenant.retention is not Retention.NONE


def leaves_for_fleet(tenant: Tenant) -> bool:
    """Return whether other hosts of the fleet may use a tenant's KV from the store outside of the machine."""
    return tenant.kv_fleet and leaves_machine(tenant)


def splits(tenant: Tenant) -> bool:
    """Return whether another host of the fleet may compute a tenant's prompts: the fleet may use its KV, its class
    lets it share an engine without padding, and no end user or group has blocks of its own."""
    own = tenant.namespace is Namespace.USER or tenant.group is not None
    return leaves_for_fleet(tenant) and not tenant.isolation_class.pads and not own
