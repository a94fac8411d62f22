"""Schemas for the objects of ``deploy/kubernetes`` and of the Helm chart.

Kubernetes' own kinds are held against its strict schemas (``requirements/kubernetes.lock``). No package registry has
those of InferencePool; one has a translation of HTTPRoute and BackendTLSPolicy into JavaScript, which takes unknown
fields. So below are schemas in our words of just the fields that we use, where any other field is refused. They were
read from:

- InferencePool: ``config/crd/bases/inference.networking.k8s.io_inferencepools.yaml``, version v1 with
  ``endpointPickerRef.port``, as kubernetes-sigs/gateway-api-inference-extension had it last and llm-d took it over
  (commit 6ac99366 of its scheduler);
- HTTPRoute: ``apis/v1/httproute_types.go`` of kubernetes-sigs/gateway-api, commit 03775165;
- BackendTLSPolicy: ``config/crd/standard/gateway.networking.k8s.io_backendtlspolicies.yaml`` there, version v1, commit
  09a07be5.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

Schema = dict[str, Any]

RELEASE = "v1.37"
"""Release of Kubernetes whose schemas are there."""


def fields(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these fields and no other."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def items(one: Schema, most: int) -> Schema:
    """At least one of these."""
    return {"type": "array", "items": one, "minItems": 1, "maxItems": most}


def kind(version: str, name: str, spec: Schema) -> Schema:
    """A whole object."""
    label: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
    labels = {"labels": {"type": "object", "additionalProperties": {"type": "string"}}}
    metadata = fields({"name": label}, {"namespace": label, **labels})
    return fields({"apiVersion": {"const": version}, "kind": {"const": name}, "metadata": metadata, "spec": spec})


DOMAIN: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"}
GROUP: Schema = {**DOMAIN, "pattern": "^$|" + DOMAIN["pattern"], "maxLength": 253}
KIND: Schema = {"type": "string", "pattern": "^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$", "maxLength": 63}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 253}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65_535}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
LABEL: Schema = {"type": "string", "maxLength": 63, "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}

PICKER = fields(
    {"name": NAME, "port": fields({"number": PORT})},
    {"group": GROUP, "kind": KIND, "failureMode": {"enum": ["FailOpen", "FailClose"]}},
)
LABELS: Schema = {"type": "object", "additionalProperties": LABEL, "minProperties": 1, "maxProperties": 64}
POOL = fields(
    {
        "selector": fields({"matchLabels": LABELS}),
        "targetPorts": items(fields({"number": PORT}), 8),
        "endpointPickerRef": PICKER,
    },
    {"appProtocol": {"enum": ["http", "kubernetes.io/h2c"]}},
)
PATH = fields(
    {"value": {"type": "string", "pattern": "^/", "maxLength": 1_024}},
    {"type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]}},
)
RULE = fields(
    {"backendRefs": items(fields({"name": NAME}, {"group": GROUP, "kind": KIND, "port": PORT}), 16)},
    {
        "matches": items(fields({"path": PATH}), 64),
        "timeouts": fields({}, {"request": DURATION, "backendRequest": DURATION}),
    },
)
ROUTE = fields(
    {
        "parentRefs": items(fields({"name": NAME}, {"namespace": NAME, "sectionName": NAME}), 32),
        "rules": items(RULE, 16),
    },
    {"hostnames": items(DOMAIN, 16)},
)
TLS = fields(
    {
        "targetRefs": items(fields({"group": GROUP, "kind": KIND, "name": NAME}, {"sectionName": NAME}), 16),
        "validation": fields(
            {
                "hostname": {**DOMAIN, "maxLength": 253},
                "caCertificateRefs": items(fields({"group": GROUP, "kind": KIND, "name": NAME}), 8),
            }
        ),
    }
)

OTHERS = {
    ("inference.networking.k8s.io/v1", "InferencePool"): POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): ROUTE,
    ("gateway.networking.k8s.io/v1", "BackendTLSPolicy"): TLS,
}
"""Kinds of other projects, with the schema of what is in ``spec``."""


@functools.cache
def definitions() -> Schema:
    """Those of Kubernetes; the test is skipped without them."""
    path = Path(sys.prefix, "share/kubernetes", f"{RELEASE}.json")
    if not path.exists():
        pytest.skip("no schemas of Kubernetes here: `make setup-dev` gets them from PyPI")
    found: Schema = json.loads(path.read_text())["$defs"]
    return found


def schema_of(one: Mapping[str, Any]) -> Schema:
    """The schema for an object's version and kind; a kind that nobody has fails."""
    version, name = one["apiVersion"], one["kind"]
    if (version, name) in OTHERS:
        return kind(version, name, OTHERS[version, name])
    group, _, number = version.rpartition("/")
    wanted = {"group": group, "version": number, "kind": name}
    known = "x-kubernetes-group-version-kind"
    (found,) = [key for key, value in definitions().items() if wanted in value.get(known, ())]
    return {"$defs": definitions(), "$ref": f"#/$defs/{found}"}


def problems(one: Mapping[str, Any]) -> list[str]:
    """What an object's schema finds wrong with it: none, where it keeps to it."""
    validator = jsonschema.Draft202012Validator(schema_of(one))
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(one)]
