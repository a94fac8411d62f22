"""The names that are emitted, beside OpenTelemetry's own registry of names."""

from __future__ import annotations

from types import ModuleType

from opentelemetry.semconv._incubating.attributes import (
    error_attributes,
    gen_ai_attributes,
    http_attributes,
    rpc_attributes,
    url_attributes,
)
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from appliance.gateway.telemetry import names

SPEC = (error_attributes, gen_ai_attributes, http_attributes, rpc_attributes, url_attributes, gen_ai_metrics)


def constants(module: ModuleType) -> dict[str, str]:
    """A module's names by what they are called there."""
    return {name: value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}


def test_every_name_of_the_conventions_is_in_their_registry() -> None:
    """What claims to be of the conventions is; a slip of a letter would make a dashboard of others show nothing."""
    known = {value for module in SPEC for value in constants(module).values()}
    prefixes = ("gen_ai.", "http.", "rpc.", "error.", "url.")
    ours = {value for value in constants(names).values() if value.startswith(prefixes)}
    assert len(ours) > 25
    assert ours <= known
    assert not {one + "x" for one in ours} & known


def test_own_names_are_marked_as_ours() -> None:
    """A metric is one of the conventions' or begins with our prefix, and has a unit and a sentence."""
    spec = set(constants(gen_ai_metrics).values())
    for name, one in (names.HISTOGRAMS | names.COUNTERS | names.GAUGES).items():
        assert name in spec or name.startswith(names.OWN_PREFIX)
        assert one.unit and one.description.endswith(".")
