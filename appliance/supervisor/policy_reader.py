"""The policy as the supervisor reads it: which tenants have sandboxes of their own, and who shares prefixes with whom
when a key is destroyed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import structlog

from appliance.common.errors import ConfigError
from appliance.common.kv_shares import group_account
from appliance.common.policy_signature import check_signed
from policy.errors import PolicyError
from policy.files import read_sources
from policy.loader import Source, load_policy
from policy.model import PolicySet

log = structlog.get_logger()


def accounts_of(policy: PolicySet, tenant: str) -> list[str]:
    """Accounts under whose keys engines have cached what a tenant sent: its own, and its sharing group's."""
    known = policy.tenants.get(tenant)
    return [tenant] if known is None or known.group is None else [tenant, group_account(known.group)]


def classes_of(policy: PolicySet) -> dict[str, str]:
    """Return the class of each tenant."""
    return {name: tenant.isolation_class.value for name, tenant in policy.tenants.items()}


class DeclaredTenants:
    """Reader of the policy file or folder, which is read again when its text has changed. A bad text changes nothing,
    as in the gateway."""

    def __init__(self, path: Path, signers: Collection[str] = ()) -> None:
        """``signers``: public keys, one of which must have signed the policy; none where it needs no signature."""
        self._path = path
        self._signers = signers
        self._sources: list[Source] = []
        self._policy = load_policy([Source("nobody's", "version: 1\ntenants: {}\n")])

    def read(self) -> PolicySet:
        """Policy in force; an empty one as long as no good one was read. Blocks."""
        try:
            sources = read_sources(self._path)
            if sources != self._sources:
                check_signed(sources, self._path, self._signers)
                self._policy = load_policy(sources)
                self._sources = sources
        except (OSError, PolicyError, ConfigError) as error:
            problem = str(error).partition("\n")[0]
            log.warning("the policy cannot be read; the one before stays in force", problem=problem)
        return self._policy
