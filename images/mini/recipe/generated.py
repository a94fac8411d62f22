"""Topics made of the references: the answer from the fact, phrasings from templates of its kind.

The files are written by `python images/mini/build.py` and committed, so that a change of the references shows as a
change of the corpus. Equal references give equal files, byte for byte.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from recipe.references import KINDS, Fact

HEAD = "<!-- Written by `python images/mini/build.py` from docs/reference/; change the code, then run that again. -->\n"
_ANSWER_LENGTH = 230  # characters of meaning in an answer; what is more stays in the reference
_SENTENCE = re.compile(r"(?<=[.:;])\s+(?=[A-Z`0-9])")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]{2,}")
_COMMON = frozenset(
    "the and for that with its are was one each all not this they them from what which where when how has have had may "
    "can without beside other others than then there their who whose into out more most only after before while it is "
    "as by an in of on or to be at no if so does been were will would such same given also any per left yaml key "
    "section tenant".split()
)
_FILES = {kind: f"{kind}s.md" for kind in KINDS} | {"policy": "policy-keys.md"}
_KEYWORDS = 14  # of a fact's meaning


def pages(facts: Sequence[Fact]) -> dict[str, str]:
    """File name to text of every generated corpus file."""
    unique = _unique_leaves(facts)
    texts = {fact: _TEMPLATES[fact.kind](fact, unique) for fact in facts}
    lines = Counter(line for text in texts.values() for line in text.splitlines())
    found = {}
    for kind in KINDS:
        # A phrasing that two facts have says neither.
        topics = [
            "\n".join(line for line in text.splitlines() if lines[line] == 1 or not line.startswith("- "))
            for fact, text in texts.items()
            if fact.kind == kind
        ]
        found[_FILES[kind]] = HEAD + f"\n# Kind: {kind}\n\n" + "\n\n".join(topics) + "\n"
    return found


def names_of(fact: Fact, unique: frozenset[str]) -> tuple[str, ...]:
    """What people call a fact: its full name, a short one that no other fact has, and that without underscores."""
    full = _plain(fact.name).replace("tenants.TENANT.", "").replace("[]", "")
    if fact.kind == "error":
        full = full.split(" ")[1]
    leaf = re.split(r"[. ]", full)[-1]
    if fact.kind in ("setting", "policy") and not re.search(r"[._]", full):
        file = "athanor.yaml" if fact.kind == "setting" else "policy.yaml"
        return f"{full}: in {file}", f"the key {full} of {file}", f"section {full} of {file}"
    names = [full]
    if fact.kind in ("setting", "policy", "field") and leaf in unique and "_" in leaf:
        names += [leaf, leaf.replace("_", " ")]
    elif fact.kind in ("error", "metric"):
        names.append(full.replace("_", " "))
    return tuple(dict.fromkeys(names))


def _unique_leaves(facts: Sequence[Fact]) -> frozenset[str]:
    """Short names that one fact alone has."""
    leaves = Counter(re.split(r"[. ]", _plain(fact.name).replace("[]", ""))[-1] for fact in facts)
    return frozenset(leaf for leaf, times in leaves.items() if times == 1 and len(leaf) > 3)


def _command(fact: Fact, _unique: frozenset[str]) -> str:
    name = fact.name
    words = name.removeprefix("athanor ")
    first = _SENTENCE.split(fact.about)[0]
    typed = [example for example in fact.examples if example[0].startswith(name) and example[0] != name][:1]
    shown = f" Example: `{typed[0][0]}`: {_end(typed[0][1])}" if typed else ""
    return _topic(
        fact,
        answer=f"`{name}`: {_short(fact.about)}{shown}",
        phrases=(name, f"the command {name}", f"the {words} command", f"{name} --help"),
        patterns=(
            f"{{what does|how does}} {name} {{do|work|help|}}?",
            f"{{what is|explain|describe|define}} {{{name}|the {words} command|the command {words}}}",
            f"{{options|flags|arguments|usage|help|example|syntax|manual}} {{of|for}} {{{name}|{words}}}",
            f"how do I {{use|run|call|type}} {name}?",
            f"{{when|why}} {{do|would|should}} I {{need|use|run}} {name}?",
            f"{{what is|what's}} {{{name}|{words}}} {{for|good for|used for}}?",
            name,
        ),
        goals=(_clause(first),),
        keywords=_keywords(" ".join((words, words, fact.about, *(purpose for _, purpose in fact.examples)))),
    )


def _setting(fact: Fact, unique: frozenset[str]) -> str:
    return _key(fact, unique, "athanor.yaml", ("setting", "configuration key", "config key", "key"))


def _policy(fact: Fact, unique: frozenset[str]) -> str:
    return _key(fact, unique, "policy.yaml", ("policy key", "key of the policy", "policy setting", "rule"))


def _key(fact: Fact, unique: frozenset[str], file: str, nouns: Sequence[str]) -> str:
    """A key of one of the two files."""
    names = names_of(fact, unique)
    called = _either(names)
    spelled = fact.name.replace("tenants.TENANT.", "") if fact.kind == "policy" else fact.name
    return _topic(
        fact,
        answer=f"`{spelled}` ({file}): {fact.detail}. {_short(fact.about)}",
        phrases=(*names, *(f"{noun} {names[0]}" for noun in nouns), f"{names[0]} in {file}"),
        patterns=(
            f"{{what does|what do}} {called} {{do|mean|set|change}}?",
            f"{{what is|explain|describe|define|meaning of}} {called}",
            f"{{default|default value|range|type|unit|maximum|allowed values|possible values}} {{of|for}} {called}",
            f"what is the {{default|range|unit|type|smallest value|largest value}} of {called}?",
            f"{_either(nouns)} {called}",
            f"{{how|where}} do I {{set|change|configure|write|raise|lower}} {called}?",
            f"{{which value|what value|what}} {{should|can|may}} {called} have?",
        ),
        keywords=_keywords(" ".join((*names, fact.about))),
        gists=(f"{_either(nouns)} {{for|that sets|about}}",),
    )


def _error(fact: Fact, unique: frozenset[str]) -> str:
    status, code = fact.name.split(" ")
    called = _either(names_of(fact, unique))
    return _topic(
        fact,
        answer=f"`{code}` ({status}): {_short(fact.about)}",
        phrases=(code, f"{status} {code}", f"error {code}", f"code {code}", f"the error code {code}"),
        patterns=(
            f"{{why do I get|what is|what does it mean:|reason for|meaning of|how do I fix}} {called}?",
            f"{{HTTP|status|error|code|}} {status} {called}",
            f"{{my client|the api|our application|the server|a tenant}} {{gets|says|reports|returns|answers}} {called}",
            f"{{error|code|type|message}} {called}",
            f"I {{get|see|have|got|receive}} {{{status} |}}{called}",
            f"{{request|call|stream}} {{fails|failed|ends|ended}} with {called}",
            f"what {{causes|triggers|can I do about|to do about}} {called}?",
        ),
        keywords=_keywords(f"{code} {code} {status} {fact.about}"),
    )


def _metric(fact: Fact, unique: frozenset[str]) -> str:
    names = (*names_of(fact, unique), fact.detail.rpartition("OpenTelemetry ")[2])
    called = _either(names)
    short = names[0].removeprefix("athanor_").removesuffix("_total").removesuffix("_seconds").replace("_", " ")
    kind, unit = fact.detail.split("; ")[0].split(", ")
    return _topic(
        fact,
        answer=f"`{names[0]}` ({kind}, {unit}): {_short(fact.about)}",
        phrases=(*names, f"metric {names[0]}", f"the {kind} {names[0]}", f"metric for {short}"),
        patterns=(
            f"{{what is|explain|describe|meaning of|what does it mean:}} {called}",
            f"{{metric|series|prometheus metric|gauge|counter|time series}} {called}",
            f"what {{does|is}} {called} {{count|measure|show|tell|mean}}?",
            f"{{metric|which metric|prometheus name|panel|query}} for {{{short}|the {short}}}",
            f"{{unit|labels|type|help}} of {called}",
            f"how do I {{read|interpret|graph|use|alert on}} {called}?",
            f"{{metric|a metric|which metric|prometheus metric|series}} for {_clause(fact.about)}",
        ),
        keywords=_keywords(f"{short} {short} {fact.about}"),
        gists=(
            "{metric|which metric|prometheus metric|metric that counts|metric name|a series} {for|of|with|that shows}",
        ),
    )


def _field(fact: Fact, unique: frozenset[str]) -> str:
    called = _either(names_of(fact, unique) if fact.name in unique else (fact.name, f"the field {fact.name}"))
    return _topic(
        fact,
        answer=f"Request field `{fact.name}`: {fact.detail}. {_short(fact.about)}",
        phrases=(
            f"field {fact.name}",
            f"request field {fact.name}",
            f"parameter {fact.name}",
            f"{fact.name} in a request",
        ),
        patterns=(
            f"{{field|request field|parameter|request parameter|body field|option}} {called}",
            f"{{what does|what do}} the {{field|parameter|request field}} {fact.name} {{do|mean}}?",
            f"{{can I send|is there|do you accept|do you take|is it ok to send}} {called} in a request?",
            f"{{default|range|maximum|largest value|smallest value|type}} of the {{field|parameter}} {fact.name}",
            f"how do I {{set|send|pass|use}} {called} in {{a request|the body|a call|my client}}?",
            f"is {fact.name} {{supported|accepted|understood|allowed}} {{in a request|over HTTP|in the API|}}?",
        ),
        keywords=_keywords(f"{fact.name} {fact.name} field parameter request {fact.about}"),
    )


def _header(fact: Fact, _unique: frozenset[str]) -> str:
    called = _either(tuple(_plain(name) for name in fact.name.split(", ") if not name.startswith("-")))
    first = fact.name.split(",")[0]
    return _topic(
        fact,
        answer=f"`{first}` is a {fact.detail} header. {_short(fact.about)}",
        phrases=(f"header {first}", f"the {first} header", f"{fact.detail} header {first}"),
        patterns=(
            f"{{header|http header|{fact.detail} header}} {called}",
            f"{{what is|explain|meaning of|purpose of}} the {{header {first}|{first} header|http header {first}}}",
            f"what {{does|is}} the {first} header {{mean|for|do|good for}}?",
            f"{{why is there|what about|I see}} {{a header|the header}} {first}",
            f"{called} {{header|http header|in the headers|response header|request header}}",
        ),
        keywords=_keywords(f"{first} header {first} header {fact.about}"),
    )


SEVERAL = ("/v1/files", "/v1/batches", "/v1/responses/RESPONSE")
"""Beginnings of paths that several methods have: a question names the method as well."""


def _route(fact: Fact, _unique: frozenset[str]) -> str:
    method, path = _plain(fact.name).split(" ")
    where = "admin" if fact.detail.startswith("admin") else "tenants'"
    named = f"{method} {path}" if path.startswith(SEVERAL) else path
    return _topic(
        fact,
        answer=f"`{method} {path}` ({where} port): {_short(fact.about)}",
        phrases=(f"{method} {path}", f"route {named} {where} port", f"the {where} route {named}"),
        patterns=(
            f"{{what is|what does|explain|describe}} {{{method} {path}|the {where} route {named}}}",
            f"{{route|endpoint|path|url}} {method} {path}",
            f"{{what|which}} {{is answered|comes back|answer comes}} {{from|by|on}} {method} {path}?",
            f"{{can I|may I|how do I}} {{call|ask|query|use}} {method} {path}?",
            f"{{curl|http}} {method} {path}",
        ),
        keywords=_keywords(f"route {path} {where} {fact.about}"),
    )


_TEMPLATES: dict[str, Callable[[Fact, frozenset[str]], str]] = {
    "command": _command,
    "setting": _setting,
    "policy": _policy,
    "error": _error,
    "metric": _metric,
    "field": _field,
    "header": _header,
    "route": _route,
}


def _topic(
    fact: Fact,
    *,
    answer: str,
    phrases: Sequence[str],
    patterns: Sequence[str],
    keywords: Sequence[str],
    goals: Sequence[str] = (),
    gists: Sequence[str] = (),
) -> str:
    """One topic as text of a corpus file."""
    lines = [f"## {fact.topic}", "* " + ", ".join(dict.fromkeys(phrases))]
    lines += [f"- {pattern}" for pattern in patterns]
    lines += [f"! {goal}" for goal in goals]
    lines += [f"% {', '.join(keywords)}"] if keywords else []
    lines += [
        f"- {gist} {' '.join(keywords[i : i + 3])}" for gist in gists for i in (0, 2, 4) if keywords[i + 2 : i + 3]
    ]
    return "\n".join([*lines, "", answer])


def _short(text: str) -> str:
    """The first sentences of a meaning, as many as an answer has room for."""
    sentences = _SENTENCE.split(text)
    kept = sentences[0]
    for sentence in sentences[1:]:
        if len(kept) + len(sentence) > _ANSWER_LENGTH:
            break
        kept += " " + sentence
    return _end(kept.rstrip(";:"))


def _end(text: str) -> str:
    return text if text.endswith((".", "?")) else text + "."


def _clause(text: str) -> str:
    """A meaning as part of a sentence: first sentence, small letters, no comma, brace or bar."""
    first = _SENTENCE.split(text)[0].split(": ")[0].split(" (")[0]
    return re.sub(r"[`,;{}|]|\.$", "", first[:1].lower() + first[1:])


def _keywords(text: str) -> tuple[str, ...]:
    """Words by which a fact can be known, the first ones first."""
    found = [word.lower().strip("-_") for word in _WORD.findall(text)]
    return tuple(dict.fromkeys(word for word in found if word not in _COMMON))[:_KEYWORDS]


def _either(names: Sequence[str]) -> str:
    """A pattern of alternatives."""
    return names[0] if len(names) == 1 else "{" + "|".join(names) + "}"


def _plain(name: str) -> str:
    """A name without the signs that a pattern has a meaning for."""
    return re.sub(r"\{(\w+)[^}]*\}", lambda found: found.group(1).upper(), name).replace("|", " ").replace(",", " ")
