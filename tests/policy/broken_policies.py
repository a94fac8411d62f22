"""Policies with one mistake each, made from valid ones by a seeded mutator that knows the line of the mistake."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

TENANTS = 12


@dataclass(frozen=True, slots=True)
class Broken:
    """A policy text with one mistake."""

    kind: str
    text: str
    line: int
    """Line of the mistake, counted from 1."""


def valid_policy(drawn: random.Random) -> list[str]:
    """Return the lines of a valid policy: tenants in both styles of YAML, in a drawn order."""
    lines = ["# Drawn by a test.", "version: 1", "tenants:"]
    for number in drawn.sample(range(100), TENANTS):
        name, weight = f"t{number:02}", drawn.randint(1, 1_000)
        if drawn.random() < 0.5:
            lines.append(f'  {name}: {{credentials: ["key:{name}"], models: ["m"], weight: {weight}}}')
        else:
            lines += [f"  {name}:", f'    credentials: ["key:{name}", "spiffe://example.org/{name}"]']
            lines += ['    models: ["m", "n-*"]   # two', f"    weight: {weight}", "    limits: {concurrency: 3}"]
            lines += ["    namespace: user", "    regions: [eu-central, us-east]   # by athanor.yaml"]
            lines += ["    model_regions: [{models: [m], regions: [us-east]}]"]
            lines += ["    end_users: {requests_per_minute: 9}", "    hours: [mon 08:00-18:00]"]
            lines[-6] = "    limits: {concurrency: 3, kv_tokens: {at_once: 9000, exceeded: queue}}"
    return lines


def _put(pattern: str, replacement: str) -> Callable[[list[str], int, random.Random], bool]:
    """Return a mutation that replaces the first match in a line; it says whether there was one."""

    def mutate(lines: list[str], at: int, _drawn: random.Random) -> bool:
        lines[at], count = re.subn(pattern, replacement, lines[at], count=1)
        return count == 1

    return mutate


def _twice(lines: list[str], at: int, _drawn: random.Random) -> bool:
    """Repeat a tenant's first line, and with it the tenant's key."""
    if not re.match(r"  t\d\d: \{", lines[at]):
        return False
    lines.insert(at, lines[at])
    return True


def _deep(lines: list[str], at: int, _drawn: random.Random) -> bool:
    lines[at], count = re.subn(r'\["m"', "[" * 17 + '"m"', lines[at], count=1)
    return count == 1


MUTATIONS: dict[str, Callable[[list[str], int, random.Random], bool]] = {
    "a misspelt key": _put(r"weight", "wieght"),
    "a number as text": _put(r"weight: (\d+)", r"weight: '\1'"),
    "a number out of bounds": _put(r"weight: \d+", "weight: 1001"),
    "a fraction": _put(r"concurrency: 3", "concurrency: 3.5"),
    "text in place of a list": _put(r'models: \["m".*?\]', "models: m"),
    "an empty list": _put(r"credentials: \[.*?\]", "credentials: []"),
    "a credential of no kind": _put(r"key:t", "t"),
    "a dot segment in a SPIFFE ID": _put(r"example.org/", "example.org/../"),
    "a tenant in capitals": _put(r"^  t(\d\d):", r"  T\1:"),
    "a tenant twice": _twice,
    "an anchor": _put(r'\["m"', '&models ["m"'),
    "an alias": _put(r"weight: \d+", "weight: *seven"),
    "a tag": _put(r"weight: ", "weight: !!int "),
    "a merge key": _put(r"weight: \d+", "<<: {}"),
    "a number as a key": _put(r"^  t\d\d:", "  7:"),
    "a key that is a list": _put(r"^  t\d\d:", "  ? [a]\n  :"),
    "a tab before a value": _put(r"^    weight: ", "    weight:\t"),
    "a control character": _put(r"weight", "wei\x07ght"),
    "a bracket too many": _put(r'\["m"(.*?)\]', r'["m"\1]]'),
    "a quote in the middle": _put(r'"key:(t\d\d)"', r'"key:"\1"'),
    "a reserved character": _put(r"weight: \d+", "weight: @7"),
    "an unknown escape": _put(r'"key:t', r'"key:\\qt'),
    "half a character": _put(r'"key:t', r'"key:\\ud800t'),
    "a key beside a value": _put(r"weight: (\d+)$", r"weight: \1: 2"),
    "an unknown namespace": _put(r"namespace: user", "namespace: users"),
    "a region in capitals": _put(r"eu-central", "EU-Central"),
    "a region that is a number": _put(r"us-east", "7"),
    "no tokens of KV": _put(r"at_once: 9000", "at_once: 0"),
    "an unknown treatment": _put(r"exceeded: queue", "exceeded: wait"),
    "a misspelt limit": _put(r"kv_tokens", "kv_token"),
    "a limit of end users as text": _put(r"requests_per_minute: 9", "requests_per_minute: nine"),
    "hours that are none": _put(r"08:00-18:00", "08:00-25:00"),
    "nesting": _deep,
    "a second document": _put(r"^  t\d\d:", "---\n  t00:"),
}
"""Mutations by name. Each changes one line where it applies, and says whether it did."""


def broken_policies(count: int, seed: int) -> Iterator[Broken]:
    """Yield policies with one mistake each, all mutations in turn."""
    kinds = list(MUTATIONS)
    for number in range(count):
        drawn = random.Random(seed * 1_000_000 + number)
        kind = kinds[number % len(kinds)]
        lines = valid_policy(drawn)
        order = drawn.sample(range(3, len(lines)), len(lines) - 3)
        at = next(at for at in order if MUTATIONS[kind](lines, at, drawn))
        line = at + 2 if kind == "a tenant twice" else at + 1
        yield Broken(kind, "\n".join(lines) + "\n", line)
