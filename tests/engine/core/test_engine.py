"""The whole engine in one process: batches, preemption, isolation between namespaces, failures."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core.offline import Answer, collect, generate
from engine.errors import ConfigurationError
from engine.model.layers.decoder import Decoder
from engine.startup.load import check_config
from engine.startup.warmup import warm_up
from isolation.ipc.codec import decode, encode
from isolation.ipc.messages import FailureCode, Finish
from isolation.ipc.sampling import Sampling
from tests.engine.support import make_engine, model_config, namespace, random_model, submit


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A random model whose greedy output wanders."""
    return random_model(model_config())


def load_of(tenant: int, *, seed: int) -> list[list[object]]:
    """Requests of a noisy tenant: penalties, drawn tokens, logprobs, long and short prompts."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for number in range(12):
        length = int(torch.randint(1, 60, (), generator=generator))
        tokens = torch.randint(0, 97, (length,), generator=generator).tolist()
        kinds = (Sampling(seed=number), Sampling(temperature=0, repetition_penalty=1.4), Sampling(top_k=3, top_p=0.5))
        requests.append(
            submit(
                100 * tenant + number,
                tokens,
                5 + number,
                tenant=tenant,
                sampling=kinds[number % 3],
                logprobs=number % 4 - 1,
                retain=bool(number % 2),
            )
        )
    return requests


def run_victim(model: Decoder, noise_seed: int | None, num_blocks: int) -> dict[int, Answer]:
    """A victim's requests, drawn and greedy, beside a noisy tenant or alone."""
    engine = make_engine(model, num_blocks=num_blocks, max_context=80)
    noise = load_of(2, seed=noise_seed) if noise_seed is not None else []
    answers: dict[int, Answer] = {}
    victims = [
        submit(
            number,
            range(number // 2, number // 2 + 20),
            25,
            sampling=Sampling(temperature=0.8 * (number % 2), seed=number),
        )
        for number in range(4)
    ]
    for step in range(200):
        if step % 3 == 0 and victims:
            engine.add(victims.pop())
        for one in noise[step : step + 2]:
            engine.add(one)
            if step % 5 == 4:
                engine.abort(one.request)
        collect(engine, answers)
        engine.scheduler.check_integrity()
    assert not engine.has_work
    return {number: answers[number] for number in range(4)}


@pytest.mark.parametrize("num_blocks", [200, 30])
def test_a_tenants_tokens_do_not_depend_on_anothers_load(model: Decoder, num_blocks: int) -> None:
    """The victim's tokens are the same alone and beside two different loads, also under preemption; so are its cache
    hits while memory suffices."""
    alone = run_victim(model, None, num_blocks)
    assert all(len(answer.token_ids) == 25 for answer in alone.values())
    for seed in (1, 2):
        beside = run_victim(model, seed, num_blocks)
        for number, answer in alone.items():
            assert beside[number].token_ids == answer.token_ids
            assert num_blocks < 200 or beside[number].cached_tokens == answer.cached_tokens
    assert num_blocks < 200 or sorted(answer.cached_tokens for answer in alone.values()) == [0, 0, 16, 16]
    assert len({tuple(answer.token_ids) for answer in alone.values()}) == 4


def test_cached_tokens_come_from_the_same_namespace_only(model: Decoder) -> None:
    """The same prompt hits for its own tenant and never for another; tokens are the same either way."""
    engine = make_engine(model)
    prompt = range(21)
    first = generate(engine, [submit(1, prompt, tenant=1)])[1]
    other = generate(engine, [submit(2, prompt, tenant=2)])[2]
    again = generate(engine, [submit(3, prompt, tenant=1)])[3]
    assert (first.cached_tokens, other.cached_tokens, again.cached_tokens) == (0, 0, 20)
    assert first.token_ids == other.token_ids == again.token_ids


def test_memory_of_an_ended_request_is_zero_where_nothing_may_be_kept(model: Decoder) -> None:
    """After a request without retention no byte of KV is left; after an ordinary one some is (control)."""
    engine = make_engine(model)

    def residue() -> bool:
        return any(bool(tensor[1:].any()) for tensor in engine.runner.storage.tensors)

    assert not residue()
    generate(engine, [submit(1, range(30), retain=False)])
    assert not engine.has_work
    assert not residue()
    generate(engine, [submit(2, range(30), retain=True)])
    assert residue()


def test_a_block_is_zero_before_it_serves_another(model: Decoder) -> None:
    """Poison in every free block, the tail of the same tenant's blocks included, changes no token."""
    engine, clean = make_engine(model), make_engine(model)
    generate(engine, [submit(1, range(40), tenant=1)])
    pool = engine.scheduler._pool
    free = [block for block in range(1, pool.num_blocks + 1) if pool.refs(block) == 0]
    assert len(free) == pool.num_blocks
    for tensor in engine.runner.storage.tensors:
        tensor[free] = torch.nan
    for tenant in (2, 3):
        requests = [submit(10 + tenant, range(5, 27), 20, tenant=tenant)]
        assert generate(engine, requests) == generate(clean, requests)


def test_the_null_block_stays_zero(model: Decoder) -> None:
    """Padding reads zeros: neither warm-up nor service leaves anything in block 0."""
    engine = make_engine(model)
    warm_up(engine)
    assert all(not tensor.any() for tensor in engine.runner.storage.tensors)
    generate(engine, load_of(1, seed=3))
    assert all(not tensor[0].any() for tensor in engine.runner.storage.tensors)


def test_warm_up_leaves_no_trace(model: Decoder) -> None:
    """A warmed engine answers as a cold one does."""
    cold, warm = make_engine(model), make_engine(model)
    warm_up(warm)
    assert generate(cold, load_of(1, seed=4)) == generate(warm, load_of(1, seed=4))


def test_broken_logits_fail_one_request(model: Decoder) -> None:
    """NaN in one row: that request ends as INTERNAL, its logprobs and neighbours' stay in place, and its tenant's
    later requests are sound."""
    engine = make_engine(model, prefix_caching=True)
    forward = model.forward

    def poisoned(*inputs: object) -> torch.Tensor:
        logits = forward(*inputs)
        if engine.scheduler.num_running == 3 and logits.shape[0] == 3:
            logits[1] = torch.nan
        return logits

    engine.runner.forward.model = type("Poisoned", (), {"forward": staticmethod(poisoned)})()
    answers = generate(engine, [submit(number, range(number, number + 8), 6, logprobs=1) for number in range(3)])
    assert [answers[number].failure for number in range(3)] == [None, FailureCode.INTERNAL, None]
    assert [len(answers[number].token_ids) for number in (0, 2)] == [6, 6]
    assert [len(answers[number].logprobs) for number in (0, 2)] == [6, 6]
    engine.scheduler.check_integrity()
    sound = generate(engine, [submit(9, range(1, 9), 6)])[9]
    assert sound == Answer(sound.token_ids, Finish.LENGTH)


NUMBERS = st.sampled_from([0.0, 5e-324, 1e-6, 0.3, 1.0, 1.7, 1e39, 1.7976931348623157e308])
REQUESTS = st.lists(
    st.builds(
        dict,
        token_ids=st.lists(st.integers(0, 110), min_size=1, max_size=90),
        max_tokens=st.sampled_from([1, 2, 9, 1 << 20]),
        tenant=st.integers(1, 3),
        stop_ids=st.lists(st.sampled_from([0, 5, 96, 97, 2**32 - 1]), max_size=3).map(tuple),
        retain=st.booleans(),
        logprobs=st.sampled_from([-1, 0, 1, 20]),
        weight=st.sampled_from([1, 2, 1_000]),
        sampling=st.builds(
            Sampling,
            temperature=NUMBERS,
            top_k=st.sampled_from([0, 1, 50, 2**32 - 1]),
            top_p=NUMBERS.filter(lambda one: 0 < one <= 1),
            min_p=NUMBERS.filter(lambda one: one <= 1),
            repetition_penalty=NUMBERS.filter(bool),
            presence_penalty=st.floats(-2, 2),
            frequency_penalty=st.floats(-2, 2),
            seed=st.integers(0, 2**64 - 1),
        ),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(requests=REQUESTS, aborts=st.sets(st.integers(0, 11)))
def test_nothing_that_the_wire_admits_ends_the_engine(
    model: Decoder, requests: list[dict[str, object]], aborts: set[int]
) -> None:
    """Any requests together: each ends with its tokens or one failure, and every output fits its frame."""
    engine = make_engine(model, num_blocks=30, max_context=100, max_waiting=9)
    ended: dict[int, object] = {}
    for number, fields in enumerate(requests):
        engine.add(decode(encode(submit(number, fields.pop("token_ids"), fields.pop("max_tokens"), **fields))))
    for step in range(2_000):
        if step in aborts:
            engine.abort(step)
        if not engine.has_work:
            break
        output = engine.step()
        engine.scheduler.check_integrity()
        if output is None:
            continue
        assert decode(encode(output)) == output
        for request, finish in zip(output.requests, output.finishes, strict=True):
            assert request not in ended
            if finish:
                ended[request] = finish
        for failure in output.failures:
            assert failure.request not in ended
            assert failure.code is not FailureCode.INTERNAL
            ended[failure.request] = failure.code
    assert set(ended) == set(range(len(requests)))


def test_seeded_requests_repeat_and_seeds_differ(model: Decoder) -> None:
    """The same seed gives the same tokens in another batch and after preemption; another seed gives others."""
    hot = Sampling(temperature=1.0, seed=77)
    alone = generate(make_engine(model), [submit(1, [5], 30, sampling=hot)])[1].token_ids
    crowd = [submit(number, [number], 30, sampling=Sampling(seed=number), tenant=2) for number in range(2, 12)]
    engine = make_engine(model, num_blocks=24, max_context=60)
    assert generate(engine, [*crowd, submit(1, [5], 30, sampling=hot)])[1].token_ids == alone
    other = generate(make_engine(model), [submit(1, [5], 30, sampling=Sampling(temperature=1.0, seed=78))])
    assert other[1].token_ids != alone


def test_outputs_say_what_the_engine_holds(model: Decoder) -> None:
    """One output a step, with the counts the host watches; refusals and aborts are answered in the next one."""
    engine = make_engine(model, max_num_seqs=2, max_num_batched_tokens=8, max_waiting=3)
    for number in range(4):
        engine.add(submit(number, range(6), 3))
    output = engine.step()
    assert output is not None
    assert [(one.request, one.code) for one in output.failures] == [(3, FailureCode.OVERLOADED)]
    assert (output.running, output.waiting) == (2, 1)
    assert list(output.requests) == [0]
    assert len(output.token_ids) == len(output.finishes) == 1
    assert [started.request for started in output.starts] == [0, 1]
    engine.abort(0)
    engine.abort(0)
    engine.abort(12_345)
    output = engine.step()
    assert output is not None
    assert [(one.request, one.code) for one in output.failures] == [(0, FailureCode.ABORTED)]
    while engine.has_work:
        output = engine.step() or output
    assert output is not None
    assert (output.running, output.waiting, output.free_blocks) == (0, 0, 64)
    assert engine.step() is None


def test_an_abort_with_nothing_else_to_do_is_answered(model: Decoder) -> None:
    """The last live request is aborted: the next step says so although nothing is left to compute."""
    engine = make_engine(model)
    engine.add(submit(1, range(6)))
    engine.abort(1)
    assert engine.has_work
    output = engine.step()
    assert output is not None
    assert [one.code for one in output.failures] == [FailureCode.ABORTED]
    assert not engine.has_work


def test_a_prompt_beyond_the_memory_is_refused_and_the_context_says_so(model: Decoder) -> None:
    """The context is cut to what the blocks hold; a prompt that fills it is TOO_LONG, one token less is served."""
    engine = make_engine(model, num_blocks=5)
    assert engine.ready().max_context == 20
    answers = generate(engine, [submit(1, [1] * 20), submit(2, [1] * 19, 8)])
    assert answers[1].failure is FailureCode.TOO_LONG
    assert (len(answers[2].token_ids), answers[2].finish) == (1, Finish.LENGTH)


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 0},
        {"block_size": 0},
        {"max_num_seqs": -1},
        {"max_context": 1},
        {"dtype": "int8"},
        {"max_waiting": 0},
    ],
)
def test_numbers_out_of_range_are_configuration_errors(change: dict[str, object]) -> None:
    """Types are checked when the configuration is read; ranges here, with the name."""
    with pytest.raises(ConfigurationError, match=next(iter(change))):
        check_config(EngineConfig(model_dir="x", model_digest="00", **change))
    check_config(EngineConfig(model_dir="x", model_digest="00"))


def test_a_request_takes_no_other_tenants_key() -> None:
    """Control of the fixtures: namespaces of different tenants are different keys of the right width."""
    keys = {namespace(number) for number in range(5)}
    assert {len(key) for key in keys} == {32}
    assert len(keys) == 5
    assert submit(1, array("I", [1]), tenant=3).namespace == namespace(3)
