"""Who may send what when: the order of messages as one table.

Rule 1: all that concerns order lives here. Rule 2: both peers run the same table, each with its own
copy of the state, so it names the sender's side and not "we" and "they".

``TRANSITIONS`` is that table. ``Drain`` leads to DRAINING; from BROKEN nothing leads anywhere: a peer has broken the
protocol.

The two copies differ only while a message is under way, and no state forbids what the other side
may still send then. What belongs to a request (is it live, is the answer of its kind) is the
business of the owner of the requests.
"""

from __future__ import annotations

from enum import Enum, auto
from types import MappingProxyType

from isolation.ipc.codec import Message
from isolation.ipc.embed import Embed, Embedding
from isolation.ipc.engine import Abort, Drain, StepOutput, Submit
from isolation.ipc.errors import LocalProtocolError, RemoteProtocolError
from isolation.ipc.grammar import Advance, CloseGrammar, Masks, OpenGrammar
from isolation.ipc.kv import KvQuotas, KvUsage
from isolation.ipc.messages import PROTOCOL_VERSION, Configure, EngineReady, Failed, Hello, Role, TextReady
from isolation.ipc.output import CloseOutput, OutputRead, ReadOutput
from isolation.ipc.ping import Ping, Pong
from isolation.ipc.prefetch import Prefetch
from isolation.ipc.public import PublicPrefixes, PublicUsage
from isolation.ipc.spill import Fetch, Fetched, Forget, Keep, Lost, Share, Unwanted, Withdraw
from isolation.ipc.text import Decode, Decoded, Encode, Encoded, ReadVocabulary, Vocabulary


class Side(Enum):
    """Which end of the channel."""

    HOST = "host"
    GUEST = "guest"

    @property
    def peer(self) -> Side:
        """The other end."""
        return Side.GUEST if self is Side.HOST else Side.HOST


class State(Enum):
    """How far the conversation has come; ``TRANSITIONS`` says what each state admits."""

    GREETING = auto()
    CONFIGURING = auto()
    LOADING = auto()
    READY = auto()
    DRAINING = auto()
    BROKEN = auto()


_Moves = dict[type[Message], State]


def _staying(state: State, *messages: type[Message]) -> _Moves:
    return dict.fromkeys(messages, state)


def _opening(ready: type[Message]) -> dict[tuple[State, Side], _Moves]:
    return {
        (State.GREETING, Side.GUEST): {Hello: State.CONFIGURING},
        (State.CONFIGURING, Side.HOST): {Configure: State.LOADING},
        (State.LOADING, Side.GUEST): {ready: State.READY},
    }


_ENGINE_RESULTS = (StepOutput, Embedding, KvUsage, PublicUsage, Pong)
_ENGINE_JOBS = (Submit, Embed, Prefetch)
_ENGINE_NEWS = (Abort, Masks, KvQuotas, PublicPrefixes, Ping)
_TEXT_RESULTS = (Encoded, Decoded, Vocabulary, OutputRead, Failed, Masks, Pong)
_TEXT_JOBS = (Encode, Decode, ReadVocabulary, ReadOutput, CloseOutput, OpenGrammar, Advance, CloseGrammar)

TRANSITIONS: MappingProxyType[Role, dict[tuple[State, Side], _Moves]] = MappingProxyType(
    {
        Role.ENGINE: {
            **_opening(EngineReady),
            (State.READY, Side.HOST): {**_staying(State.READY, *_ENGINE_JOBS, *_ENGINE_NEWS), Drain: State.DRAINING},
            (State.READY, Side.GUEST): _staying(State.READY, *_ENGINE_RESULTS),
            (State.DRAINING, Side.HOST): _staying(State.DRAINING, *_ENGINE_NEWS, Drain),
            (State.DRAINING, Side.GUEST): _staying(State.DRAINING, *_ENGINE_RESULTS),
        },
        Role.TEXT: {
            **_opening(TextReady),
            (State.READY, Side.HOST): {**_staying(State.READY, *_TEXT_JOBS, Ping), Drain: State.DRAINING},
            (State.READY, Side.GUEST): _staying(State.READY, *_TEXT_RESULTS),
            (State.DRAINING, Side.HOST): _staying(State.DRAINING, Ping, Drain),
            (State.DRAINING, Side.GUEST): _staying(State.DRAINING, *_TEXT_RESULTS),
        },
        Role.SPILL: {
            (State.GREETING, Side.GUEST): {Hello: State.READY},
            (State.READY, Side.HOST): _staying(State.READY, Fetched, Forget, Share, Lost),
            (State.READY, Side.GUEST): _staying(State.READY, Keep, Withdraw, Fetch, Unwanted),
        },
    }
)
"""By role, then by state and sender: the messages allowed and the state each leads to. A missing
entry is the error."""


class Conversation:
    """One side's copy of the state."""

    def __init__(self, role: Role, side: Side, state: State = State.GREETING) -> None:
        self.side = side
        self._role = role
        self.enter(state)

    @property
    def state(self) -> State:
        """Where the conversation stands."""
        return self._state

    def sending(self, message: Message) -> State:
        """The state after sending this; ``enter`` it once the message is on its way.

        Raises:
            LocalProtocolError: this side may not send it now.
        """
        after = self._ours.get(type(message))
        if after is None or (type(message) is Hello and not self._fits(message)):
            raise LocalProtocolError(self._refusal(self.side, message))
        return after

    def received(self, message: Message) -> None:
        """Follow a message of the peer.

        Raises:
            RemoteProtocolError: the peer may not send it now.
        """
        after = self._theirs.get(type(message))
        if after is None or (type(message) is Hello and not self._fits(message)):
            raise RemoteProtocolError(self._refusal(self.side.peer, message))
        if after is not self._state:
            self.enter(after)

    def enter(self, state: State) -> None:
        """Go to a state."""
        moves = TRANSITIONS[self._role]
        self._state = state
        self._ours = moves.get((state, self.side), {})
        self._theirs = moves.get((state, self.side.peer), {})

    def _fits(self, hello: Hello) -> bool:
        return hello.version == PROTOCOL_VERSION and hello.role == self._role

    def _refusal(self, sender: Side, message: Message) -> str:
        return (
            f"the {sender.value} may not send {type(message).__name__} to or from a sandbox of "
            f"role {self._role.name.lower()} in state {self._state.name.lower()}"
        )
