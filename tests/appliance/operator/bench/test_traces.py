"""Traces: what published files hold, and every way in which a damaged one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.operator.bench.errors import TraceError
from appliance.operator.bench.traces import TraceRequest, read_trace, scaled, within

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(folder: Path, text: str | bytes) -> Path:
    """A file with this text."""
    path = folder / "trace"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def row(**changes: object) -> str:
    """One line of a Mooncake file: 20 tokens in blocks of 8 unless changed."""
    fields = {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [0, 1, 2]} | changes
    return json.dumps(fields) + "\n"


def test_azure_rows_become_seconds_and_counts(tmp_path: Path) -> None:
    """Times are relative to the first, in order whatever the file's order; an answer has one token at least."""
    text = AZURE + "2023-11-16 18:15:50.9951690,396,0\n\n2023-11-16 18:15:46.6805900,374,44\n"
    first, second = read_trace(written(tmp_path, text))
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-6)
    assert (second.prompt_tokens, second.output_tokens) == (396, 1)


def test_mooncake_rows_tell_their_block_size(tmp_path: Path) -> None:
    """Three ids for 20 tokens can only be blocks of 8; milliseconds become seconds."""
    text = row() + row(timestamp=2_500, input_length=17, hash_ids=[0, 1, 9])
    first, second = read_trace(written(tmp_path, text))
    assert first == TraceRequest(0.0, 20, 3, (0, 1, 2), 8)
    assert (second.at_s, second.hash_ids, second.block_tokens) == (2.5, (0, 1, 9), 8)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "neither"),
        ("a,b\n1,2\n", 1, "neither"),
        (AZURE, 0, "no request"),
        (AZURE + "2023-11-16 18:15:46,1\n", 2, "2 fields"),
        (AZURE + "2023-11-16 18:15:46,1,2\nyesterday,1,2\n", 3, "not a time"),
        (AZURE + "2023-11-16 18:15:46,many,2\n", 2, "whole numbers"),
        (AZURE + "2023-11-16 18:15:46,0,2\n", 2, "outside 1"),
        (AZURE + "2023-11-16 18:15:46,5,-1\n", 2, "outside 0"),
        (row() + "{\n", 2, "not JSON"),
        (row() + "[1]\n", 2, "not a JSON object"),
        (row() + row(timestamp=-1), 2, "timestamp"),
        (row() + row(timestamp="1"), 2, "timestamp"),
        (row() + row(timestamp=float("inf")), 2, "timestamp"),
        (row(input_length=True), 1, "whole numbers"),
        (row(hash_ids="0"), 1, "hash_ids"),
        (row(hash_ids=[0, 1, None]), 1, "hash_ids"),
        (row() + row(input_length=1 << 30), 2, "outside 1"),
        (row() + row(hash_ids=[1, 2]), 2, "no block size"),
        (row(input_length=2_000, hash_ids=[1]), 1, "no block size"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, text: str, line: int, words: str) -> None:
    """Each damage is one error, with the file, the line and what is wrong."""
    path = written(tmp_path, text)
    with pytest.raises(TraceError, match=words) as raised:
        read_trace(path)
    assert raised.value.line == line
    assert str(path) in str(raised.value)


def test_unreadable_files(tmp_path: Path) -> None:
    """A missing file, a folder and bytes that are no text are refused as a whole."""
    for path in (tmp_path / "none", tmp_path, written(tmp_path, AZURE.encode() + b"\xff\xfe\n")):
        with pytest.raises(TraceError) as raised:
            read_trace(path)
        assert raised.value.line == 0


def test_an_endless_line_is_refused(tmp_path: Path) -> None:
    """Memory is bounded whatever the file."""
    with pytest.raises(TraceError, match="longer than"):
        read_trace(written(tmp_path, row() + "{" + " " * (1 << 20)))


def test_scaling_keeps_prefixes_and_bounds() -> None:
    """Time, lengths and blocks shrink together; what is left keeps one id a block and at least a token."""
    request = TraceRequest(10.0, 1_030, 90, (1, 2, 3), 512)
    (small,) = scaled([request], speed=4, prompt_divisor=64, output_divisor=8)
    assert small == TraceRequest(2.5, 16, 11, (1, 2), 8)
    assert scaled([request], prompt_divisor=4_096)[0].prompt_tokens == 1
    assert within([request, small], 100) == [small]


def test_the_published_files_are_read_whole(shared_data: Path) -> None:
    """Counts and blocks of the real files are the published ones."""
    azure = read_trace(shared_data / "traces" / "AzureLLMInferenceTrace_conv.csv")
    assert len(azure) == 19_366
    assert sum(one.prompt_tokens for one in azure) / len(azure) == pytest.approx(1_155, abs=1)
    mooncake = read_trace(shared_data / "traces" / "mooncake_conv_scaled64_600.jsonl")
    assert len(mooncake) == 600
    assert {one.block_tokens for one in mooncake} == {8}
    assert sum(one.prompt_tokens for one in mooncake) == 85_481
