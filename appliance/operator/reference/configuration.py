"""docs/reference/configuration.md: the keys of athanor.yaml."""

from __future__ import annotations

from collections.abc import Iterable

from appliance.common.config_keys import Key, keys
from appliance.operator.reference.markdown import cell, code, page, section, table

ABOUT = """
What a machine serves, and how. `athanor serve` reads three sources, and a later one has precedence, key by key:

1. the file, `/etc/athanor/athanor.yaml` where it is installed;
2. environment variables: `sandbox.cores` is `ATHANOR_SANDBOX__CORES`, `models[0].name` is `ATHANOR_MODELS__0__NAME`;
3. options: `--set sandbox.cores=4`, `--set models[0].name=chat`; may be repeated.

In variables and options, texts and paths stand as they are and everything else is YAML, as in the file: `4`, `true`,
`[0, 1]`, and `{cores: 4}` for several keys of a section. An empty value takes an optional key away. A list entry one
past the end adds an entry. Relative paths are taken from the file's folder, whichever source they come from. Unknown
keys, variables and options are refused with the nearest name. `athanor config show` prints what a configuration comes
to and where each value comes from.
"""


def render() -> str:
    """The page."""
    return page("athanor.yaml", ABOUT, tables(keys().values()))


def tables(chosen: Iterable[Key]) -> str:
    """A section with a table for each section of the configuration."""
    rows: dict[str, list[list[str]]] = {}
    for key in chosen:
        parent, _, name = key.name.rpartition(".")
        default = key.default if key.field.is_required() else code(cell(key.default))
        kind = f"{key.type}, {key.unit}" if key.unit else key.type
        if key.is_section:
            default, kind = "", f"section, see `{key.name}`"
        rows.setdefault(parent, []).append([code(name), kind, default, key.meaning])
    titled = keys()
    return "\n".join(
        section(
            code(name) or "At the top",
            f"{titled[name].about}\n" if name else "",
            table(("key", "type and unit", "default", "meaning"), found),
        )
        for name, found in rows.items()
    )
