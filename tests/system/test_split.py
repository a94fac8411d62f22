"""A prefill host and a decode host of one fleet, with a real store: one computes a prompt, the other answers."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from appliance.operator.demo import choose_ports
from tests.appliance.gateway.front.pki import Authority
from tests.appliance.supervisor.fleet_keys.fleets import config, sign
from tests.stores import store
from tests.system.conftest import PLAIN, as_demos
from tests.system.spilling import BLOCK_BYTES, Spilling, served
from tests.system.test_fleet_kv import POLICY, held, wait_until
from tests.system.test_kv_store import counted

pytestmark = [pytest.mark.runsc, pytest.mark.full, pytest.mark.timeout(300)]

PREFILL, DECODE = "host-a", "host-b"


TERMS = POLICY.replace('credentials: ["key:b"],', 'credentials: ["key:b"], deterministic: allowed,')
"""Both hosts' policy: beta may ask for deterministic answers."""


def text(number: int) -> str:
    """A prompt of about 700 tokens, different from its first on."""
    return f"{number} " + " ".join(f"word{number * 37 + place}" for place in range(170))


@dataclass
class Pair:
    """Both hosts."""

    prefill: Spilling
    decode: Spilling

    def outcomes(self) -> dict[str, float]:
        """How often the decode host had each outcome."""
        page = httpx.get(f"{self.decode.admin}/metrics", verify=PLAIN, timeout=20).text
        rows = re.findall(
            r'^athanor_split_asked_total\{[^}]*outcome="([a-z_]+)"[^}]*\} ([0-9.e+]+)$', page, re.MULTILINE
        )
        return {name: float(value) for name, value in rows}


def tls(folder: Path, authority: Authority, host: str) -> dict[str, str]:
    """Certificate, key and authority of a host, as files."""
    key, chain = authority.issue(x509.UniformResourceIdentifier(f"spiffe://edge.example/{host}"))
    found = {"certificate": folder / f"{host}.pem", "key": folder / f"{host}.tls-key", "ca": folder / "ca.pem"}
    for path, data in zip(found.values(), (chain, key, authority.pem), strict=True):
        path.write_bytes(data)
    return {name: str(path) for name, path in found.items()}


def sections(folder: Path) -> dict[str, dict[str, Any]]:
    """Section ``split`` of each host."""
    authority, address = Authority.create("fleet"), f"127.0.0.1:{choose_ports((0,))[0]}"
    identity = "spiffe://edge.example/"
    asked = {"host": PREFILL, "address": address, "identity": f"{identity}{PREFILL}"}
    return {
        PREFILL: {
            "role": "prefill",
            "listen": address,
            "tls": tls(folder, authority, PREFILL),
            "decode_hosts": [f"{identity}{DECODE}"],
        },
        DECODE: {"role": "decode", "tls": tls(folder, authority, DECODE), "prefill_hosts": [asked]},
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Pair]:
    """Two appliances with the fleet's keys, whose engines compute in one form and write what they compute."""
    folder = tmp_path_factory.mktemp("split")
    sign(folder, (PREFILL, DECODE))
    split = sections(folder)
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, ExitStack() as stack:
        running = stack.enter_context(store(Path(name)))
        hosts = list[Spilling]()
        for host in (PREFILL, DECODE):
            (folder / host).mkdir()
            members = config(folder, host).model_dump(mode="json") | {"write": "when_computed"}
            section = {"store": running.address, "size": 64 << 20, "ttl": 600, "members": members}
            sandbox = {**as_demos(), "form_cache": str(folder / "forms"), "spill": {"memory": 10 * BLOCK_BYTES}}
            more = {"kv_store": section, "sandbox": sandbox, "audit": {"directory": "audit"}, "split": split[host]}
            hosts.append(stack.enter_context(served(folder / host, TERMS, {}, **more)))
        for one in hosts:
            wait_until(lambda one=one: held(one, "athanor_fleet_keys_held") == 1)
        time.sleep(2)  # Tenants' keys come with the fleet's; engines are told of both.
        yield Pair(*hosts)


def value(host: Spilling, name: str) -> float:
    """The sum of a counter of a host."""
    page = httpx.get(f"{host.admin}/metrics", verify=PLAIN, timeout=20).text
    return sum(float(one) for one in re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", page, re.MULTILINE))


def completed(host: Spilling, prompt: str, **fields: object) -> dict[str, Any]:
    """Tenant beta's answer to a prompt."""
    body = {"model": "athanor-mini", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"authorization": f"Bearer {host.keys['b']}"}
    answer = httpx.post(host.http + "/v1/completions", json=body, headers=headers, timeout=60, verify=PLAIN)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def requests_of(host: Spilling) -> list[dict[str, Any]]:
    """Charged requests in a host's audit log."""
    lines = [line for path in sorted((host.state / "audit").rglob("*")) if path.is_file() for line in _lines(path)]
    return [line for line in lines if line.get("kind") == "request"]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        if line.startswith(b'{"n":'):
            yield json.loads(line)


def test_one_host_computes_and_the_other_answers(pair: Pair) -> None:
    """The decode host answers a long prompt with KV that it did not compute: the prefill host computed it, evicted
    nothing, and gave it to the store. The tokens are those of local computing, by a tenant that does not share. One
    host alone charges the request, and its client sees the cached tokens that the local engine took. Control: a short
    prompt, and the tenant that does not share, ask nobody."""
    number, answer, cached = computed_elsewhere(pair)
    before = pair.outcomes()
    assert cached >= 256
    wait_until(lambda: counted(pair.decode, "fleet_restored") >= cached // 16)
    assert pair.decode.ask("s", text(number)) == (answer, 0)
    pair.decode.ask("a", "short")
    wait_until(lambda: len(requests_of(pair.decode)) == number + 2)
    assert requests_of(pair.prefill) == []
    again, _ = pair.decode.ask("a", text(number))
    assert (again, pair.outcomes()) == (answer, before)


def computed_elsewhere(pair: Pair) -> tuple[int, str, int]:
    """The first of some prompts of which the decode host took KV that the prefill host computed, with its answer and
    cached tokens: on a busy machine a host may be silent for 250 ms, and is then not asked for two seconds, or be slow
    to write. Until then each is computed here."""
    for number in range(1, 12):
        answer, cached = pair.decode.ask("a", text(number))
        if cached:
            assert pair.outcomes()["computed"] >= 1
            return number, answer, cached
        time.sleep(2.1)
    raise AssertionError((pair.outcomes(), counted(pair.prefill, "fleet_stored"), counted(pair.decode, "fleet_absent")))


def test_at_most_one_block_is_computed_again(pair: Pair) -> None:
    """Of a prompt that the prefill host computed, with a store that is well, the decode host computes the end of the
    last block alone: the counter says so, and the usage that the client is told. Control: the tenant that does not
    share has all blocks computed here."""
    for number in range(60, 72):
        before = value(pair.decode, "athanor_split_recomputed_blocks_total"), pair.outcomes().get("computed", 0)
        usage = completed(pair.decode, text(number), max_tokens=2)["usage"]
        after = value(pair.decode, "athanor_split_recomputed_blocks_total"), pair.outcomes().get("computed", 0)
        again = usage["prompt_tokens"] // 16 - usage["prompt_tokens_details"]["cached_tokens"] // 16
        if after[1] > before[1]:
            assert after[0] - before[0] == again
            if again <= 1:
                break
        time.sleep(2.1)  # The host may rest.
    else:
        raise AssertionError(pair.outcomes())
    assert pair.decode.ask("s", text(90))[1] == 0


def test_deterministic_answers_are_the_same_bits_split_or_not(pair: Pair) -> None:
    """A deterministic request is computed whole where it came, on the decode host as on the other, with the same tokens
    and the same bits of their log-probabilities; no host is asked. Control: the same prompt without that word is
    computed elsewhere, and greedy decoding gives the same text."""
    time.sleep(2.1)  # The host may rest.
    before = pair.outcomes()
    one, two = (completed(host, text(80), deterministic=True, logprobs=5) for host in (pair.decode, pair.prefill))
    assert one["choices"] == two["choices"] and len(one["choices"][0]["logprobs"]["token_logprobs"]) == 12
    assert pair.outcomes() == before
    plain = completed(pair.decode, text(80))
    assert plain["choices"][0]["text"] == one["choices"][0]["text"]
    assert pair.outcomes() != before


def gateway_of(host: Spilling) -> int:
    """Process of a host's gateway: that with the host's folder in its command."""
    here = str(host.state)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if "appliance.operator.child" in words and "gateway" in words and any(here in one for one in words):
                    return int(entry.name)
    raise AssertionError("there is no gateway")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing for the time of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_silent_prefill_host_is_not_waited_for(pair: Pair) -> None:
    """With the prefill host's gateway stopped, a long prompt is answered from here within two seconds beyond what it
    takes, and the outcome says why."""
    time.sleep(2.1)  # The host may rest.
    before = pair.outcomes().get("silent", 0)
    with stopped(gateway_of(pair.prefill)):
        began = time.monotonic()
        _, cached = pair.decode.ask("a", text(30))
        assert (cached, time.monotonic() - began < 10) == (0, True)
    assert pair.outcomes()["silent"] == before + 1


def test_a_killed_prefill_host_costs_no_answer(pair: Pair) -> None:
    """The prefill host's gateway is killed while eight prompts are on their way: each is answered with 200."""
    time.sleep(2.1)  # The host rests after its silence.
    answers: list[tuple[str, int]] = []
    threads = [
        threading.Thread(target=lambda number=number: answers.append(pair.decode.ask("a", text(number))))
        for number in range(40, 48)
    ]
    for number, thread in enumerate(threads):
        thread.start()
        if number == 4:
            os.kill(gateway_of(pair.prefill), signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert len(answers) == 8
