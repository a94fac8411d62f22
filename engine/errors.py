"""What can go wrong inside a sandbox, and how far it reaches.

``EngineError``
  * ``ConfigurationError``: the host's configuration cannot be used; the process ends.
  * ``ModelLoadError``: the model's files cannot be used; the process ends.
  * ``AdapterLoadError``: one adapter's files cannot be used; the engine serves without it.
  * ``LockdownError``: the process cannot be locked down; it ends before it serves anybody.
  * ``RequestRejectedError``: one request cannot be served; it fails, all others go on.
  * ``UnsupportedError``: a backend does not compute this model or runs on another machine; another backend may.
  * ``AdapterError``: a step has an adapter and its backend computes none; the process ends, since the core refuses such
    requests before.
  * ``RankError``: ranks are out of step, or (``RankGoneError``) another has ended; the process ends.
  * ``ForeignBlockError``: a step names a KV block that is not its row's; the runner runs it without that row.

Anything else that is raised ends the process: the supervisor boots a fresh sandbox.
"""

from __future__ import annotations

from isolation.ipc.messages import FailureCode


class EngineError(Exception):
    """Base of all errors of the engine package."""


class ConfigurationError(EngineError):
    """The configuration is malformed or asks for something that this build cannot do."""


class ModelLoadError(EngineError):
    """The model's files are malformed, incomplete or of an unsupported kind; the message names the file or tensor."""


class AdapterLoadError(EngineError):
    """An adapter's files are malformed, of an unsupported kind, or do not fit the model; the message names the key or
    tensor."""


class LockdownError(EngineError):
    """The kernel does not take the list of allowed system calls."""


class UnsupportedError(EngineError):
    """A backend does not compute this model on this machine; the message says why, and another backend may."""


class AdapterError(EngineError):
    """A step has a row with an adapter, and the backend computes none."""

    def __init__(self, adapter: int) -> None:
        super().__init__(
            f"a request has adapter {adapter} and this backend computes no adapters: its answer would be the base "
            "model's; refuse such requests where Capabilities.adapters is false"
        )
        self.adapter = adapter


class RankError(EngineError):
    """The ranks of this engine do not do the same step."""


class RankGoneError(RankError):
    """Another rank of this engine has ended; what is wrong is said there."""


class ForeignBlockError(EngineError):
    """A block table of a step names a block that is not its row's. Nothing was read or written."""


class RequestRejectedError(EngineError):
    """This one request cannot be served."""

    def __init__(self, code: FailureCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
