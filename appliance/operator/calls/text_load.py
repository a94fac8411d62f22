"""Load that reaches what a text worker can do: for collecting its system calls, and for enforcing its lists under it.

Texts and conversations of many lengths, ids back to text, the vocabulary, outputs that are read as they come, mistakes
of every kind, and grammars of every kind, compiled, followed along their masks and closed, more than are kept at once.
"""

from __future__ import annotations

import json
import random
import time
from array import array
from collections import Counter, deque

from appliance.operator.calls.outbox import send_due
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.engine import Drain
from isolation.ipc.grammar import Advance, CloseGrammar, GrammarKind, Masks, MaskState, OpenGrammar
from isolation.ipc.messages import Failed, Finish, TextReady
from isolation.ipc.output import CloseOutput, OutputRead, ReadOutput, Thinking
from isolation.ipc.ping import Ping
from isolation.ipc.text import Decode, Decoded, Encode, Encoded, ReadVocabulary, SourceKind, Vocabulary

MOST_OPEN = 24
"""Jobs and grammars under way."""

MOST_ADVANCES = 30
"""Tokens of an output that follows a grammar."""

MOST_BYTES = 200_000
"""Bytes of a text, at most."""

TENANTS = 3

WAIT_S = 0.02
"""Seconds of a wait for the worker; its bell ends it."""

MOST_IDS = 4_096

WORD_BITS = 32

SETTLE_S = 30.0
"""Seconds for what is under way when nothing is added any more."""

GRAMMARS = (
    (GrammarKind.REGEX, "[ab]{0,9}c"),
    (GrammarKind.REGEX, "("),
    (GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    (GrammarKind.JSON_SCHEMA_LENIENT, '{"type": "array", "items": {"type": "string"}, "maxItems": 3}'),
    (GrammarKind.JSON_SCHEMA, "{}"),
    (GrammarKind.CHOICE, '["yes", "no", "perhaps"]'),
    (GrammarKind.LARK, 'start: "a"+ "b"'),
    (GrammarKind.LARK, "start: nothing"),
    (GrammarKind.REGEX, "((a{0,999}b{0,999}){0,999}c){0,999}"),
)
"""Kinds and sources; some are wrong, and the last takes more than a grammar may."""


class TextLoad:
    """Jobs of one text worker, and what became of them.

    Args:
        ready: what the worker says of its model.
        seed: of everything that is drawn.
    """

    def __init__(self, ready: TextReady, seed: int = 0) -> None:
        self.ended: Counter[str] = Counter()
        """Jobs by the kind of their answer."""
        self.tokens = 0
        self.drained = False
        """Whether all of it has been answered and the program was told to end."""
        self._ready = ready
        self._random = random.Random(seed)  # noqa: S311 - a load, not a secret
        self._next = 1
        self._open: set[int] = set()
        self._grammars: dict[int, int] = {}
        """Tokens so far of each output that follows a grammar."""
        self._outbox: deque[Message] = deque()
        """What the ring has no room for yet; as much as the live requests give rise to."""

    def play(self, channel: Channel, seconds: float) -> None:
        """Put load on for so long, then let all of it end and drain the worker.

        Raises:
            TimeoutError: requests do not end.
            PeerGoneError: the worker has ended.
            ProtocolError: it broke the protocol.
        """
        until = time.monotonic() + seconds
        last = until + SETTLE_S
        while (now := time.monotonic()) < until or self._open or self._grammars or self._outbox:
            for message in channel.receive():
                self._take(message)
            if now < until and len(self._open) + len(self._grammars) < MOST_OPEN:
                self._submit()
            else:
                channel.wait(WAIT_S)
            send_due(self._outbox, channel)
            if now > last:
                raise TimeoutError(f"requests did not end within {SETTLE_S:g} s")
        self._outbox.append(Drain())
        while not send_due(self._outbox, channel):
            channel.receive()
            channel.wait(WAIT_S)
        self.drained = True

    def _submit(self) -> None:
        rand, number = self._random, self._next
        self._next += 1
        kind = rand.randrange(8)
        if kind == 0:
            self._outbox.append(Ping(number))
        elif kind == 1 and self._ready.exact_vocabulary:
            self._open_grammar(number)
        else:
            self._open.add(number)
            self._outbox.append(self._job(number, kind))

    def _job(self, number: int, kind: int) -> Encode | Decode | ReadVocabulary | ReadOutput:
        rand = self._random
        ids = array("I", (rand.randrange(self._ready.vocab_size) for _ in range(rand.randint(1, MOST_IDS))))
        if kind <= 2:
            return Decode(number, ids)
        if kind == 3:
            return ReadVocabulary(number, rand.choice((0, self._ready.vocab_size // 2, self._ready.vocab_size + 1)))
        if kind == 4:
            ending = rand.choice((Finish.STOP, Finish.LENGTH))
            return ReadOutput(number, 0, Thinking.NONE, ending, ids, b"", begins=True)
        if kind == 5:
            return Encode(number, rand.choice((SourceKind.TEXT, SourceKind.BARE)), self._text(), 1 << 20)
        return Encode(number, SourceKind.CHAT, self._conversation(), rand.choice((8, 1 << 20)))

    def _text(self) -> bytes:
        count = round(MOST_BYTES ** self._random.random())
        letters = "abc ,.\n0123456789äöß漢字🙂\t\x00<|im_end|>"
        return "".join(self._random.choices(letters, k=count)).encode()[:MOST_BYTES].decode(errors="ignore").encode()

    def _conversation(self) -> bytes:
        rand = self._random
        if rand.random() < 0.1:
            return rand.choice((b"", b"{", b'{"messages": 1}', b'{"messages": [{"role": "nobody"}]}', b"[]"))
        turns = [
            {"role": role, "content": self._text().decode()} for role in ("user", "assistant") * rand.randint(1, 3)
        ]
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        return json.dumps(
            {"messages": [*turns, turns[0]], **({"tools": [tool]} if rand.random() < 0.2 else {})}
        ).encode()

    def _open_grammar(self, number: int) -> None:
        rand = self._random
        kind, source = rand.choice(GRAMMARS)
        if rand.random() < 0.5 and kind is GrammarKind.REGEX:
            source += f"x{{{number}}}"  # One that is not compiled yet: kept ones have to leave.
        tenant = bytes([rand.randrange(TENANTS)]) * 16
        self._grammars[number] = 0
        self._outbox.append(OpenGrammar(number, tenant, kind, source.encode(), keep=rand.random() < 0.7))

    def _take(self, message: Message) -> None:
        if isinstance(message, Masks):
            self._advance(message)
        elif isinstance(message, Failed):
            self._open.discard(message.request)
            self._grammars.pop(message.request, None)
            self.ended[message.code.name.lower()] += 1
        elif isinstance(message, Encoded | Decoded | Vocabulary | OutputRead):
            self._open.discard(message.request)
            self.ended[type(message).__name__.lower()] += 1
            if isinstance(message, OutputRead):
                self._outbox.append(CloseOutput(message.request))
            if isinstance(message, Encoded):
                self.tokens += len(message.token_ids)

    def _advance(self, masks: Masks) -> None:
        """Follow each grammar by one of the ids that its mask allows, or close it."""
        for place, request in enumerate(masks.requests):
            if request not in self._grammars:
                continue
            row = array("I", masks.words[place * masks.width : (place + 1) * masks.width])
            word = next((index for index, value in enumerate(row) if value), None)
            self._grammars[request] += 1
            over = masks.states[place] == MaskState.BROKEN or self._grammars[request] > MOST_ADVANCES
            if over or word is None:
                del self._grammars[request]
                self.ended["grammar"] += 1
                self._outbox.append(CloseGrammar(request))
            else:
                bit = (row[word] & -row[word]).bit_length() - 1
                self._outbox.append(Advance(array("Q", [request]), array("I", [word * WORD_BITS + bit])))
