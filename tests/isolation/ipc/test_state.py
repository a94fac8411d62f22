"""The order of messages, exhaustively: every state, role, sender and message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isolation.ipc import grammar as g
from isolation.ipc import kv as k
from isolation.ipc import messages as m
from isolation.ipc import output as o
from isolation.ipc import ping as pi
from isolation.ipc import public as pu
from isolation.ipc import spill as sp
from isolation.ipc.embed import Embed, Embedding
from isolation.ipc.engine import Abort, Drain, StepOutput, Submit
from isolation.ipc.errors import LocalProtocolError, RemoteProtocolError
from isolation.ipc.prefetch import Prefetch
from isolation.ipc.state import Conversation, Side, State
from isolation.ipc.text import Decode, Decoded, Encode, Encoded, ReadVocabulary, Vocabulary
from tests.isolation.ipc.strategies import SAMPLES

BY_TYPE = {type(sample): sample for sample in SAMPLES}

ALLOWED = {
    (m.Role.ENGINE, State.GREETING, Side.GUEST): {m.Hello: State.CONFIGURING},
    (m.Role.ENGINE, State.CONFIGURING, Side.HOST): {m.Configure: State.LOADING},
    (m.Role.ENGINE, State.LOADING, Side.GUEST): {m.EngineReady: State.READY},
    (m.Role.ENGINE, State.READY, Side.HOST): {
        Submit: State.READY,
        Embed: State.READY,
        Prefetch: State.READY,
        Abort: State.READY,
        g.Masks: State.READY,
        k.KvQuotas: State.READY,
        pu.PublicPrefixes: State.READY,
        pi.Ping: State.READY,
        Drain: State.DRAINING,
    },
    (m.Role.ENGINE, State.READY, Side.GUEST): {
        StepOutput: State.READY,
        Embedding: State.READY,
        k.KvUsage: State.READY,
        pu.PublicUsage: State.READY,
        pi.Pong: State.READY,
    },
    (m.Role.ENGINE, State.DRAINING, Side.HOST): {
        Abort: State.DRAINING,
        g.Masks: State.DRAINING,
        k.KvQuotas: State.DRAINING,
        pu.PublicPrefixes: State.DRAINING,
        pi.Ping: State.DRAINING,
        Drain: State.DRAINING,
    },
    (m.Role.ENGINE, State.DRAINING, Side.GUEST): {
        StepOutput: State.DRAINING,
        Embedding: State.DRAINING,
        k.KvUsage: State.DRAINING,
        pu.PublicUsage: State.DRAINING,
        pi.Pong: State.DRAINING,
    },
    (m.Role.TEXT, State.GREETING, Side.GUEST): {m.Hello: State.CONFIGURING},
    (m.Role.TEXT, State.CONFIGURING, Side.HOST): {m.Configure: State.LOADING},
    (m.Role.TEXT, State.LOADING, Side.GUEST): {m.TextReady: State.READY},
    (m.Role.TEXT, State.READY, Side.HOST): {
        Encode: State.READY,
        Decode: State.READY,
        ReadVocabulary: State.READY,
        o.ReadOutput: State.READY,
        o.CloseOutput: State.READY,
        g.OpenGrammar: State.READY,
        g.Advance: State.READY,
        g.CloseGrammar: State.READY,
        pi.Ping: State.READY,
        Drain: State.DRAINING,
    },
    (m.Role.TEXT, State.READY, Side.GUEST): {
        Encoded: State.READY,
        Decoded: State.READY,
        Vocabulary: State.READY,
        o.OutputRead: State.READY,
        m.Failed: State.READY,
        g.Masks: State.READY,
        pi.Pong: State.READY,
    },
    (m.Role.TEXT, State.DRAINING, Side.HOST): {pi.Ping: State.DRAINING, Drain: State.DRAINING},
    (m.Role.TEXT, State.DRAINING, Side.GUEST): {
        Encoded: State.DRAINING,
        Decoded: State.DRAINING,
        Vocabulary: State.DRAINING,
        o.OutputRead: State.DRAINING,
        m.Failed: State.DRAINING,
        g.Masks: State.DRAINING,
        pi.Pong: State.DRAINING,
    },
    (m.Role.SPILL, State.GREETING, Side.GUEST): {m.Hello: State.READY},
    (m.Role.SPILL, State.READY, Side.GUEST): dict.fromkeys((sp.Keep, sp.Withdraw, sp.Fetch, sp.Unwanted), State.READY),
    (m.Role.SPILL, State.READY, Side.HOST): dict.fromkeys((sp.Fetched, sp.Forget, sp.Share, sp.Lost), State.READY),
}
"""Written out a second time, so that a change of the table is a change of this test."""


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("role", m.Role)
@pytest.mark.parametrize("sender", Side)
def test_every_entry(state, role, sender):
    """What is allowed leads where it should; all else is the sender's fault, seen by both. One test for all kinds of
    messages: as tests of their own they would be a twelfth of the suite's, and cost more than they do."""
    for kind in BY_TYPE:
        check_entry(state, role, sender, kind)


def check_entry(state, role, sender, kind):
    """Send one message in one state: where it leads, or that both sides refuse it and stay where they were."""
    message = BY_TYPE[kind]
    if kind is m.Hello:
        message = replace(message, role=role)
    after = ALLOWED.get((role, state, sender), {}).get(kind)
    ours = Conversation(role, sender, state)
    theirs = Conversation(role, sender.peer, state)
    if after is None:
        assert refusal(ours.sending, message) is LocalProtocolError, kind
        assert refusal(theirs.received, message) is RemoteProtocolError, kind
        assert ours.state is theirs.state is state, kind
    else:
        assert ours.sending(message) is after, kind
        assert ours.state is state, "sending alone moves nothing: the ring may be full"
        ours.enter(after)
        theirs.received(message)
        assert ours.state is theirs.state is after, kind


def refusal(take, message):
    """The class of the error with which a message is refused; None where it is taken."""
    try:
        take(message)
    except (LocalProtocolError, RemoteProtocolError) as error:
        return type(error)
    return None


@pytest.mark.parametrize(
    "hello", [m.Hello(m.PROTOCOL_VERSION, m.Role.TEXT), m.Hello(m.PROTOCOL_VERSION + 1, m.Role.ENGINE)]
)
def test_a_hello_of_another_role_or_version_is_refused(hello):
    """The guest must be what the host booted."""
    with pytest.raises(RemoteProtocolError):
        Conversation(m.Role.ENGINE, Side.HOST).received(hello)
    with pytest.raises(LocalProtocolError):
        Conversation(m.Role.ENGINE, Side.GUEST).sending(hello)
