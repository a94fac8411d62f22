"""Names of the metrics of prompts that one host computes and another continues (docs/fleet.md)."""

from __future__ import annotations

SPLIT_ASKED, SPLIT_WAITED = "athanor.split.asked", "athanor.split.waited"
SPLIT_TAKEN, SPLIT_TOKENS = "athanor.split.taken", "athanor.split.taken_tokens"
SPLIT_RECOMPUTED = "athanor.split.recomputed_blocks"
SPLIT_IGNORED, SPLIT_SERVED = "athanor.split.ignored_choices", "athanor.split.served"

_OUTCOME = frozenset({"outcome"})
_ENDS = (
    "computed, busy (no host has room for the tenant, or all rest), empty (one with room rests for the tenant: nothing "
    "came of what it computed), away, silent (no word in time), refused, stranger (another's certificate), broken (no "
    "answer), late, left (the client has gone), no_keys (of the fleet)"
)

SPLIT_COUNTERS: dict[str, tuple[str, str, frozenset[str]]] = {
    SPLIT_ASKED: ("{prompt}", f"Prompts to be computed by another host, by outcome: {_ENDS}.", _OUTCOME),
    SPLIT_WAITED: ("s", "Time for which requests waited for other hosts, by the outcome.", _OUTCOME),
    SPLIT_TAKEN: (
        "{prompt}",
        "Prompts computed by another host, by what the local engine had of them from the store: taken, nothing.",
        _OUTCOME,
    ),
    SPLIT_TOKENS: ("{token}", "Tokens of these whose KV came from the store.", frozenset()),
    SPLIT_RECOMPUTED: (
        "{block}",
        "Whole KV blocks of prompts computed by another host that the local engine computed again: where all came, one "
        "of each prompt that ends with a block, else none.",
        frozenset(),
    ),
    SPLIT_IGNORED: ("{request}", "Requests for which the router named a host that is not configured.", frozenset()),
    SPLIT_SERVED: (
        "{prompt}",
        "Prompts that other hosts sent here, by outcome: computed, stranger (not on the list), refused (by policy, "
        "files or form), busy, failed, left (the caller has gone).",
        _OUTCOME,
    ),
}
"""Unit, description and labels of each counter."""
