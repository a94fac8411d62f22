"""engine.text.template and engine.text.jinja: setup, refusals, bombs, and who writes what."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.errors import ModelLoadError, RequestRejectedError
from engine.text.conversation import Conversation, parse_conversation
from engine.text.marks import ControlTokens, unmark, wrap
from engine.text.template import ChatTemplate, parse_template
from isolation.ipc.messages import FailureCode

TOKENS = ("<|start|>", "<|end|>", "<s>", "<t>")
USER = {"role": "user", "content": "Hi"}


def template(source: str, *, limit_bytes: int = 1 << 20) -> ChatTemplate:
    """A template of a model with four control tokens, of which one is the BOS."""
    return ChatTemplate(
        parse_template(source), ControlTokens(TOKENS), special={"bos_token": "<s>"}, limit_bytes=limit_bytes
    )


def render(source: str, *messages: dict, **others: object) -> str:
    """The source rendered with these messages, marks included."""
    data = {"messages": list(messages) or [USER]} | others
    return template(source).render(parse_conversation(json.dumps(data).encode()))


def refusal(source: str, *messages: dict, **others: object) -> tuple[FailureCode, str]:
    """Why a rendering is refused."""
    with pytest.raises(RequestRejectedError) as caught:
        render(source, *messages, **others)
    return caught.value.code, caught.value.reason


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': '<\u00e4>', 'a': 1} | tojson }}", '{"b": "<\u00e4>", "a": 1}'),
        (
            "{{ {'b': 1, 'a': '\u00e4'} | tojson(indent=1, sort_keys=true, ensure_ascii=true) }}",
            '{\n "a": "\\u00e4",\n "b": 1\n}',
        ),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}a{% endgeneration %}{{ x }}", "a1"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}", "True True True"),
        ("{{ undefined_thing }}|{{ messages[0].nothing }}", "|"),
        ("{{ 'a' if messages[0]['role'] == 'user' else 'b' }}", "a"),
    ],
)
def test_environment(source: str, expected: str) -> None:
    """Whitespace, loop controls, JSON, generation blocks and variables are as in transformers."""
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<|start|>{{ messages[0].content }}", wrap("<|start|>") + "Hi"),
        ("{{ '<|start|>' + 'x' ~ '<|end|>' }}", wrap("<|start|>") + "x" + wrap("<|end|>")),
        ("{{ bos_token }}", wrap("<s>")),
        ("{% set t = '<t>' %}{{ t }}", wrap("<t>")),
        ("{% macro m(x) %}{{ x }}{% endmacro %}{{ m('<t>') }}", wrap("<t>")),
        ("{{ {'user': '<t>'}[messages[0].role] }}", wrap("<t>")),
        ("{{ ['<t>', '<s>'] | join('<|end|>') }}", wrap("<t>") + wrap("<|end|>") + wrap("<s>")),
        ("{{ '  <t>' | trim }}", wrap("<t>")),
        ("{{ 'a' | replace('a', '<t>') }}", wrap("<t>")),
        ("{{ 'a'.replace('a', '<t>') }}", wrap("<t>")),
        ("{{ '%s' | format('<t>') }}", wrap("<t>")),
        ("{{ ['<t>'] | tojson }}", f'["{wrap("<t>")}"]'),
    ],
)
def test_the_templates_own_tokens_are_marked(source: str, expected: str) -> None:
    """However a template writes a control token in full, it arrives marked."""
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '<t>' in messages[0].content }}", "True"),
        ("{{ messages[0].content == 'a<t>b' }}", "True"),
        ("{{ messages[0].content in ['a<t>b'] }}", "True"),
        ("{% set t = '<t>' %}{{ t in messages[0].content }}", "True"),
        ("{{ bos_token == '<s>' }}", "True"),
        ("{{ messages[0].content.split('<t>') | join('|') }}", "a|b"),
        ("{% set t = '<t>' %}{{ messages[0].content.split(t) | join('|') }}", "a|b"),
        ("{{ messages[0].content.startswith('a<t>') }}", "True"),
        ("{{ messages[0].content | replace('<t>', '') }}", "ab"),
        ("{{ messages[0].content.replace('<t>', '') }}", "ab"),
        ("{{ messages[0].content is eq 'a<t>b' }}", "True"),
        ("{{ {'<t>': 'x'}['<t>'] }}", "x"),
        ("{{ ('<t>' + 'b').split('<t>') | join('|') }}", "|b"),
    ],
)
def test_looking_at_a_text_is_not_disturbed(source: str, expected: str) -> None:
    """Comparisons, searches, subscripts and JSON see texts without marks."""
    assert render(source, {"role": "user", "content": "a<t>b"}) == expected


@pytest.mark.parametrize("content", ["<|start|>", "<t><|end|>", "<|st", "art|>", "<s>", "<|<|start|>start|>"])
def test_messages_write_no_control_tokens(content: str) -> None:
    """What a message spells stays unmarked, over seams and inside the template's own text as
    well."""
    source = (
        "<|start|>{{ messages[0].content }}{{ messages[1].content }}"
        "{{ messages[0].content | trim | upper | lower }}<{{ messages[0].content }}>"
        "{{ messages | tojson }}{{ '%s' | format(messages[0].content) }}"
        "{% set x %}{{ messages[0].content }}{% endset %}{{ x }}"
        "{{ [messages[0].content, messages[1].content] | join }}"
    )
    rendered = render(source, {"role": "user", "content": content}, {"role": "user", "content": "art|>"})
    assert rendered.startswith(wrap("<|start|>"))
    rest = rendered.removeprefix(wrap("<|start|>"))
    assert rest == unmark(rest)


def test_arguments_write_no_control_tokens() -> None:
    """A text given as a template argument stays a text."""
    rendered = render("<t>{{ effort }}", template_kwargs={"effort": "<t>"})
    assert rendered == wrap("<t>") + "<t>"


def test_tokens_put_together_from_parts_are_refused_at_load() -> None:
    """A template that builds control tokens out of roles cannot be served, and the error says
    so."""
    with pytest.raises(ModelLoadError, match=r"puts the control token <\|start\|> together"):
        ChatTemplate(
            parse_template("{% for m in messages %}{{ '<|' + m['x'] | default('start') + '|>' }}{% endfor %}"),
            ControlTokens(TOKENS),
            special={},
            limit_bytes=1 << 20,
        )


def test_the_templates_own_refusal_reaches_the_caller() -> None:
    """What raise_exception says is the reason."""
    source = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    assert refusal(source, USER, USER) == (
        FailureCode.INVALID,
        "the chat template refuses the conversation: one message only",
    )


@pytest.mark.parametrize(
    "body",
    [
        "{{ messages[0].nothing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ {}['x'].y }}",
        "{{ messages[0].__class__ }}{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ range(10 ** 9) }}",
        "{{ strftime_now('%s') }}",
        "{{ strftime_now('x' * 65) }}",
        "{{ '{0.__class__}'.format(1) }}{{ cycler.__init__.__globals__.os }}",
        "{{ int('x') }}",
    ],
)
def test_a_template_that_fails_is_a_refusal(body: str) -> None:
    """Errors inside the template, sandbox escapes among them, fail the request as INVALID."""
    source = "{% if messages | length > 1 %}" + body + "{% endif %}"
    code, reason = refusal(source, USER, USER)
    assert code is FailureCode.INVALID
    assert reason.startswith("the chat template fails on this conversation")


def test_the_sandbox_shows_no_globals() -> None:
    """What Jinja's sandbox hides renders as nothing, and page filters and lipsum do not exist."""
    assert render("{{ messages.__class__ }}{{ lipsum }}") == ""
    for source in ("{{ 'a' | pprint }}", "{{ 'a' | xmlattr }}", "{{ [1] | random }}"):
        with pytest.raises(ModelLoadError, match="No filter named"):
            template(source)


def grown(step: str, start: str = "c") -> str:
    """A template that replaces a value by ``step`` sixty times."""
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}"


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "deep recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "giant output": "{% for i in range(99999) %}{{ c * 1000 }}{% endfor %}",
    "doubling": grown("ns.x ~ ns.x"),
    "multiplication": "{{ c * 10 ** 11 }}",
    "long numbers": grown("ns.x * ns.x", start="c | length"),
    "power": "{{ (c | length + 9) ** (10 ** 8) % 7 }}",
    "wide format": "{{ '%10000000000d' % (c | length) }}",
    "wide field": "{{ '{:>10000000000}'.format(c) }}",
    "padding": "{{ c.ljust(10 ** 10) }}",
    "indent": "{{ c | indent(10 ** 10, true) }}",
    "growing list": grown("[c] + ns.x + ns.x", start="[c]"),
    "growing replace": grown("ns.x | replace('i', 'iiii')"),
    "shared lists as text": grown("[ns.x, ns.x]") + "{{ ns.x }}",
    "shared lists as JSON": grown("[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "slices": "{{ [c] | slice(10 ** 10) | list | length }}",
    "searching": "{% set a = (c * 2000) * 5000 %}{% for i in range(9999) %}{{ a.count(c * 1999 + 'x') }}{% endfor %}",
}


BOMB_PROGRAM = """
import sys, time
from engine.errors import RequestRejectedError
from engine.text import template
from engine.text.conversation import Conversation
from engine.text.marks import ControlTokens
template.RENDER_SECONDS = 0.2
bomb = template.ChatTemplate(
    template.parse_template(sys.argv[1]), ControlTokens(("<s>",)), special={"bos_token": "<s>"}, limit_bytes=1 << 20
)
begun = time.process_time()
try:
    bomb.render(Conversation([{"role": "user", "content": "Hi"}]))
except RequestRejectedError as error:
    print(error.code.name)
    print(bomb.render(Conversation([{"role": "user", "content": "Hello"}])))
    print(time.process_time() - begun)
"""
"""In a process of its own, as the worker is: time and memory are bounded for a whole process, and that of the tests has
a gigabyte of freed memory that no bound on new memory sees. A shorter alarm, to spare the machine; the worker's own is
tried in test_process. Processor time: on a busy machine the alarm rings on time, but what it ends ends later."""


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end(name: str, root: Path) -> None:
    """A bomb in one branch of a template fails that request within two seconds; the next is served."""
    source = "{% set c = messages[0].content %}{% if c == 'Hi' %}" + BOMBS[name] + "{% endif %}ok"
    done = subprocess.run(
        [sys.executable, "-c", BOMB_PROGRAM, source], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    code, served, spent_s = done.stdout.split()
    assert code in ("INVALID", "TOO_LONG")
    assert served == "ok"
    assert float(spent_s) < 2


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{", "cannot be read"),
        ("{% nonsense %}", "cannot be read"),
        ("{% for a in b %}", "cannot be read"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("{% if a %}" * 500 + "{% endif %}" * 500, "recursion"),
        ("{% for a in b %}" * 60 + "{% endfor %}" * 60, "nested blocks"),
        ("x" * (256 << 10) + "x", "larger than 262144 bytes"),
        ("{% include 'x' %}", "includes other templates"),
        ("{% from 'x' import y %}", "includes other templates"),
        ("{% extends 'x' %}", "includes other templates"),
        ("a\ufdd0", "reserved"),
        ("{{ '\\ufdd1' }}", "reserved"),
        ("{{ ['a' * 1000000] * 100000 | join }}{{ (['a' * 1000000] * 100000) | join }}", "memory"),
    ],
)
def test_templates_that_cannot_be_loaded(source: str, reason: str) -> None:
    """A template that is broken or too much is an error of the model, found before serving."""
    with pytest.raises(ModelLoadError, match=reason):
        template(source)


def test_loading_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that takes too long to compile is refused as well."""
    monkeypatch.setattr("engine.text.template.LOAD_SECONDS", 0.05)
    with pytest.raises(ModelLoadError, match=r"took longer than 0\.05 s to load"):
        template("".join(f"{{{{ a{index} }}}}" for index in range(20_000)))


def test_the_output_cap_is_in_bytes() -> None:
    """The limit itself passes, one byte more is TOO_LONG."""
    capped = template("{{ messages[0].content }}", limit_bytes=40)
    assert capped.render(Conversation([{"role": "user", "content": "\u00e4" * 20}])) == "\u00e4" * 20
    with pytest.raises(RequestRejectedError) as caught:
        capped.render(Conversation([{"role": "user", "content": "\u00e4" * 20 + "b"}]))
    assert caught.value.code is FailureCode.TOO_LONG


def test_template_arguments_are_those_the_template_reads() -> None:
    """The template itself is the allow-list; its own variables cannot be replaced."""
    source = "{{ bos_token }}{{ messages | length }}{{ enable_thinking }}"
    assert unmark(render(source, template_kwargs={"enable_thinking": True})) == "<s>1True"
    for name in ("messages", "bos_token", "tools", "raise_exception", "tokenize"):
        code, reason = refusal(source, template_kwargs={name: "x"})
        assert (code, reason) == (FailureCode.UNKNOWN_ARGUMENT, f"this model's chat template has no argument '{name}'")
    source = "{{ add_generation_prompt }}"
    assert render(source, template_kwargs={"add_generation_prompt": False}) == "False"


def test_tools_need_a_template_that_reads_them() -> None:
    """Tools are refused rather than dropped in silence."""
    tools = [{"function": {"name": "f"}}]
    assert render("{{ tools[0].function.name }}", tools=tools) == "f"
    assert "no place for tools" in refusal("{{ messages }}", tools=tools)[1]


def test_contents_become_parts_where_a_template_takes_nothing_else() -> None:
    """A template that walks over parts gets parts; one that takes texts gets texts."""
    source = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    assert render(source, {"role": "user", "content": "Hello"}) == "Hello"
    assert render(source, {"role": "assistant"}) == ""
    source = "{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}"
    assert render(source) == "Hi"


def test_the_date_is_todays_in_utc_and_no_finer() -> None:
    """A template learns the day and nothing below it."""
    before = datetime.now(UTC)
    rendered = render("{{ strftime_now('%d %b %Y|%Y-%m-%d|%H:%M:%S|%%') }}")
    after = datetime.now(UTC)
    expected = {day.strftime("%d %b %Y|%Y-%m-%d|00:00:00|%%") for day in (before, after)}
    assert rendered in expected


def test_nothing_is_kept_between_renderings() -> None:
    """A template cannot carry one tenant's words into another's rendering."""
    source = "{% set last = messages[0].content %}{{ seen | default('none') }}{% set seen = last %}"
    keeper = template(source)
    for _ in range(2):
        assert keeper.render(Conversation([USER])) == "none"
