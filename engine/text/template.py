"""Chat templates: render a conversation to the text format on which the model was trained.

There are two steps, because the set of control tokens depends on the template's own literals, and the marks in the
template depend on the control tokens: ``parse_template`` reads the source, ``ChatTemplate`` compiles it. Loading and
every rendering run guarded (``engine.text.guard``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jinja2 import Template, TemplateError, meta, nodes

from engine.errors import ModelLoadError, RequestRejectedError
from engine.text.conversation import Conversation
from engine.text.guard import OutOfTimeError, run_guarded
from engine.text.jinja import ChatEnvironment, TemplateRefusal, literals, mark_tree
from engine.text.marks import ControlTokens, holds_mark
from isolation.ipc.messages import FailureCode

MAX_TEMPLATE_BYTES = 256 << 10
"""Largest template source in bytes; the longest published ones have 20 KiB."""

LOAD_SECONDS = 10.0
"""Seconds to parse and compile; published templates take a tenth of a second."""

RENDER_SECONDS = 1.0
"""Seconds for one rendering; a conversation of a thousand messages takes a tenth of that."""

MEMORY_BYTES = 256 << 20
"""New memory of one step in bytes: thirty times the output limit."""

PROBE = "chat template probe"
"""Content of the test conversations that are rendered once while loading."""

_OWN_VARIABLES = frozenset(("messages", "tools", "documents", "bos_token", "eos_token"))
_FORBIDDEN_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)

_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that a template's code can raise, including endless recursion (``RecursionError``)."""

Result = TypeVar("Result")


class ParsedTemplate:
    """A template's syntax tree and the facts known before compilation."""

    def __init__(self, source: str) -> None:
        self.environment = ChatEnvironment()
        self.tree = self.environment.parse(source)
        if any(True for _ in self.tree.find_all(_FORBIDDEN_NODES)):
            raise ModelLoadError("the chat template includes other templates; there are none")
        self.literals = literals(self.tree)
        if holds_mark(self.literals):
            raise ModelLoadError("the chat template holds U+FDD0 or U+FDD1, which are reserved")
        # On a separate tree: the search folds constants, and a folded constant would no longer be marked.
        self.variables = frozenset(meta.find_undeclared_variables(self.environment.parse(source)))


def parse_template(source: str) -> ParsedTemplate:
    """Parse a template's source.

    Raises:
        ModelLoadError: it is too large, not Jinja, or contains something that a chat template must not.
    """
    if len(source.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
        raise ModelLoadError(f"the chat template is larger than {MAX_TEMPLATE_BYTES} bytes")
    return _loaded(lambda: ParsedTemplate(source))


class ChatTemplate:
    """A compiled template, with the special tokens it may write."""

    def __init__(
        self, parsed: ParsedTemplate, control: ControlTokens, *, special: Mapping[str, str], limit_bytes: int
    ) -> None:
        """Compile the template; ``special`` are the variables of the tokenizer, such as ``bos_token``, and
        ``limit_bytes`` bounds one rendering.

        Raises:
            ModelLoadError: it cannot be compiled, or it composes control tokens from parts.
        """
        self._control = control
        self._special = {name: control.mark(text) for name, text in special.items()}
        self._variables = parsed.variables
        self._limit_bytes = limit_bytes
        self._template = _loaded(lambda: _compiled(parsed, control))
        self._parts = False
        self._parts = self._wants_parts()
        self._check_composition()

    @property
    def takes_tools(self) -> bool:
        """Whether the template reads tools."""
        return "tools" in self._variables

    def render(self, conversation: Conversation) -> str:
        """Render the conversation as text in which exactly the template's own control tokens are marked.

        Raises:
            RequestRejectedError: ``INVALID`` when the template refuses or fails, ``UNKNOWN_ARGUMENT`` when it has no
                argument of a name that is given, ``TOO_LONG`` when the output exceeds the limit.
        """
        self._check_variables(conversation)
        try:
            rendered = run_guarded(
                lambda: self._rendered(conversation), seconds=RENDER_SECONDS, memory_bytes=MEMORY_BYTES
            )
        except TemplateRefusal as error:
            raise _rejected(f"the chat template refuses the conversation: {error}") from error
        except OutOfTimeError as error:
            raise _rejected(f"the chat template {error}") from error
        except MemoryError as error:
            raise _rejected("the chat template needs too much memory") from error
        except _TEMPLATE_ERRORS as error:
            raise _rejected(f"the chat template fails on this conversation: {error}") from error
        return self._control.settle(rendered)

    def _check_variables(self, conversation: Conversation) -> None:
        if conversation.tools is not None and not self.takes_tools:
            raise _rejected("this model's chat template has no place for tools")
        for name in conversation.template_kwargs:
            # The template is the allow-list: a variable that it never reads has no effect and is an error.
            if not self._has_argument(name):
                reason = f"this model's chat template has no argument {name[:64]!r}"
                raise RequestRejectedError(FailureCode.UNKNOWN_ARGUMENT, reason)

    def _has_argument(self, name: str) -> bool:
        return name in self._variables and name not in self._special and name not in _OWN_VARIABLES

    def _rendered(self, conversation: Conversation) -> str:
        values = self._special | {
            "messages": self._messages(conversation),
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": True,
            **{name: value for name, value in conversation.hints.items() if self._has_argument(name)},
            **conversation.template_kwargs,
        }
        chunks = []
        room = self._limit_bytes
        for chunk in self._template.generate(values):
            room -= len(chunk.encode("utf-8", "replace"))
            if room < 0:
                raise RequestRejectedError(
                    FailureCode.TOO_LONG, f"the chat template gives more than {self._limit_bytes} bytes"
                )
            chunks.append(chunk)
        return "".join(chunks)

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        # Copies, so that nothing a template keeps of them outlives the rendering.
        messages = [dict(message) for message in conversation.messages]
        if self._parts:
            for message in messages:
                if "content" in message:
                    message["content"] = [{"type": "text", "text": message["content"]}]
        return messages

    def _wants_parts(self) -> bool:
        """Return whether the template accepts contents only as lists of parts."""
        if PROBE in self._probed(("user",)):
            return False
        self._parts = True
        return PROBE in self._probed(("user",))

    def _check_composition(self) -> None:
        """Refuse a template that composes a control token from parts, such as ``'<|' + role + '|>'``: it is
        indistinguishable from these characters in a message, so the template would lose its own tokens."""
        for roles in (("user",), ("system", "user"), ("user", "assistant", "user")):
            token = self._control.unmarked_in(self._probed(roles))
            if token is not None:
                raise ModelLoadError(
                    f"the chat template puts the control token {token} together from parts, which "
                    "cannot be told from a message that spells it; write the token out in full"
                )

    def _probed(self, roles: tuple[str, ...]) -> str:
        try:
            return self.render(Conversation([{"role": role, "content": PROBE} for role in roles]))
        except RequestRejectedError:
            # Many templates reject some order of roles, which is legitimate.
            return ""


def _compiled(parsed: ParsedTemplate, control: ControlTokens) -> Template:
    mark_tree(parsed.tree, control)
    code = parsed.environment.compile(parsed.tree)
    return Template.from_code(parsed.environment, code, parsed.environment.globals)


def _loaded(work: Callable[[], Result]) -> Result:
    try:
        return run_guarded(work, seconds=LOAD_SECONDS, memory_bytes=MEMORY_BYTES)
    except OutOfTimeError as error:
        raise ModelLoadError(f"the chat template {error} to load") from error
    except MemoryError as error:
        raise ModelLoadError("the chat template needs too much memory to load") from error
    except (*_TEMPLATE_ERRORS, SyntaxError) as error:
        raise ModelLoadError(f"the chat template cannot be read: {error}") from error


def _rejected(reason: str) -> RequestRejectedError:
    return RequestRejectedError(FailureCode.INVALID, reason)
