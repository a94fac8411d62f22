"""Appliance as started by ``athanor bench``, with spilled KV, files and responses that are kept, and a tenant with
``retention: none``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.request import Request, urlopen

from appliance.operator.cli.bench_target import Target, own_appliance
from isolation.keys.root import create_root

POLICY = """\
version: 1
tenants:
  quiet: {credentials: ["key:alpha-1"], models: ["*"], retention: none}
  loud:
    credentials: ["key:beta-1"]
    models: ["*"]
    features: {batches: true, stored_responses: true}
"""
"""Policy with one tenant with ``retention: none`` and one ordinary tenant, of whom files and responses are kept."""

TENANTS = ("quiet", "loud")

KV_BYTES = 16 << 20
"""Small KV pool, so that blocks are spilled."""


@dataclass(frozen=True, slots=True)
class SpillingAppliance:
    """A running appliance."""

    target: Target

    def complete(self, tenant: str, **body: Any) -> str:
        """Return the text of a completion."""
        headers = {"authorization": f"Bearer {self.key(tenant)}", "content-type": "application/json"}
        data = json.dumps({"model": self.target.model, **body}).encode()
        with urlopen(Request(self.target.url + "/v1/completions", data, headers), timeout=120) as answer:
            return str(json.loads(answer.read())["choices"][0]["text"])

    def key(self, tenant: str) -> str:
        """Return a tenant's API key."""
        return self.target.api_keys[TENANTS.index(tenant)]

    def leave_out(self, tenant: str) -> None:
        """Take a tenant, which has one line, out of the policy in force."""
        lines = POLICY.splitlines(keepends=True)
        text = "".join(line for line in lines if not line.startswith(f"  {tenant}: "))
        (self.target.state / "policy.yaml").write_text(text)
        with urlopen(Request(self.target.admin + "/reload", b"", method="POST"), timeout=60) as answer:
            answer.read()

    def get_admin(self, path: str) -> bytes:
        """Fetch a page from the admin listener."""
        with urlopen(self.target.admin + path, timeout=20) as answer:
            return bytes(answer.read())


@contextmanager
def spilling_appliance(sandbox: Mapping[str, Any] = MappingProxyType({})) -> Iterator[SpillingAppliance]:
    """Start the appliance for the duration of a block; without compiled kernels, whose memory is not examined.
    ``sandbox``: further keys of that section of the configuration."""

    def adjust(state: Path, config: dict[str, Any]) -> None:
        _spill(state, config)
        config["sandbox"] |= sandbox

    with own_appliance(None, KV_BYTES, "float32", adjust=adjust) as target:
        yield SpillingAppliance(target)


def _spill(state: Path, config: dict[str, Any]) -> None:
    (state / "policy.yaml").write_text(POLICY)
    create_root(state / "root-key")
    config["sandbox"] = {"spill": {"memory": 4 << 20, "disk": 64 << 20, "directory": "spill"}}
    config["keys"] = {"root_key": "root-key", "keyring": "keyring"}
    config["audit"] = {"directory": "audit"}
    config["batches"] = {"directory": "batches"}
