"""The table of sampling numbers: sound in itself, and what documents, both APIs and both samplers have."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.front.sampling_builder import sampling_of
from appliance.gateway.grpc.generated import inference_pb2 as pb
from engine.backends.common.penalties import has_penalties
from engine.backends.common.sampler import Sampler
from engine.backends.cuda.runtime.operations import SamplingColumns
from engine.backends.cuda.runtime.rows import NUM_FIELDS, Field, words_of
from engine.backends.cuda.runtime.sampling_state import ChoiceMemory
from engine.backends.cuda.runtime.simulated_sampling import sample
from engine.core.scheduler.plan import Admission
from isolation.ipc.sampling import EXAMPLE, NAMES, PARAMETERS, Parameter, Sampling, out_of_bounds

VOCAB = 200
EACH = pytest.mark.parametrize("one", PARAMETERS, ids=NAMES)


@EACH
def test_a_row_of_the_table_is_sound(one: Parameter) -> None:
    """Default, identity and example are within both ranges, and of the parameter's type; the example is not the
    identity. The wire takes its own bounds and nothing beyond them."""
    assert type(one.default) is type(one.identity) is type(one.example) is one.kind
    assert one.example != one.identity
    for value in (one.default, one.identity, one.example):
        assert one.low <= value <= one.high and one.least <= value <= one.most
    for value in (one.least, one.most):
        assert not out_of_bounds(replace(EXAMPLE, **{one.name: value}))
    for value in (one.most * 2 + 1, one.least - 1, float("nan")):
        assert out_of_bounds(replace(EXAMPLE, **{one.name: value})).startswith(one.name)


@EACH
def test_a_caller_s_number_arrives_or_is_refused_by_name(one: Parameter) -> None:
    """The ends of the range are taken and given as the wire takes them, what is beyond is refused in the caller's
    spelling, and an absent number is the default."""
    stamp = Stamp("r", seed=7)
    assert sampling_of({one.name: None}, stamp) == Sampling(seed=7)
    for value in (one.example, one.high, *(() if one.above else (one.low,))):
        assert not out_of_bounds(sampling_of({one.name: value}, stamp))
    assert getattr(sampling_of({one.name: one.example}, stamp), one.name) == one.example
    for value in (one.high * 2 + 1, one.low * 2 - 1, *((one.low,) if one.above else ())):
        with pytest.raises(InvalidRequestError) as caught:
            sampling_of({one.name: value}, stamp, "sampling.")
        assert caught.value.param == f"sampling.{one.name}"


def test_the_proto_message_has_the_table_s_numbers() -> None:
    """The fields of ``Sampling`` in the proto file are the table's, integers where it has integers."""
    fields = {field.name: field for field in pb.Sampling.DESCRIPTOR.fields}
    assert fields.keys() == set(NAMES)
    for one in PARAMETERS:
        assert (fields[one.name].type == fields[one.name].TYPE_DOUBLE) == (one.kind is float)


def fields_table() -> list[str]:
    """Rows of the table "Fields" in ``docs/sampling.md``: meaning, name in gRPC and HTTP, range, value when absent."""
    return [
        f"| {one.title} | `{one.name}` | `{one.name}` | {one.span or f'{one.low:g} to {one.high:g}'} "
        f"| {one.absent or f'{one.default:g}'} |"
        for one in PARAMETERS
    ]


def test_the_document_has_the_table(root: Path) -> None:
    """``docs/sampling.md`` shows the rows as the table gives them."""
    text = (root / "docs/sampling.md").read_text()
    rows = fields_table()
    assert "\n".join(rows) in text, "docs/sampling.md, section Fields; its rows shall be:\n" + "\n".join(rows)


def plain_tokens(logits: torch.Tensor, sampling: Sampling) -> list[int]:
    """A token for each line by the CPU's sampler, each as the fifth token of a request of its own."""
    sampler = Sampler(len(logits), VOCAB)
    for row in range(len(logits)):
        sampler.admit(Admission(row, array("I", [0, 1, 2, 3]), 2, sampling, -1, ()))
    return sampler.sample(logits, list(range(len(logits))), np.arange(len(logits)) + 4).token_ids


def device_tokens(logits: torch.Tensor, sampling: Sampling) -> list[int]:
    """The tokens of ``plain_tokens`` by the device's sampler."""
    count = len(logits)
    memory = ChoiceMemory(count + 1, VOCAB, frozenset(), torch.device("cpu"))
    memory.admit([Admission(row, array("I", [0, 1, 2, 3]), 2, sampling, -1, ()) for row in range(count)])
    words = torch.full((NUM_FIELDS, count), -1)
    words[Field.LIMIT] = 1 << 30
    words[Field.PENALTY_LINE] = torch.arange(count) if has_penalties(sampling) else -1
    words[len(Field) :] = torch.tensor([words_of(sampling)] * count).T
    columns = SamplingColumns(words, memory.counts, memory.masks, memory.bias_ids, memory.biases)
    return sample(logits, torch.arange(count), torch.arange(count) + 4, columns).tokens.tolist()


@EACH
def test_every_number_has_an_effect_in_both_samplers(one: Parameter) -> None:
    """Among 400 draws the example changes some token, on the CPU and on the device, and both give the same ones. So no
    row of the table is left without arithmetic. Control: at its identity the number changes nothing."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(400, VOCAB, generator=generator)
    logits[:, :4] += 3
    plain = Sampling()
    changed = replace(plain, **{one.name: one.example})
    before, after = plain_tokens(logits, plain), plain_tokens(logits, changed)
    assert before != after
    assert device_tokens(logits, plain) == before
    assert device_tokens(logits, changed) == after
    assert plain_tokens(logits, replace(plain, **{one.name: one.identity})) == before
