"""Values from JSON: what is read stays nowhere."""

from __future__ import annotations

import json

from pydantic import TypeAdapter

from appliance.common import json_codec
from appliance.common.batches.values import StoredFile

WORDS = {"id": "file-1", "purpose": "batch", "name": "a name of a tenant's file", "size": 1, "created": 2, "expires": 3}


def test_no_text_that_was_read_stays_in_the_process() -> None:
    """Two reads of one short text give two objects: neither comes from a cache, in which it would stay for the life of
    the process, after all that was read is gone. Pydantic's own reader (control) gives one object, from its cache."""
    texts = [json_codec.decode(StoredFile, WORDS).name for _ in range(2)]
    assert texts[0] == texts[1] == WORDS["name"]
    assert texts[0] is not texts[1]
    adapter = TypeAdapter(StoredFile)
    cached = [adapter.validate_json(json.dumps(WORDS)).name for _ in range(2)]
    assert cached[0] is cached[1]
