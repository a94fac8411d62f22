"""The policy as the supervisor reads it: to know which tenants have sandboxes of their own, and who shares prefixes
with whom when a key is destroyed; for nothing else."""

from __future__ import annotations

from pathlib import Path

import structlog

from appliance.gateway.kv_shares import group_account
from policy.errors import PolicyError
from policy.files import read_sources
from policy.loader import Source, load_policy
from policy.model import PolicySet

log = structlog.get_logger()


def accounts_of(policy: PolicySet, tenant: str) -> list[str]:
    """The account names under whose keys engines have cached what a tenant sent: its own, and its sharing group's."""
    known = policy.tenants.get(tenant)
    return [tenant] if known is None or known.group is None else [tenant, group_account(known.group)]


class DeclaredTenants:
    """Reads the policy file, or folder, again whenever its text has changed. A text that is no policy changes nothing,
    as in the gateway."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sources: list[Source] = []
        self._policy = load_policy([Source("nobody's", "version: 1\ntenants: {}\n")])

    def read(self) -> PolicySet:
        """The policy in force; of an appliance that has never had a good one, nobody's. Blocking."""
        try:
            sources = read_sources(self._path)
            if sources != self._sources:
                self._policy = load_policy(sources)
                self._sources = sources
        except (OSError, PolicyError) as error:
            problem = str(error).partition("\n")[0]
            log.warning("the policy cannot be read; the one before stays in force", problem=problem)
        return self._policy
