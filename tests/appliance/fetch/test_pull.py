"""Pulls from a real S3 server and from plain HTTP: what arrives, what is refused, what is not downloaded twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import obstore
import pytest

from appliance.common.catalog import read_model
from appliance.common.errors import (
    ConfigError,
    ModelCacheError,
    ModelDigestError,
    ModelSourceError,
    SourceUnavailableError,
)
from appliance.common.model_cache.manifest import MANIFEST
from appliance.common.model_cache.store import ModelCache
from appliance.fetch import download
from appliance.fetch.pace import Pace
from appliance.fetch.pull import Pulled, Puller, PullOrder
from tests.appliance.fetch.s3_server import SECRET, USER, S3Server, free_ports
from tests.appliance.fetch.sample import make_model

MIB = 1 << 20
SIZES = (20 * MIB + 5, 0, 9 * MIB, 100)
NO_LIMIT = 0


def pull(cache: Path, order: PullOrder, sources: Path | None = None, limit: int = NO_LIMIT, rate: int = 0) -> Pulled:
    """Pull in this process."""
    puller = Puller(ModelCache(cache), Pace(rate))
    return asyncio.run(puller.pull(order, sources, limit, frozenset(), lambda doing, done, total: None))


def visible(cache: Path) -> list[str]:
    """Names of models of the cache."""
    return sorted(path.name for path in (cache / "models").iterdir())


def test_a_model_arrives_whole_and_can_be_served(s3: S3Server, sources: Path, tmp_path: Path) -> None:
    """Every file that a sandbox gets, and no other, with the catalog's digest; the second pull is a hit."""
    digest = make_model(tmp_path / "model", SIZES)
    address = s3.upload(tmp_path / "model", "whole/some/model")
    pulled = pull(tmp_path / "cache", PullOrder(address), sources)
    assert (pulled.digest, pulled.hit, pulled.fetched, pulled.name) == (digest, False, pulled.size, "model")
    folder = Path(pulled.folder)
    assert read_model("model", folder).digest == digest
    assert not (folder / "README.md").exists()
    again = pull(tmp_path / "cache", PullOrder(address), sources)
    assert (again.digest, again.hit, again.fetched) == (digest, True, 0)
    assert list((tmp_path / "cache" / "partial").iterdir()) == []


def test_one_flipped_byte_is_refused(s3: S3Server, sources: Path, tmp_path: Path) -> None:
    """The error names the file and both digests; nothing is visible; once it is mended, the pull goes on."""
    digest = make_model(tmp_path / "model", SIZES)
    address = s3.upload(tmp_path / "model", "flipped/m")
    name = "model-00002.safetensors"
    right = (tmp_path / "model" / name).read_bytes()
    wrong = bytearray(right)
    wrong[5 * MIB] ^= 1
    obstore.put(s3.store(), f"flipped/m/{name}", bytes(wrong))
    with pytest.raises(ModelDigestError, match=rf"{name} came with the digest [0-9a-f]{{64}}, and the manifest says"):
        pull(tmp_path / "cache", PullOrder(address), sources)
    assert visible(tmp_path / "cache") == []
    obstore.put(s3.store(), f"flipped/m/{name}", right)
    mended = pull(tmp_path / "cache", PullOrder(address), sources)
    assert mended.digest == digest
    assert mended.fetched < mended.size


def test_another_model_than_the_named_one_is_refused(s3: S3Server, sources: Path, tmp_path: Path) -> None:
    """Before a byte is downloaded, by the manifest's digest."""
    make_model(tmp_path / "model", (100,))
    address = s3.upload(tmp_path / "model", "other/m")
    with pytest.raises(ModelDigestError, match="nothing was downloaded"):
        pull(tmp_path / "cache", PullOrder(address, digest="0" * 64), sources)


def test_without_a_manifest_weights_need_a_digest(s3: S3Server, sources: Path, tmp_path: Path) -> None:
    """Refused; taken with the right digest or when anything may come; refused with a wrong one."""
    digest = make_model(tmp_path / "model", SIZES)
    (tmp_path / "model" / MANIFEST).unlink()
    address = s3.upload(tmp_path / "model", "bare/m")
    with pytest.raises(ModelSourceError, match=r"has no athanor-model\.json"):
        pull(tmp_path / "a", PullOrder(address), sources)
    with pytest.raises(ModelDigestError, match="it is not in the cache"):
        pull(tmp_path / "a", PullOrder(address, digest="0" * 64), sources)
    assert visible(tmp_path / "a") == []
    assert pull(tmp_path / "a", PullOrder(address, digest=digest), sources).digest == digest
    assert pull(tmp_path / "b", PullOrder(address, unverified=True), sources).digest == digest


def test_two_pulls_at_once_download_once(s3: S3Server, sources: Path, tmp_path: Path) -> None:
    """Of four pulls of one model through two caches' objects one downloads, and the others wait for it."""
    digest = make_model(tmp_path / "model", (40 * MIB,))
    address = s3.upload(tmp_path / "model", "twice/m")

    async def all_at_once() -> list[Pulled]:
        pullers = [Puller(ModelCache(tmp_path / "cache"), Pace(0)) for _ in range(4)]
        orders = [one.pull(PullOrder(address), sources, 0, frozenset(), lambda *_: None) for one in pullers]
        return await asyncio.gather(*orders)

    done = asyncio.run(all_at_once())
    assert {one.digest for one in done} == {digest}
    assert sorted(one.fetched for one in done) == [0, 0, 0, done[0].size]


def test_credentials_are_needed_and_never_shown(
    s3: S3Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A wrong secret is refused with what to do; neither the error nor any output has it."""
    make_model(tmp_path / "model", (100,))
    address = s3.upload(tmp_path / "model", "private/m")
    secret = "wrong-and-not-to-be-seen"
    with pytest.raises(ModelSourceError, match="refuses the credentials") as caught:
        pull(tmp_path / "cache", PullOrder(address), s3.sources(tmp_path / "wrong.yaml", secret=secret))
    shown = f"{caught.value}{''.join(capfd.readouterr())}"
    assert secret not in shown
    assert "private" in shown, "positive control: the address is shown"


def test_credentials_come_from_the_providers_variables(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file of sources has an endpoint alone; control: without the variables the source refuses."""
    digest = make_model(tmp_path / "model", (100,))
    address = s3.upload(tmp_path / "model", "variables/m")
    sources = tmp_path / "sources.yaml"
    entry = {"prefix": "s3://", "endpoint": s3.endpoint, "anonymous": True}
    sources.write_text(json.dumps({"sources": [entry]}))
    sources.chmod(0o600)
    with pytest.raises(ModelSourceError, match="refuses the credentials"):
        pull(tmp_path / "cache", PullOrder(address), sources)
    sources.write_text(json.dumps({"sources": [{**entry, "anonymous": False}]}))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", USER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert pull(tmp_path / "cache", PullOrder(address), sources).digest == digest


def test_a_file_of_sources_that_others_read_is_refused(s3: S3Server, sources: Path, tmp_path: Path) -> None:
    """With the command that closes it; a malformed one is refused without showing its values."""
    sources.chmod(0o644)
    with pytest.raises(ModelSourceError, match="chmod o="):
        pull(tmp_path / "cache", PullOrder("s3://a/b"), sources)
    sources.chmod(0o600)
    sources.write_text(json.dumps({"sources": [{"prefix": "s3://", "secret_access_key": ["hidden-value"]}]}))
    with pytest.raises(ModelSourceError, match=r"sources\.0\.secret_access_key") as caught:
        pull(tmp_path / "cache", PullOrder("s3://a/b"), sources)
    assert "hidden-value" not in str(caught.value)


def test_a_server_that_is_gone_is_told_after_a_bounded_number_of_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server on the port: a typed error after the tries, and it says that nothing is lost."""
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.001)
    digest = make_model(tmp_path / "model", (100,))
    with pytest.raises(SourceUnavailableError, match="tried 8 times"):
        pull(tmp_path / "cache", PullOrder(f"http://127.0.0.1:{free_ports(1)[0]}/m"))
    assert digest


def test_a_model_comes_over_plain_http_from_this_machine_alone(s3: S3Server, tmp_path: Path) -> None:
    """From loopback it comes by its manifest; without one HTTP lists nothing; another machine needs TLS."""
    digest = make_model(tmp_path / "model", SIZES)
    s3.upload(tmp_path / "model", "web/m")
    assert httpx.get(f"{s3.files}/web/m/config.json").status_code == 200, "control: the files are there"
    assert pull(tmp_path / "cache", PullOrder(f"{s3.files}/web/m")).digest == digest
    (tmp_path / "model" / MANIFEST).unlink()
    s3.upload(tmp_path / "model", "web/bare")
    with pytest.raises(ModelSourceError, match="lists no files"):
        pull(tmp_path / "cache", PullOrder(f"{s3.files}/web/bare", unverified=True))
    with pytest.raises(ModelSourceError, match="plain_http: true"):
        pull(tmp_path / "cache", PullOrder("http://192.0.2.1/m"))


def test_a_model_comes_from_a_hubs_layout(s3: S3Server, tmp_path: Path) -> None:
    """By revision and commit, with the digests of the hub's list; a wrong one there is refused."""
    digest = make_model(tmp_path / "model", SIZES)
    (tmp_path / "model" / MANIFEST).unlink()
    for good, host in ((True, "hub"), (False, "badhub")):
        lay_out_hub(s3, host, tmp_path / "model", good=good)
        sources = tmp_path / f"{host}.yaml"
        sources.write_text(
            json.dumps({"sources": [{"prefix": "hf://", "endpoint": f"{s3.files}/{host}", "token": "t"}]})
        )
        sources.chmod(0o600)
        if good:
            assert pull(tmp_path / host, PullOrder("hf://owner/model@v1"), sources).digest == digest
        else:
            with pytest.raises(ModelDigestError, match="and the manifest says 0000"):
                pull(tmp_path / host, PullOrder("hf://owner/model@v1"), sources)
    with pytest.raises(ModelSourceError, match="no such model or revision"):
        pull(tmp_path / "none", PullOrder("hf://owner/other"), sources)


def lay_out_hub(s3: S3Server, place: str, model: Path, *, good: bool) -> None:
    """Put a model's files where a hub has them, with its list."""
    from tests.appliance.fetch.sample import manifest_of

    store, commit = s3.store(), "c0ffee"
    rows = []
    for file in manifest_of(model).files:
        data = (model / file.name).read_bytes()
        obstore.put(store, f"{place}/owner/model/resolve/{commit}/{file.name}", data)
        row = {"type": "file", "path": file.name, "size": file.size, "oid": "0" * 40}
        if file.name.endswith(".safetensors"):
            row["lfs"] = {"oid": file.sha256 if good else "0" * 64, "size": file.size, "pointerSize": 134}
        rows.append(row)
    rows += [{"type": "directory", "path": "onnx"}, {"type": "file", "path": ".gitattributes", "size": 3, "oid": "0"}]
    obstore.put(
        store, f"{place}/api/models/owner/model/revision/v1", json.dumps({"sha": commit, "siblings": []}).encode()
    )
    obstore.put(store, f"{place}/api/models/owner/model/tree/{commit}", json.dumps(rows).encode())


def test_the_least_recently_used_leaves_for_what_needs_its_room(s3: S3Server, sources: Path, tmp_path: Path) -> None:
    """Under a limit for two models: the third takes the place of the oldest that is not pinned; with both pinned it is
    refused, and both stay."""
    cache = tmp_path / "cache"
    digests = []
    for number in range(4):
        digests.append(make_model(tmp_path / f"m{number}", (3 * MIB,), seed=number))
        s3.upload(tmp_path / f"m{number}", f"many/m{number}")
    limit = 7 * MIB
    pull(cache, PullOrder("s3://models/many/m0", pin=True), sources, limit)
    pull(cache, PullOrder("s3://models/many/m1"), sources, limit)
    third = pull(cache, PullOrder("s3://models/many/m2", pin=True), sources, limit)
    assert third.evicted == (digests[1],)
    assert visible(cache) == sorted([digests[0], digests[2]])
    with pytest.raises(ModelCacheError, match="remove or unpin models"):
        pull(cache, PullOrder("s3://models/many/m3"), sources, limit)
    assert visible(cache) == sorted([digests[0], digests[2]])


def test_a_rate_is_kept(s3: S3Server, sources: Path, tmp_path: Path) -> None:
    """12 MiB at 6 MiB a second take 1.9 s at least."""
    make_model(tmp_path / "model", (12 * MIB,))
    address = s3.upload(tmp_path / "model", "slow/m")
    slow = pull(tmp_path / "slow", PullOrder(address), sources, rate=6 * MIB)
    assert slow.seconds > 1.9


@pytest.mark.parametrize(
    "text", ["ftp://a/b", "s3://user:password@host/x", "https://h/x?token=1", "hf://one", "s3:///x", "s3://b/../x", ""]
)
def test_addresses_of_no_source_are_refused(tmp_path: Path, text: str) -> None:
    """At once, with what an address looks like; credentials in an address are refused."""
    with pytest.raises(ConfigError):
        pull(tmp_path / "cache", PullOrder(text))
