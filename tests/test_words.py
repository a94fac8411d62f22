"""Words of the code: first lines that stand alone, one name for one class, no riddles."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from tests.test_architecture import PACKAGES, modules, parse, statements

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADLESS = re.compile(r"(Of|The same)\b")
"""First words of a docstring that do not stand alone in a tooltip: their noun is elsewhere."""

ENDS = (".", ".)", ":", "?")
"""How a docstring's first paragraph may end: with a full stop, or with a colon before a list."""

RIDDLES = re.compile(r"\b(nobody's|whoever|hears|let go of|is told so|one's own|wants)\b", re.IGNORECASE)
"""Words that name a person for a program, or leave the subject out."""


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the product, parsed once for all rules."""

    name: str
    text: str
    documents: list[tuple[int, str]]
    classes: list[str]
    plurals: list[str]


@pytest.fixture(scope="module")
def parsed(root: Path) -> list[Module]:
    """Every module of the product."""
    found = []
    for path in modules(root):
        text = path.read_text()
        tree = parse(text)
        name = str(path.relative_to(root))
        found.append(Module(name, text, list(docstrings(tree)), public_classes(tree), plurals(tree, text)))
    return found


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those below attributes included."""
    for node in statements(tree):
        for statement in getattr(node, "body", ()):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value.value
                if isinstance(value, str):
                    yield statement.lineno, value.strip()


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def public_classes(tree: ast.Module) -> list[str]:
    """Names of a module's public classes."""
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def headless(documents: list[tuple[int, str]]) -> list[int]:
    """Lines of docstrings that begin with words whose noun is elsewhere."""
    return [line for line, text in documents if HEADLESS.match(text)]


def unfinished(documents: list[tuple[int, str]]) -> list[int]:
    """Lines of docstrings whose first paragraph ends without a full stop."""
    return [line for line, text in documents if not text.split("\n\n")[0].endswith(ENDS)]


def riddles(documents: list[tuple[int, str]], text: str) -> list[int]:
    """Lines of docstrings and comments that use a refused word."""
    # To find comments takes long, and few modules have such a word anywhere.
    spoken = comments(text) if RIDDLES.search(text) else ()
    return sorted(line for line, words in (*documents, *spoken) if RIDDLES.search(words))


def repeated(classes: dict[str, list[str]]) -> set[str]:
    """``package.Class`` for each class name that two modules of a package define."""
    return {
        f"{package}.{name}" for package, names in classes.items() for name, times in Counter(names).items() if times > 1
    }


def test_a_docstring_begins_with_its_subject(parsed: list[Module]) -> None:
    """No docstring begins with "Of" or "The same"."""
    found = {module.name: headless(module.documents) for module in parsed}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_docstrings_first_paragraph_is_finished(parsed: list[Module]) -> None:
    """The first paragraph of each docstring ends with a full stop, a colon or a question mark."""
    found = {module.name: unfinished(module.documents) for module in parsed}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_class_name_is_defined_once_in_a_package(parsed: list[Module]) -> None:
    """No two modules of a package define public classes of one name."""
    classes: dict[str, list[str]] = defaultdict(list)
    for module in parsed:
        classes[module.name.partition("/")[0]] += module.classes
    assert set(classes) == set(PACKAGES)
    assert repeated(classes) == set()


def test_words_are_plain(parsed: list[Module]) -> None:
    """No comment or docstring uses a refused word."""
    found = {module.name: riddles(module.documents, module.text) for module in parsed}
    assert len(found) > 500
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_lint_can_fail() -> None:
    """Positive control: each rule finds its mistake, and leaves a sound text alone."""
    wrong = '"""The same for two"""\n\nA = 1\n"""Of it."""\n# Whoever calls it is told.\nclass Twice:\n    """One."""\n'
    sound = '"""Offsets of rows."""\n\n# The caller frees it.\nA = 1\n"""Bytes of one row."""\n'
    documents, names = list(docstrings(parse(wrong))), public_classes(parse(wrong))
    assert headless(documents) == [1, 4]
    assert unfinished(documents) == [1]
    assert riddles(documents, wrong) == [5]
    assert repeated({"engine": names * 2, "policy": names}) == {"engine.Twice"}
    documents = list(docstrings(parse(sound)))
    assert (headless(documents), unfinished(documents), riddles(documents, sound)) == ([], [], [])


COUNTED_NOUNS = frozenset(
    "accounts answers attaches attempts blocks boots breaches calls cards certificates checkpoints choices "
    "combinations connections cores descriptors devices digits engines entries errors failures files floods folders "
    "frames groups hits images items keys kernels kills layers lines messages models notes objects pages pairs "
    "paths places points preemptions prefixes problems processes processors prompts records repetitions requests "
    "restarts routes rows samples sandboxes seconds sessions signatures spans steps streams tenants tensors texts "
    "things threads times tokens trials turns units users values vectors warnings witnesses words".split()
)
"""Plurals of what the program counts in its texts."""

NEVER_ONE = {
    "appliance/common/image/store.py: len(found) images",
    "appliance/common/keys.py: len(keys) keys",
    "appliance/common/model_rules.py: ranks processes",
    "appliance/gateway/console/alerts.py: count tenants",
    "appliance/gateway/console/alerts.py: facts.latency.requests requests",
    "appliance/gateway/console/alerts.py: grown times",
    "appliance/gateway/console/alerts.py: strangers calls",
    "appliance/gateway/http/openai.py: len(prompt) prompts",
    "appliance/gateway/http/structured.py: len(found) times",
    "appliance/gateway/request/embedding.py: MAX_NUMBERS // len(vector) texts",
    "appliance/gateway/request/embedding.py: len(self._vectors) vectors",
    "appliance/gateway/request/embedding.py: most tokens",
    "appliance/gateway/request/session.py: ready.max_context tokens",
    "appliance/gateway/sandboxes/publications.py: len(common) tokens",
    "appliance/gateway/sandboxes/publications.py: ready.num_blocks blocks",
    "appliance/gateway/sandboxes/attached.py: answer.most_open descriptors",
    "appliance/gateway/telemetry/waterfall.py: figures.rate(one.token_s) tokens",
    "appliance/operator/reference/policy.py: shape['maxProperties'] entries",
    "appliance/selftest/g1_public.py: TURNS[False] turns",
    "appliance/selftest/g1_reuse.py: 2 * pairs pairs",
    "appliance/selftest/g2_namespace.py: asked routes",
    "appliance/selftest/g2_namespace.py: len(ROUTES) routes",
    "appliance/selftest/g5_occupancy.py: change points",
    "appliance/selftest/g6_interference.py: ratio times",
    "appliance/selftest/g7_wire.py: [len(one) for one in captures] answers",
    "appliance/selftest/g8_service.py: os.cpu_count() cores",
    "appliance/supervisor/hand_over.py: self.repeats times",
    "appliance/supervisor/ranks.py: threads.ranks processes",
    "appliance/supervisor/threads.py: quota cores",
    "policy/evaluate.py: access.choices choices",
    "policy/files.py: len(files) files",
    "policy/public_prefixes.py: len(messages) messages",
}
"""Numbers before a plural that are bounds of several, fractions, several numbers, or above 1 where the text stands."""


FORMATTED = re.compile(r"\b(?:[fF][rR]?|[rR][fF])[\"']")
"""Where a text with values in it begins; in other texts it may be found, too."""


def formatted(tree: ast.Module, text: str) -> Iterator[ast.JoinedStr]:
    """Texts with values in them. Looked for on lines where such a text begins alone: they are a twentieth of a tree."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if FORMATTED.search(line)]
    left: list[ast.AST] = [tree] if lines else []
    while left:
        node = left.pop()
        if isinstance(node, ast.JoinedStr):  # Lines of what is within one are not to be relied on.
            yield from (inner for inner in ast.walk(node) if isinstance(inner, ast.JoinedStr))
            continue
        for child in ast.iter_child_nodes(node):
            first = getattr(child, "lineno", None)
            if first is None or bisect_left(lines, first) < bisect_right(lines, child.end_lineno):  # type: ignore[attr-defined]
                left.append(child)


def plurals(tree: ast.Module, text: str) -> list[str]:
    """Numbers that stand before a plural whatever they are: expression and noun. A bound in capitals is a constant."""
    found = []
    for node in formatted(tree, text):
        for left, right in pairwise(node.values):
            if not isinstance(left, ast.FormattedValue) or not isinstance(right, ast.Constant):
                continue
            said, noun = ast.unparse(left.value), re.match(r" (?:(?:more|untyped|wrong) )?([a-z]+)\b", str(right.value))
            if noun is not None and noun[1] in COUNTED_NOUNS and not re.fullmatch(r"[\w.]*\b[A-Z][A-Z0-9_]+", said):
                found.append(f"{said} {noun[1]}")
    return found


def test_no_text_counts_one_of_several(parsed: list[Module]) -> None:
    """No text for an operator or a tenant says "1 tenants": a number with its noun is made by ``counted``. Control:
    the sentence that is looked for is found, and the right one is not."""

    def told(text: str) -> list[str]:
        return plurals(parse(text), text)

    assert told('f"{len(tenants)} tenants"') == ["len(tenants) tenants"]
    assert told('f"{number} more keys {x}"') == ["number keys"]
    assert told("f\"{counted(number, 'tenant')}, {MAX_KEYS} keys\"") == []
    # However deep the text stands, and wherever its prefix.
    for prefix in ("f", "F", "rf", "fR"):
        assert told(f'def a(b):\n    return [c(\n        "x"\n        {prefix}"{{b}} keys",\n    )]\n') == ["b keys"]
    spoken = [one for one in parsed if one.name.startswith(("appliance/", "policy/"))]
    left_out = ("appliance/operator/bench/", "appliance/selftest/redteam/")
    found = {f"{one.name}: {said}" for one in spoken if not one.name.startswith(left_out) for said in one.plurals}
    assert found - NEVER_ONE == set()
    assert NEVER_ONE - found == set(), "no longer there"
