"""Pulls from ``gs://``: a real server of objects that anybody reads, and one behind what checks Google's tokens."""

from __future__ import annotations

import json
from pathlib import Path

import obstore
import pytest

from appliance.common.errors import ModelSourceError
from appliance.common.model_cache.manifest import MANIFEST
from appliance.fetch.pull import PullOrder
from tests.appliance.fetch.google_gate import guard, make_key, write_account
from tests.appliance.fetch.s3_server import OPEN_BUCKET, S3Server
from tests.appliance.fetch.sample import make_model
from tests.appliance.fetch.test_pull import SIZES, pull


def sources(path: Path, endpoint: str, **values: object) -> Path:
    """A file of sources for an endpoint in place of Google's."""
    path.write_text(json.dumps({"sources": [{"prefix": "gs://", "endpoint": endpoint, **values}]}))
    path.chmod(0o600)
    return path


@pytest.mark.full
def test_a_model_comes_from_a_bucket_that_anybody_reads(s3: S3Server, tmp_path: Path) -> None:
    """Whole, by its manifest and by the list of files with a digest; control: without ``anonymous`` there would be
    no credentials, and another bucket refuses who has none."""
    digest = make_model(tmp_path / "model", SIZES)
    s3.upload(tmp_path / "model", "some/m", OPEN_BUCKET)
    anonymous = sources(tmp_path / "sources.yaml", s3.endpoint, anonymous=True)
    address = f"gs://{OPEN_BUCKET}/some/m"
    assert pull(tmp_path / "cache", PullOrder(address), anonymous).digest == digest
    obstore.delete(s3.store(OPEN_BUCKET), f"some/m/{MANIFEST}")
    assert pull(tmp_path / "other", PullOrder(address, digest=digest), anonymous).digest == digest
    s3.upload(tmp_path / "model", "closed/m")
    with pytest.raises(ModelSourceError, match="refuses the credentials"):
        pull(tmp_path / "none", PullOrder("gs://models/closed/m"), anonymous)


def test_a_service_account_signs_each_request(s3: S3Server, tmp_path: Path) -> None:
    """With the key in its file; another key is refused, and neither the error nor a file of the cache shows it."""
    key = make_key()
    digest = make_model(tmp_path / "model", (100, 9 << 20))
    s3.upload(tmp_path / "model", "signed/m", OPEN_BUCKET)
    address = f"gs://{OPEN_BUCKET}/signed/m"
    with guard(s3.endpoint, key) as gate:
        account = write_account(tmp_path / "account.json", key)
        right = sources(tmp_path / "right.yaml", gate.endpoint, service_account=str(account))
        assert pull(tmp_path / "cache", PullOrder(address), right).digest == digest
        assert any("signed" in target for target in gate.let_in)
        let_in = len(gate.let_in)
        stranger = write_account(tmp_path / "stranger.json", make_key())
        wrong = sources(tmp_path / "wrong.yaml", gate.endpoint, service_account=str(stranger))
        with pytest.raises(ModelSourceError, match="refuses the credentials") as caught:
            pull(tmp_path / "none", PullOrder(address), wrong)
        assert len(gate.let_in) == let_in
        assert json.loads(stranger.read_text())["private_key"].splitlines()[1] not in str(caught.value)
