"""Message handlers of the text sandbox: one message in, one message out; without channel or process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from engine.config import TextConfig
from engine.errors import ModelLoadError, RequestRejectedError
from engine.text.conversation import Conversation, check_text, parse_conversation
from engine.text.files import DEFAULT_TEMPLATE, TOOL_TEMPLATE, TextFiles, read_text_files
from engine.text.marks import unmark
from engine.text.output.detect import find_format
from engine.text.output.history import fit_calls
from engine.text.output.reader import OutputReaders
from engine.text.reasons import presentable
from engine.text.template import ChatTemplate, parse_template
from engine.text.token_bytes import Words
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import Vocabulary
from isolation.ipc.messages import MAX_FRAME_BYTES, MAX_VOCABULARY_ENTRIES, NO_TOKEN, Failed, FailureCode, TextReady
from isolation.ipc.output import OutputRead, ReadOutput
from isolation.ipc.text import Decode, Decoded, Encode, Encoded, ReadVocabulary, SourceKind
from isolation.ipc.text import Vocabulary as VocabularySlice

FRAME_ROOM_BYTES = 1_024
"""Bytes of a frame reserved for its header, which has a few dozen."""

LENGTH_BYTES = 8
"""Bytes of a frame that one entry takes besides its text, rounded up."""

TextJob: TypeAlias = Encode | Decode | ReadVocabulary | ReadOutput
TextResult: TypeAlias = Encoded | Decoded | VocabularySlice | OutputRead | Failed


class TextWorker:
    """Tokenizer, chat templates and vocabulary of one model."""

    def __init__(self, files: TextFiles, config: TextConfig) -> None:
        """Load and test all of the model's text files.

        Raises:
            ModelLoadError: the model's files cannot be used.
        """
        parsed = {name: parse_template(source) for name, source in files.templates.items()}
        literals = "\n".join(template.literals for template in parsed.values())
        self._tokenizer = Tokenizer(files.tokenizer, literals)
        self._templates = {
            name: ChatTemplate(
                template, self._tokenizer.control, special=files.special, limit_bytes=config.render_limit_bytes
            )
            for name, template in parsed.items()
        }
        self._vocabulary = Vocabulary(self._tokenizer)
        self._takes_tools = self._vocabulary.exact and any(one.takes_tools for one in self._templates.values())
        form = find_format(literals, takes_tools=self._takes_tools)
        self._outputs = OutputReaders(form, self._tokenizer.special(), self._vocabulary.entries)

    def words(self) -> Words | None:
        """Return the tokenizer facts that grammars need; None when the table of token bytes is not exact."""
        if not self._vocabulary.exact:
            return None
        outputs = self._outputs
        return Words(self._vocabulary.entries, self._tokenizer.fragment, outputs.form, outputs.spelling)

    def ready(self) -> TextReady:
        """Return this model's text capabilities."""
        begins, ends = self._thinking_tokens()
        return TextReady(
            vocab_size=self._tokenizer.vocab_size,
            has_chat_template=DEFAULT_TEMPLATE in self._templates,
            exact_vocabulary=self._vocabulary.exact,
            strip_leading_space=self._vocabulary.strip_leading_space,
            calls=self._outputs.form.calls is not None and self._takes_tools,
            thinks=self._outputs.form.thinks and self._vocabulary.exact,
            think_begins=begins,
            think_ends=ends,
        )

    def _thinking_tokens(self) -> tuple[int, int]:
        """Return the tokens around reasoning, if it stands between two."""
        thinking, ids = self._outputs.form.thinking, self._tokenizer.tokens()
        if thinking is None or not self._vocabulary.exact or any(marker not in ids for marker in thinking):
            return NO_TOKEN, NO_TOKEN
        return ids[thinking[0]], ids[thinking[1]]

    def answer(self, job: TextJob) -> TextResult:
        """Answer one job; its own faults are returned as ``Failed`` and leave the worker usable."""
        try:
            if isinstance(job, Encode):
                return self._encode(job)
            if isinstance(job, Decode):
                return self._decode(job)
            if isinstance(job, ReadOutput):
                return self._outputs.read(job)
            return self._read_vocabulary(job)
        except RequestRejectedError as error:
            return Failed(job.request, error.code, presentable(error.reason))
        except MemoryError:
            return Failed(job.request, FailureCode.INTERNAL, "the text worker ran out of memory")

    def close_output(self, request: int) -> None:
        """Forget an output; an unknown one is ignored."""
        self._outputs.close(request)

    def _encode(self, job: Encode) -> Encoded:
        if job.kind is SourceKind.CHAT:
            conversation = parse_conversation(job.source)
            messages = fit_calls(conversation.messages, self._outputs.form.calls)
            conversation = replace(conversation, messages=messages)
            rendered = self._template_for(conversation).render(conversation)
            thinking = self._outputs.form.state_after(unmark(rendered))
            return Encoded(job.request, self._tokenizer.encode_marked(rendered, job.max_tokens), thinking)
        try:
            text = job.source.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestRejectedError(FailureCode.INVALID, "the text is not UTF-8") from error
        check_text(text)
        framed = job.kind is SourceKind.TEXT
        return Encoded(job.request, self._tokenizer.encode_text(text, job.max_tokens, framed=framed))

    def _decode(self, job: Decode) -> Decoded:
        """Decode ids by the tokenizer itself, for models whose table of token bytes is not exact: special tokens and
        unknown ids give nothing, and invalid bytes give U+FFFD."""
        text = self._tokenizer.decode(job.token_ids).encode("utf-8", "replace")
        if len(text) > MAX_FRAME_BYTES - FRAME_ROOM_BYTES:
            raise RequestRejectedError(FailureCode.TOO_LONG, "the decoded text is too long for one answer")
        return Decoded(job.request, text)

    def _template_for(self, conversation: Conversation) -> ChatTemplate:
        default = self._templates.get(DEFAULT_TEMPLATE)
        if default is None:
            raise RequestRejectedError(FailureCode.INVALID, "this model has no chat template")
        if conversation.tools is not None:
            return self._templates.get(TOOL_TEMPLATE, default)
        return default

    def _read_vocabulary(self, job: ReadVocabulary) -> VocabularySlice:
        room = MAX_FRAME_BYTES - FRAME_ROOM_BYTES
        entries = []
        for entry in self._vocabulary.entries[job.start : job.start + MAX_VOCABULARY_ENTRIES]:
            room -= len(entry) + LENGTH_BYTES
            if room < 0:
                break
            entries.append(entry)
        return VocabularySlice(job.request, job.start, tuple(entries))


def load_worker(config: TextConfig) -> TextWorker:
    """Load the worker for the configured model.

    Raises:
        ModelLoadError: the model's files cannot be used.
    """
    try:
        return TextWorker(read_text_files(Path(config.model_dir)), config)
    except RequestRejectedError as error:
        # The model's own tokenizer cannot encode one sample of the self-check.
        raise ModelLoadError(f"the tokenizer fails on a sample: {error.reason}") from error
