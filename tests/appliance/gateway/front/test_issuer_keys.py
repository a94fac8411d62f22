"""Keys of issuers: followed in a file, fetched over https; bad addresses, and what strangers can make of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from appliance.common.token_config import TokenIssuerConfig
from appliance.gateway.front import http_get, issuer_keys
from appliance.gateway.front.issuer_keys import FetchError, IssuerKeys, fetch
from tests.appliance.gateway.front.issuers import AUDIENCE, ISSUER, Address, Provider, published
from tests.appliance.gateway.front.pki import Authority, Pki


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are short."""
    monkeypatch.setattr(issuer_keys, "LOOK_S", 0.02)
    monkeypatch.setattr(issuer_keys, "UNKNOWN_S", 0.3)


@pytest.fixture
def provider() -> Provider:
    """One key."""
    found = Provider()
    found.add("k1")
    return found


def config(**where: object) -> TokenIssuerConfig:
    """An issuer with its keys there."""
    return TokenIssuerConfig(name="corp", issuer=ISSUER, audiences=(AUDIENCE,), **where)


@contextlib.asynccontextmanager
async def running(keys: IssuerKeys) -> AsyncIterator[IssuerKeys]:
    """Its keys are kept fresh meanwhile."""
    task = asyncio.create_task(keys.run())
    try:
        yield keys
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(check: object, what: str) -> None:
    """Wait for a condition."""
    assert callable(check)
    for _ in range(500):
        if check():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(what)


async def test_a_file_of_keys_is_followed(hurried: None, tmp_path: Path, provider: Provider) -> None:
    """A changed file is in force soon; one that is broken, empty, huge or gone leaves the keys as they are, with the
    problem for the operator."""
    path = tmp_path / "keys.json"
    path.write_bytes(provider.published())
    async with running(IssuerKeys(config(keys_file=path))) as keys:
        await until(lambda: sorted(keys.keys) == ["k1"], "the first keys")
        provider.add("k2", "EdDSA")
        path.write_bytes(provider.published())
        await until(lambda: sorted(keys.keys) == ["k1", "k2"], "the next keys")
        for broken in (b"{", b"", b'{"keys": []}', b'{"keys": [{"kid": 1}]}', b" " * (issuer_keys.MAX_BYTES + 1), None):
            keys.problem = ""
            if broken is None:
                path.unlink()
            else:
                path.write_bytes(broken)
            await until(lambda: keys.problem, f"a problem with {broken and broken[:9]!r}")
            assert sorted(keys.keys) == ["k1", "k2"]
        path.write_bytes(provider.published())
        await until(lambda: not keys.problem, "the whole file")


async def test_an_address_is_fetched(hurried: None, tmp_path: Path, provider: Provider) -> None:
    """Over https with the named authority; by the machine's own, which do not know it, nothing is taken."""
    pki = Pki.create(tmp_path)
    async with published(pki) as address:
        address.publish(provider.published())
        url, authority = address.url, pki.files.client_ca
        async with running(IssuerKeys(config(keys_url=url, keys_ca=authority))) as keys:
            await until(lambda: sorted(keys.keys) == ["k1"], "the keys")
            assert keys.find("k1") is keys.find(None) is not None
        assert address.fetched == 1
        with pytest.raises(FetchError, match="certificate verify failed"):
            await fetch(url, None)
        stranger = tmp_path / "stranger.pem"
        stranger.write_bytes(Authority.create("another").pem)
        with pytest.raises(FetchError, match="certificate verify failed"):
            await fetch(url, stranger)


async def spoil(address: Address, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the address misbehave."""
    body = b'{"keys": []}'
    match how:
        case "garbage":
            address.answer = b"\x00\xff not HTTP at all \r\n\r\n"
        case "html":
            address.publish(b"<html>sign in</html>")
        case "error":
            address.publish(body, "500 Internal Server Error")
        case "redirect":
            address.answer = b"HTTP/1.1 302 Found\r\nlocation: https://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
        case "empty set":
            address.publish(body)
        case "cut":
            address.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{"
        case "huge":
            address.publish(b" " * (issuer_keys.MAX_BYTES + 1))
        case "huge head":
            address.answer = b"HTTP/1.1 200 OK\r\nx: " + b"a" * (2 * http_get.MAX_HEAD_BYTES)
        case "endless":
            address.answer = b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (issuer_keys.MAX_BYTES + 99)
        case "slow":
            monkeypatch.setattr(issuer_keys, "FETCH_S", 0.2)
            address.publish(b" " * 99)
            address.pause_s = 0.05


BAD = ("garbage", "html", "error", "redirect", "empty set", "cut", "huge", "huge head", "endless", "slow")


@pytest.mark.parametrize("how", BAD)
async def test_a_bad_answer_leaves_the_keys_in_force(
    hurried: None, tmp_path: Path, provider: Provider, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the address says, or does not, the keys fetched before stay, the operator learns the problem, and the
    next good answer is taken."""
    pki = Pki.create(tmp_path)
    async with published(pki) as address:
        address.publish(provider.published())
        async with running(IssuerKeys(config(keys_url=address.url, keys_ca=pki.files.client_ca))) as keys:
            await until(lambda: sorted(keys.keys) == ["k1"], "the keys")
            await spoil(address, how, monkeypatch)
            assert keys.find("unknown") is None
            await until(lambda: keys.problem, "the problem")
            assert sorted(keys.keys) == ["k1"] and keys.find("k1") is not None
            provider.add("k2")
            address.pause_s = 0.0
            monkeypatch.setattr(issuer_keys, "FETCH_S", 10.0)
            address.publish(provider.published())
            await until(lambda: sorted(keys.keys) == ["k1", "k2"], "the next keys")
            assert keys.problem == ""


async def test_strangers_cannot_make_it_fetch_at_will(hurried: None, tmp_path: Path, provider: Provider) -> None:
    """Thousands of tokens with unknown keys make one fetch in each period, and the keys stay. A new key of the issuer's
    (control) is known after the first of them."""
    pki = Pki.create(tmp_path)
    async with published(pki) as address:
        address.publish(provider.published())
        async with running(IssuerKeys(config(keys_url=address.url, keys_ca=pki.files.client_ca))) as keys:
            await until(lambda: sorted(keys.keys) == ["k1"], "the keys")
            loop = asyncio.get_running_loop()
            began = loop.time()
            while loop.time() < began + 1.0:
                for number in range(100):
                    assert keys.find(f"stranger-{number}") is None
                await asyncio.sleep(0.005)
            periods = (loop.time() - began) / issuer_keys.UNKNOWN_S
            assert 2 <= address.fetched <= 2 + periods
            provider.add("k2")
            address.publish(provider.published())
            assert keys.find("k2") is None
            await until(lambda: keys.find("k2") is not None, "the new key")


async def test_nobody_there_is_no_reason_to_try_all_the_time(hurried: None, tmp_path: Path, provider: Provider) -> None:
    """A start without the provider waits for it between attempts, and takes its keys when it comes."""
    pki = Pki.create(tmp_path)
    async with published(pki) as address:
        address.publish(b"", "503 Service Unavailable")
        async with running(IssuerKeys(config(keys_url=address.url, keys_ca=pki.files.client_ca))) as keys:
            await until(lambda: "is 503" in keys.problem, "the problem")
            assert keys.find("k1") is None and json.dumps(sorted(keys.keys)) == "[]"
            await asyncio.sleep(0.7)
            assert 2 <= address.fetched <= 5
            address.publish(provider.published())
            await until(lambda: keys.find("k1") is not None, "the keys")
