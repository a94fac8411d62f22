"""The page of the alerts: the parts of docs/observability.md that somebody who was woken needs, as one HTML file that
loads nothing."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from ruamel.yaml import YAML

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLACE = ROOT / "appliance/gateway/console/runbooks.html"
"""The file: part of the gateway, and installed beside the documents."""

DOCUMENT, ALERTS = ROOT / "docs/observability.md", HERE / "alerts.yaml"

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 46rem; padding: 0 1rem 40vh; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
article { border-top: 1px solid #8886; padding: .2rem 0; }
article:target { border-left: 4px solid #0b8a90; padding-left: 1rem; }
h3 { font-size: 1.05rem; margin: .8rem 0 .3rem; } h3 small { font-weight: normal; }
p { margin: .4rem 0; } code { font-family: ui-monospace, monospace; font-size: .92em; overflow-wrap: anywhere; }
.do code, nav a { display: inline-block; padding: .1rem 0; } nav a { margin-right: 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
td, th { border: 1px solid #8886; padding: .3rem .5rem; text-align: left; vertical-align: top; min-width: 8rem; }
"""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Athanor: what each alert means</title>
<style>{style}</style>
</head>
<body>
<h1>Athanor: what each alert means, and what to do</h1>
<p>Commands are typed as root on the serving machine. Begin with <code>athanor status</code>: known problems are on top,
with the command to type. If nothing answers: <code>athanor doctor</code>. Documents that are named here are in
<code>/usr/share/doc/athanor/docs</code> on that machine.</p>
<nav>{links}</nav>
<h2>Alerts</h2>
{alerts}
<h2>From a symptom to its cause</h2>
{symptoms}
</body>
</html>
"""

SEVERITIES = {"page": "act now", "warn": "within the next working day", "info": "for reference"}


def page() -> str:
    """The file's content."""
    text = DOCUMENT.read_text()
    rules = alerts()
    articles = []
    for name, body in sections(part(text, "## Alerts")):
        rule = rules[name]
        mend = html.escape(rule["annotations"]["mend"])
        articles.append(
            f'<article id="{name.lower()}"><h3>{name} <small>{SEVERITIES[rule["labels"]["severity"]]}</small></h3>\n'
            f'<p class="do"><code>{mend}</code></p>\n{markdown(body)}</article>'
        )
    links = "\n".join(f'<a href="#{name.lower()}">{name}</a>' for name in rules)
    symptoms = f'<div class="wide">{markdown(part(text, "## From a symptom to its cause"))}</div>'
    return PAGE.format(style=STYLE, links=links, alerts="\n".join(articles), symptoms=symptoms)


def alerts() -> dict[str, dict[str, Any]]:
    """The rules of the alerts by name, in the file's order."""
    groups = YAML(typ="safe").load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def part(text: str, title: str) -> str:
    """A section of a document without its title."""
    return text.partition(f"{title}\n")[2].partition("\n## ")[0]


def sections(text: str) -> list[tuple[str, str]]:
    """Title and text of each section of the third level."""
    return [
        (title, body) for title, body in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", text, re.DOTALL | re.MULTILINE)
    ]


def markdown(text: str) -> str:
    """The text as HTML. Links to other documents become their names: not every reader has them at that place."""
    plain = re.sub(r"\[([^\]]*)\]\((?:\.\./)?([\w./-]+\.md)(?:#[\w-]*)?\)", r"`\2`", text)
    return str(MarkdownIt("commonmark", {"html": False}).enable("table").render(plain))
