"""What a shadow policy would have decided, as values."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ShadowRow:
    """Requests of one tenant about which a shadow policy differs from the one in force, for one reason."""

    tenant: str
    verdict: str
    """``refuses``, ``serves``, ``waits`` or ``other_model``: what the shadow policy would do."""
    rule: str
    """Rule of the shadow policy that does; empty where it would serve."""
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowStatus:
    """What a shadow policy would have decided."""

    file: str
    """Path at which a shadow policy is looked for."""
    digest: str = ""
    """SHA-256 of its content in hex; empty where there is none."""
    since: float = 0.0
    """When it was taken."""
    problems: tuple[str, ...] = ()
    """Why the file that is there is not taken, a line each."""
    verdicts: dict[str, int] = field(default_factory=dict)
    """Requests by what it would have done, those on which both agree included."""
    rows: tuple[ShadowRow, ...] = ()
    """Differences, the most frequent first; of more than a thousand kinds the rest is in ``verdicts`` alone."""
