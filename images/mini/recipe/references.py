"""Facts of docs/reference/: every command, configuration key, policy key, error, metric, field, header and route.

The pages are written from the code, so what stands there exists. Each fact becomes one topic of the corpus.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "reference"
KINDS = ("command", "setting", "policy", "error", "metric", "field", "header", "route")

_CELLS = re.compile(r"(?<!\\)\|")
_FIELD_SECTIONS = re.compile(r"Fields (of|that)")


class PageError(ValueError):
    """A page of docs/reference/ has another form than the one that is read here."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One named thing of the references.

    `about` is what it does or means, `detail` its type, range and default, `examples` are commands with their purpose.
    """

    kind: str
    name: str
    about: str
    detail: str = ""
    examples: tuple[tuple[str, str], ...] = ()

    @property
    def topic(self) -> str:
        """Name of the fact's topic in the corpus."""
        return f"{self.kind}-{self.name.split(',')[0].replace(' ', '-')}"


@dataclass(frozen=True, slots=True)
class _Section:
    """A second-level section of a page: title, text before its table, rows of its table, lines of its list."""

    title: str
    text: str
    rows: tuple[tuple[str, ...], ...]
    listing: tuple[str, ...]


def read(folder: Path = FOLDER) -> tuple[Fact, ...]:
    """Every fact of the references, kind by kind. Raises PageError where a kind has none."""
    pages = {path.stem: _sections(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.md"))}
    facts = [
        *_commands(pages["cli"]),
        *_settings(pages["configuration"]),
        *_policy(pages["policy"]),
        *_http(pages["http"]),
        *_metrics(pages["metrics"]),
    ]
    for kind in KINDS:
        if not any(fact.kind == kind for fact in facts):
            raise PageError(f"{folder} has no {kind}; did the pages change their form?")
    return tuple({fact.topic: fact for fact in facts}.values())


def _commands(sections: list[_Section]) -> list[Fact]:
    """Commands with their help and examples."""
    facts = []
    for section in sections:
        if not section.title.startswith("`athanor "):
            continue
        examples = tuple(
            (typed.strip("`"), purpose) for typed, _, purpose in (line.partition(": ") for line in section.listing)
        )
        options = ", ".join(row[0].strip("`") for row in section.rows)
        facts.append(Fact("command", section.title.strip("`"), section.text, options, examples))
    return facts


def _settings(sections: list[_Section]) -> list[Fact]:
    """Keys of athanor.yaml under their full names; a section is a key as well."""
    facts = []
    for section in sections:
        parent = "" if section.title == "At the top" else section.title.strip("`") + "."
        facts += [
            Fact("setting", parent + _bare(key), meaning, _detail(kind, default))
            for key, kind, default, meaning in section.rows
        ]
    return facts


def _policy(sections: list[_Section]) -> list[Fact]:
    """Keys of the policy under their full names."""
    facts = []
    for section in sections:
        parent = "" if section.title == "At the top" else section.title.strip("`") + "."
        facts += [
            Fact("policy", parent + _bare(key), meaning, _detail(_plain_type(kind), default))
            for key, kind, default, meaning in section.rows
        ]
    return facts


def _http(sections: list[_Section]) -> list[Fact]:
    """Errors by code, request fields, headers and routes."""
    facts = []
    for section in sections:
        if section.title == "Errors":
            facts += [
                Fact("error", f"{status} {_bare(code)}", meaning, _bare(kind))
                for status, kind, code, meaning in section.rows
            ]
        elif _FIELD_SECTIONS.match(section.title):
            facts += [
                Fact("field", _bare(name), meaning, _detail(kind, default))
                for name, kind, default, meaning in section.rows
            ]
        elif section.title.endswith("headers"):
            direction = "request" if section.title.startswith("Request") else "response"
            facts += [Fact("header", _bare(name), meaning, direction) for name, meaning in section.rows]
        elif section.title in ("Routes", "Admin listener"):
            facts += [Fact("route", _bare(row[0]), row[-1], _where(section.title)) for row in section.rows]
    return facts


def _metrics(sections: list[_Section]) -> list[Fact]:
    """Metrics under Prometheus' name, with OpenTelemetry's in the detail."""
    kinds = {"Histograms": "histogram", "Counters": "counter", "Gauges": "gauge"}
    return [
        Fact("metric", _bare(prometheus), meaning, f"{kinds[section.title]}, {unit}; OpenTelemetry {_bare(name)}")
        for section in sections
        if section.title in kinds
        for name, prometheus, unit, _labels, meaning in section.rows
    ]


def _sections(page: str) -> list[_Section]:
    """The second-level sections of a page."""
    found = []
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        lines = body.splitlines()
        text = " ".join(line for line in lines if line and line[0] not in "|-")
        table = [line for line in lines if line.startswith("|")][2:]
        listing = tuple(line[2:] for line in lines if line.startswith("- "))
        found.append(_Section(title.strip(), text, tuple(map(_row, table)), listing))
    return found


def _row(line: str) -> tuple[str, ...]:
    return tuple(cell.strip().replace("\\|", "|") for cell in _CELLS.split(line)[1:-1])


def _bare(cell: str) -> str:
    return cell.replace("`", "").strip()


def _detail(kind: str, default: str) -> str:
    """Type, range and default as one phrase."""
    if kind.startswith("section"):
        return "a section"
    value = _bare(default)
    if value == "required":
        return f"{kind}; required"
    return f"{kind}; {'left out by default' if value in ('none', 'empty', '') else f'default {value}'}"


def _plain_type(kind: str) -> str:
    """A type of the policy without the expressions that its texts match."""
    return re.sub(r" like `[^`]*`", "", kind)


def _where(section: str) -> str:
    return "admin listener" if section == "Admin listener" else "port of the tenants"
