"""Published chat templates give what transformers gives, and nobody's text writes control
tokens."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import tokenizers

from engine.errors import RequestRejectedError
from engine.text import template
from engine.text.conversation import parse_conversation
from engine.text.marks import unmark
from engine.text.template import ChatTemplate, parse_template
from engine.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = sorted((ROOT.parent / "shared" / "data" / "templates").glob("*.jinja"))
NAMES = [path.stem for path in TEMPLATES]

LOOKS_LIKE_A_TOKEN = re.compile(
    r"<[|\uff5c][^<>\s|\uff5c]+[|\uff5c]>|</?think>|</?tool_call>|<bos>|</?s>|\[/?INST\]"
    r"|<(?:start|end)_of_turn>|<\|?turn\|?>|<\|?channel\|?>|\]<\]minimax\[>\["
)

REFUSES_SYSTEM = {"google-gemma-2-2b-it"}
"""Templates that say in their own words that they take no system message."""

NEEDS_TOOLS = {"NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"}
"""Templates that fail when no tools are given; they are the second template of their model."""

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi there!\n  What is 2 < 3?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTrue."},
    {"role": "user", "content": " Thanks "},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a <place>",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "where"}},
                "required": ["place"],
            },
        },
    }
]


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a template gives is shown here, and not how long it takes: beside other work one of them took a second."""
    monkeypatch.setattr(template, "RENDER_SECONDS", 30.0)


class Model:
    """A template with a byte-level tokenizer whose added tokens are those the template writes."""

    def __init__(self, source: str, tiny) -> None:
        parsed = parse_template(source)
        found = sorted(set(LOOKS_LIKE_A_TOKEN.findall(parsed.literals)) | {"<s>", "</s>"})
        self.source = source
        self.data = tiny(*found)
        self.special = {"bos_token": "<s>", "eos_token": "</s>"}
        self.tokenizer = Tokenizer(self.data, parsed.literals)
        self.template = ChatTemplate(parsed, self.tokenizer.control, special=self.special, limit_bytes=1 << 20)
        self.control_ids = range(256, 256 + len(found))

    def rendered(self, messages, tools=None) -> str:
        data = {"messages": messages} | ({"tools": tools} if tools else {})
        return self.template.render(parse_conversation(json.dumps(data).encode()))

    def ids(self, messages, tools=None) -> list[int]:
        return list(self.tokenizer.encode_marked(self.rendered(messages, tools), 100_000))

    def controls(self, messages, tools=None) -> list[int]:
        return [token for token in self.ids(messages, tools) if token in self.control_ids]


@pytest.fixture(scope="module", params=TEMPLATES, ids=NAMES)
def model(request: pytest.FixtureRequest, tiny) -> Model:
    """One published template."""
    return Model(request.param.read_text(), tiny)


@pytest.fixture(scope="module")
def reference(model: Model, tmp_path_factory: pytest.TempPathFactory):
    """transformers' tokenizer with the same template."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("model")
    (path / "tokenizer.json").write_bytes(model.data)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": model.source}
    (path / "tokenizer_config.json").write_text(json.dumps(config | model.special))
    return transformers.AutoTokenizer.from_pretrained(path)


def conversation_of(name: str) -> list[dict]:
    """The longest simple conversation that a template takes."""
    return TALK[1:] if name in REFUSES_SYSTEM else TALK


def test_ids_are_those_of_transformers(model: Model, reference, request) -> None:
    """A simple conversation, reasoning in its history, gives the same text and the same ids."""
    name = request.node.callspec.id
    if name in NEEDS_TOOLS:
        with pytest.raises(RequestRejectedError, match="fails on this conversation"):
            model.rendered(TALK)
        return
    talk = conversation_of(name)
    expected = reference.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert unmark(model.rendered(talk)) == expected
    # Reasoning tags in a message are literal for us, so the ids are compared without them.
    plain = [message | {"content": message["content"].replace("think>", "b>")} for message in talk]
    expected_ids = reference.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert model.ids(plain) == expected_ids


def test_ids_with_tools_are_those_of_transformers(model: Model, reference, request) -> None:
    """With a tool, a call and its result, a template gives the same as transformers or fails
    too."""
    name = request.node.callspec.id
    call = {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": {"place": "Ulm"}}}
    talk = [
        {"role": "user", "content": "Weather in Ulm?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "abcdef123", "content": "sunny"},
    ]
    try:
        expected = reference.apply_chat_template(talk, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    except Exception:  # noqa: BLE001 - whatever the reference raises, we must refuse
        with pytest.raises(RequestRejectedError):
            model.rendered(talk, TOOLS)
        return
    if "tools" not in model.template._variables:
        with pytest.raises(RequestRejectedError, match="no place for tools"):
            model.rendered(talk, TOOLS)
        return
    assert model.ids(talk, TOOLS) == expected, name


def test_no_message_writes_a_control_token(model: Model, request) -> None:
    """Every control token, spelt in every message, stays text. Reasoning tags are left out:
    templates look for them in the history and write their own in their place."""
    name = request.node.callspec.id
    tools = TOOLS if name in NEEDS_TOOLS else None
    talk = conversation_of(name)
    texts = [text for text in sorted(model.tokenizer.control.texts) if "think" not in text]
    hostile = [message | {"content": message["content"] + "".join(texts)} for message in talk]
    assert model.controls(hostile, tools) == model.controls(talk, tools)
    # The check can see the difference: the published tokenizer takes the same text for control.
    published = tokenizers.Tokenizer.from_str(model.data.decode())
    assert len(published.encode("".join(texts)).ids) == len(texts)


def test_no_tool_writes_a_control_token(model: Model) -> None:
    """Descriptions of tools cannot write control tokens either, where a template takes tools."""
    talk = TALK[1:2]
    if "tools" not in model.template._variables:
        with pytest.raises(RequestRejectedError, match="no place for tools"):
            model.rendered(talk, TOOLS)
        return
    tools = copy.deepcopy(TOOLS)
    tools[0]["function"]["description"] = "".join(sorted(model.tokenizer.control.texts))
    assert model.controls(talk, tools) == model.controls(talk, TOOLS)


def test_there_are_templates(shared_data: Path) -> None:
    """The corpus is complete where it is there at all."""
    assert len(TEMPLATES) == 35
