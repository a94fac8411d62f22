"""The head that all pages of the console have: title, styles, links to each other, the state of the contact. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MARK = "<!-- head -->\n"
"""Line of a page's file in whose place the head is put."""


@dataclass(frozen=True, slots=True)
class PageHead:
    """In what a page's head differs from the others'. All of it is of this file, so nothing is escaped."""

    link: str
    """Where the other pages lead to."""
    word: str
    """What stands there."""
    script: str
    skip: tuple[str, str]
    """Id of what people with a keyboard skip to, and its name."""
    style: str = ""
    """Its own one, beside those of all pages."""


HEADS = {
    "index.html": PageHead("./", "Now", "main.js", ("alerts", "alerts")),
    "usage.html": PageHead("usage.html", "Usage", "usage.js", ("h-tenants", "tenants"), "usage.css"),
    "fleet.html": PageHead("fleet.html", "Fleet", "fleet.js", ("h-hosts", "hosts"), "fleet.css"),
}
"""The pages, in the order of the links."""


def with_head(name: str, text: str) -> str:
    """Return a page with its head in place of ``MARK``; a file that is no page as it is."""
    head = HEADS.get(name)
    return text if head is None else text.replace(MARK, _head(head), 1)


def _head(page: PageHead) -> str:
    first = page is HEADS["index.html"]
    styles = "".join(
        f'  <link rel="stylesheet" href="{style}">\n' for style in ("base.css", "parts.css", page.style) if style
    )
    links = "".join(
        f'<a href="{one.link}"{" aria-current=" + chr(34) + "page" + chr(34) if one is page else ""}>{one.word}</a>'
        for one in HEADS.values()
    )
    return f"""<html lang="en">
<head>
  <meta charset="utf-8">
  <title>{"" if first else page.word + " - "}Athanor</title>
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <link rel="icon" href="icon.svg" type="image/svg+xml">
{styles}  <script type="module" src="{page.script}"></script>
</head>
<body>
  <a class="skip" href="#{page.skip[0]}">Skip to {page.skip[1]}</a>
  <header class="top">
    <h1>Athanor</h1>
    <nav class="pages" aria-label="Pages">{links}</nav>
    <p id="about" class="about"></p>
    <p id="contact" class="contact" data-state="waiting"><span class="dot" aria-hidden="true"></span>\
<span id="contact-text">connecting</span></p>
    <button id="theme" class="plain" type="button">Theme: system</button>
  </header>
"""
