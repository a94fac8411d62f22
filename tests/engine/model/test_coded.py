"""Coded bfloat16 tensors: every bit comes back, equal bytes from both codecs, and no malformed one gets past."""

from __future__ import annotations

import itertools
import json
import math
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.backends.native.coding import NativeCodec, open_codec
from engine.backends.native.library import Library
from engine.errors import ModelLoadError
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.coded.codec import NumpyCodec, WeightCodec, open_numpy_codec
from engine.model.coded.layout import HEADER_BYTES, MAX_CODE_BITS, SUFFIX, Code, chunk_offsets, parse_coded_header
from engine.model.coded.palette import choose_code
from tests.engine.model.coded_samples import EVERY_WORD, SAMPLES, coded, decoded_after_the_document, split, trained

Open = Callable[..., Library]
quick = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=["numpy", "compiled"])
def codec(request: pytest.FixtureRequest) -> WeightCodec:
    """Each codec."""
    if request.param == "numpy":
        return NumpyCodec()
    return NativeCodec(request.getfixturevalue("open_kernels")())


def file_of(folder: Path, blob: bytes, name: str = "w", more: dict[str, object] | None = None) -> Path:
    """A file with one coded tensor."""
    header = {name + SUFFIX: {"dtype": "U8", "shape": [len(blob)], "data_offsets": [0, len(blob)]}, **(more or {})}
    text = json.dumps(header).encode()
    path = folder / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob)
    return path


def read(path: Path, codec: WeightCodec, begin: int = 0, end: int | None = None, name: str = "w") -> np.ndarray:
    """Words of the tensor, or of a stretch."""
    with SafetensorsFile(path, lambda: codec) as file:
        stop = math.prod(file.tensors[name].shape) if end is None else end
        target = np.empty(stop - begin, np.uint16)
        file.read_stretch(name, 2 * begin, target.view(np.uint8).data)
    return target


@pytest.mark.parametrize("name", SAMPLES)
def test_every_bit_comes_back(name: str, codec: WeightCodec, tmp_path: Path) -> None:
    """Zeros of both signs, denormals, infinities, NaN payloads, escapes and noise are what they were; both codecs and a
    decoder that was written after the document agree."""
    words = SAMPLES[name]
    blob = coded(words, codec)
    assert blob == coded(words, NumpyCodec())
    assert np.array_equal(read(file_of(tmp_path, blob), codec), words)
    assert np.array_equal(decoded_after_the_document(blob), words)
    weights = words.tobytes()
    code = choose_code(codec.count(weights))
    table, size = codec.measure(code, weights)
    assert (table, size) == (codec.encode(code, weights)[0], len(codec.encode(code, weights)[1]))


@quick
@given(
    count=st.integers(1, 30_000), seed=st.integers(0, 1 << 20), odd=st.integers(0, 3_000), spread=st.floats(0.0, 12.0)
)
def test_any_weights_come_back(open_kernels: Open, count: int, seed: int, odd: int, spread: float) -> None:
    """Any number of weights over any range of exponents: equal bytes from both codecs, equal bits back from each."""
    words = trained(count, seed, odd=odd if count > 1 else 0)
    scaled = np.random.default_rng(seed).integers(-int(spread), int(spread) + 1, count)
    words = (
        (words & 0x807F) | ((words >> 7 & 255).astype(np.int64) + scaled).clip(0, 255).astype(np.uint16) << 7
    ).astype(np.uint16)
    codecs = (NativeCodec(open_kernels()), NumpyCodec())
    blobs = [coded(words, one) for one in codecs]
    assert blobs[0] == blobs[1]
    code, table, data, weights = split(blobs[0])
    for one in codecs:
        target = bytearray(2 * weights)
        one.decode(code, table, data, memoryview(target))
        assert target == words.tobytes()


def test_any_stretch_can_be_read(codec: WeightCodec, tmp_path: Path) -> None:
    """Stretches that begin and end anywhere, on borders of chunks too, and threads that share the work."""
    words = trained(70_000, odd=50)
    path = file_of(tmp_path, coded(words, codec))
    codec.chunks_at_once, codec.threads = 3, 2
    for begin, end in ((0, 1), (4_095, 4_097), (4_096, 8_192), (1, 69_999), (69_999, 70_000), (12_288, 12_288)):
        assert np.array_equal(read(path, codec, begin, end), words[begin:end])


def test_sizes_are_what_the_entropy_says() -> None:
    """Normal weights take less than 0.67 of their bytes, noise one in a thousand more than its own, and no code is
    longer than its limit."""
    assert len(coded(trained(1 << 18))) < 0.67 * (2 << 18)
    assert len(coded(SAMPLES["noise"])) < 1.02 * SAMPLES["noise"].nbytes
    steep = choose_code([0] * 100 + [1 << one for one in range(16)] + [0] * 140)
    assert max(steep.lengths) == MAX_CODE_BITS
    assert sum(2.0**-one for one in steep.lengths) == 1.0


def test_codes_are_as_short_as_they_can_be() -> None:
    """Without the limit on length, package-merge gives what Huffman's own algorithm gives."""
    draw = random.Random(5)
    for _ in range(50):
        counts = [0] * 256
        for exponent in draw.sample(range(256), draw.randint(2, 16)):
            counts[exponent] = draw.randint(100, 1_000)
        weights = sorted(count for count in counts if count)
        cost = 0
        while len(weights) > 1:
            joined = weights[0] + weights[1]
            cost += joined
            weights = sorted([joined, *weights[2:]])
        code = choose_code(counts)
        assert sum(counts[one] * length for one, length in zip(code.exponents, code.lengths, strict=True)) == cost


BLOB = coded(trained(9_000, odd=40), shape=(90, 100))


def changed(at: int, value: bytes, blob: bytes = BLOB) -> bytes:
    """A coded tensor with other bytes at one place."""
    return blob[:at] + value + blob[at + len(value) :]


LENGTHS = BLOB[48:64]


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (changed(0, b"ATHNBF15"), "is not a coded tensor"),
        (changed(8, b"\2"), "coded in version 2"),
        (changed(9, b"\x11"), "malformed palette"),
        (changed(9, b"\1"), "malformed palette"),
        (changed(9, b"\0"), "malformed palette"),
        (changed(10, b"\x09"), "malformed shape"),
        (changed(11, b"\1"), "malformed shape"),
        (changed(16, struct.pack("<Q", 9_001)), "says that it has 9001 weights"),
        (changed(16, struct.pack("<QQ", 1 << 62, len(BLOB))), "says that it has"),
        (changed(64, struct.pack("<Q", 1 << 62)), "says that it has 9000 weights"),
        (changed(16, struct.pack("<Q", 0)), "says that it has 0 weights"),
        (changed(64, bytes(16)), "says that it has"),
        (changed(80, struct.pack("<Q", 3)), "malformed shape"),
        (changed(24, struct.pack("<Q", len(BLOB) + 8)), "its header says"),
        (changed(32, BLOB[33:34]), "twice in its palette"),
        (changed(48, b"\0"), "malformed lengths"),
        (changed(48, b"\x0c"), "malformed lengths"),
        (changed(48, LENGTHS[::-1]), "malformed"),
        (changed(48, b"\1\1\1"), "ambiguous or incomplete"),
        (changed(48, bytes([1, 1]) + LENGTHS[2:]), "ambiguous or incomplete"),
        (changed(48, b"\x0b" * 16), "ambiguous or incomplete"),
        (changed(128, b"\0\0"), "malformed length"),
        (changed(128, b"\xff\xff"), "malformed length"),
        (changed(130, b"\xff\xff"), "malformed length"),
        (changed(128, struct.pack("<H", struct.unpack_from("<H", BLOB, 128)[0] + 20)), "has chunks of"),
        (changed(128, struct.pack("<HH", 4_096, 0)), "has chunks of"),
        (BLOB[:-8], "its header says"),
        (BLOB + bytes(8), "its header says"),
        (BLOB[:127], "is not a coded tensor"),
        (changed(140, b"\xff" * 1_000), "cannot be decoded"),
    ],
    ids=itertools.count(),
)
def test_malformed_tensors_are_refused(blob: bytes, message: str, codec: WeightCodec, tmp_path: Path) -> None:
    """Each rule of the document has a file that breaks it, and the message names file and tensor; the control is the
    tensor that they are made of."""
    assert np.array_equal(read(file_of(tmp_path, BLOB), codec), decoded_after_the_document(BLOB))
    with pytest.raises(ModelLoadError, match=message) as caught:
        read(file_of(tmp_path, blob), codec)
    assert "a.safetensors: tensor 'w" in str(caught.value)


def test_a_name_has_one_tensor(tmp_path: Path) -> None:
    """A tensor that is there coded and as it is is refused; without a codec a coded tensor is the bytes that it is."""
    plain = {"dtype": "U8", "shape": [0], "data_offsets": [len(BLOB), len(BLOB)]}
    path = file_of(tmp_path, BLOB, more={"w": plain})
    with pytest.raises(ModelLoadError, match="there twice"):
        SafetensorsFile(path, open_numpy_codec)
    with SafetensorsFile(path) as file:
        assert set(file.tensors) == {"w", "w" + SUFFIX}


@pytest.mark.parametrize("wrong", [{"dtype": "I8"}, {"shape": [len(BLOB) // 8, 8]}])
def test_a_coded_tensor_is_a_row_of_bytes(wrong: dict[str, object], tmp_path: Path) -> None:
    """The name of a coded tensor on another shape or dtype is refused."""
    value = {"dtype": "U8", "shape": [len(BLOB)], "data_offsets": [0, len(BLOB)], **wrong}
    with pytest.raises(ModelLoadError, match="is not a coded tensor"):
        SafetensorsFile(file_of(tmp_path, BLOB, more={"w" + SUFFIX: value}), open_numpy_codec)


def test_a_header_cannot_ask_for_memory(tmp_path: Path) -> None:
    """Whatever sizes a small file states, opening it takes some KiB; control: what is seen is what is taken."""
    for weights, shape in (((1 << 40), (1 << 20, 1 << 20)), (1 << 62, (1 << 62,)), (len(BLOB) * 2, (len(BLOB), 2))):
        stated = struct.pack("<Q", weights) + BLOB[24:64] + struct.pack("<8Q", *shape, *[0] * (8 - len(shape)))
        path = file_of(tmp_path, changed(10, bytes([len(shape)]) + BLOB[11:16] + stated))
        tracemalloc.start()
        with pytest.raises(ModelLoadError):
            SafetensorsFile(path, open_numpy_codec)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 256 << 10
    tracemalloc.start()
    bytearray(1 << 20)
    assert tracemalloc.get_traced_memory()[1] >= 1 << 20
    tracemalloc.stop()


def mutated(blob: bytes, draw: random.Random) -> bytes:
    """A coded tensor with some changes: bits, runs, truncated, lengths, codes, table."""
    data = bytearray(blob)
    for _ in range(draw.choice((1, 1, 2, 5))):
        begin, end = draw.choice(((0, 128), (48, 64), (128, 140), (128, 600), (140, len(data)), (0, len(data))))
        at = draw.randrange(begin, min(end, len(data)))
        kind = draw.randrange(4)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            run = draw.randrange(1, 40)
            data[at : at + run] = draw.randbytes(len(data[at : at + run]))
        elif kind == 2:
            data[at] = draw.choice((0, 1, 2, 11, 12, 16, 127, 255))
        else:
            data[48:64] = bytes(sorted(draw.choice((1, 2, 3, 4, 5, 11)) for _ in range(16)))
    return bytes(data[: draw.randrange(129, len(data))]) if draw.random() < 0.1 else bytes(data)


def outcome(codec: WeightCodec, blob: bytes) -> bytes | None:
    """Weights that a codec and the checks before it make of a coded tensor; None where they refuse it."""
    try:
        header = parse_coded_header("it", blob[:HEADER_BYTES], len(blob))
        table = blob[HEADER_BYTES : header.data_begin]
        offsets = chunk_offsets("it", header, table)
        target = bytearray(2 * header.weights)
        codec.decode(header.code, table, blob[header.data_begin : int(offsets[-1])], memoryview(target))
    except ModelLoadError:
        return None
    return bytes(target)


def fuzz(library: Library, count: int) -> tuple[int, int]:
    """How many mutated tensors were taken and refused; both codecs must agree on each, to the bit."""
    draw, counts, codecs = random.Random(7), [0, 0], (NativeCodec(library), NumpyCodec())
    seeds = [coded(trained(700, odd=9)), coded(trained(300)), coded(np.zeros(99, np.uint16)), coded(EVERY_WORD[:600])]
    for _ in range(count):
        blob = mutated(draw.choice(seeds), draw)
        found = [outcome(one, blob) for one in codecs]
        assert found[0] == found[1]
        counts[found[0] is None] += 1
    return counts[0], counts[1]


def test_codecs_agree_on_hostile_tensors(open_kernels: Open) -> None:
    """A thousand mutated tensors: the compiled codec and the one in numpy refuse the same ones, and give the same bits
    for the others; some of each are met."""
    taken, refused = fuzz(open_kernels(), 1_000)
    assert taken > 50
    assert refused > 200


@pytest.mark.full
@pytest.mark.timeout(3_600)
def test_codecs_agree_on_a_hundred_thousand(open_kernels: Open) -> None:
    """A hundred thousand mutated tensors."""
    assert sum(fuzz(open_kernels(), 100_000)) == 100_000


def test_without_kernels_numpy_decodes(tmp_path: Path, kernel_dir: Callable[..., Path]) -> None:
    """A folder without usable kernels gives the codec in numpy, which says that it is slow; control: with kernels the
    compiled one is taken, and named."""
    assert "slow" in open_codec("").name
    assert "slow" in open_codec(str(tmp_path)).name
    assert open_codec(str(kernel_dir())).name.startswith("compiled kernels")


def test_a_table_does_not_cost_its_square() -> None:
    """Package-merge over any counts takes less than a tenth of a second of processor time."""
    began = time.process_time()
    code = choose_code([1 << (one % 40) for one in range(256)])
    assert time.process_time() - began < 0.1
    assert isinstance(code, Code)
