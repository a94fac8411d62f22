"""Plain data as YAML that readers of YAML 1.1 and of YAML 1.2 understand alike."""

from __future__ import annotations

import re
from typing import Any

from yaml import dump
from yaml.cyaml import CSafeDumper

_NUMBER_OF_1_2 = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|0x[0-9a-fA-F]+")
"""Numbers of the core schema (YAML 1.2.2, section 10.3.2), some of which YAML 1.1 takes for text."""


class _Dumper(CSafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Quotes each text that is a number, a date, a boolean or null to one of the two versions."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER_OF_1_2, list("-+.0123456789"))


def yaml_text(data: Any) -> str:
    """Return a document of dicts, lists and scalars, keys in their order."""
    text: str = dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)
    return text
