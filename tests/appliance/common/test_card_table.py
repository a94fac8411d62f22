"""Which card an engine gets: its own by free memory, or a refusal with the numbers of every card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.card_table import Card, CardTable, CardUse, ModelOnCard, Placed
from appliance.common.config import ModelConfig
from appliance.common.errors import StartError
from appliance.common.gpu_placement import candidates, cards_of, kernel_command, place_models
from appliance.common.model_shape import parse_shape
from appliance.common.served_models import entry_digest
from isolation.gpu.gpu_facts import GpuFacts
from tests.appliance.common.cards import CARD_80, LLAMA_8B, WEIGHTS_8B, machine, model

SHAPE = parse_shape(LLAMA_8B)
GIB = 1 << 30


def entry(name: str = "llama", **given: object) -> ModelOnCard:
    """The 8B model under a name."""
    return ModelOnCard(model(name, **given), SHAPE, WEIGHTS_8B)


def place(facts: GpuFacts, *models: ModelOnCard) -> list[int | str]:
    """The cards of models, or the messages of those that were refused."""
    found = place_models(facts, models, running=False)
    return [one.use.card if isinstance(one, Placed) else one.message for one in found]


def test_two_cards_get_two_models_and_a_third_is_refused_with_numbers() -> None:
    """Each engine has a card of its own; the third one's refusal has what is held, left and asked for of both."""
    first, second, third = place(machine(2), entry("a"), entry("b"), entry("c"))
    assert (first, second) == (0, 1)
    assert third == (
        "no GPU has room for an engine of c: "
        "card 0 (NVIDIA H100 80GB HBM3) of 80 GiB: a may hold 90 %, 5 % are left and 90 % (72 GiB) are asked for; "
        "card 1 (NVIDIA H100 80GB HBM3) of 80 GiB: b may hold 90 %, 5 % are left and 90 % (72 GiB) are asked for; "
        "give the models of one card a smaller gpu_share or kv_bytes, or serve fewer models, or add a card"
    )


def test_the_card_with_the_most_free_memory_is_taken() -> None:
    """What other programs hold counts, and so does what our own engines hold already."""
    facts = machine(3)
    busy = replace(facts.memory[0], free=30 * GIB), replace(facts.memory[1], free=70 * GIB), facts.memory[2]
    facts = replace(facts, memory=busy)
    assert place(facts, entry("a"), entry("b", gpu_share=60)) == [2, 1]
    refused = place(facts, entry("a"), entry("b", gpu_share=60), entry("c", gpu_share=95), entry("d", gpu_share=95))
    assert refused[2] == 0
    assert "d" in str(refused[3]) and "c may hold 95 %, other programs hold 50 GiB" in str(refused[3])
    held = (CardUse("engine-a", 0, 60),)
    assert [card.others >> 30 for card in cards_of(facts, held)] == [1, 9, 0]


def test_shares_of_one_card_add_up() -> None:
    """Two models of 45 % share a card, each with its own plan; a third of 10 % does not fit, one of 5 % lacks room for
    its weights, and that is said with the bytes."""
    facts = machine(1)
    both = [entry("a", gpu_share=45), entry("b", gpu_share=45)]
    refused = place(facts, *both, entry("c", gpu_share=10), entry("d", gpu_share=5))
    assert refused[:2] == [0, 0]
    assert "5 % are left and 10 % (8.0 GiB) are asked for" in str(refused[2])
    assert "15 GiB of weights need 16 GiB" in str(refused[3])


def test_kv_bytes_take_what_they_need() -> None:
    """A model with kv_bytes holds weights, context, reserve and KV, rounded up to a percent."""
    table = CardTable(cards_of(machine(1)))
    table, placed = table.place("e", entry(kv_bytes=4 * GIB), (0,))
    assert placed.use == CardUse("e", 0, 26)
    assert placed.plan is not None and placed.plan.share == 0
    assert place(machine(1), entry("a", kv_bytes=40 * GIB), entry("b", gpu_share=22)) == [0, 0]


def test_an_engine_that_starts_again_finds_its_own_card() -> None:
    """What a sandbox of that name held counts as given back; what went is free."""
    table, first = CardTable(cards_of(machine(2))).place("a", entry(), (0, 1))
    table, _ = table.place("b", entry(), (0, 1))
    assert table.place("a", entry(), (0, 1))[1] == first
    with pytest.raises(StartError, match="b may hold 90 %"):
        table.place("c", entry(), (0, 1))
    assert table.without(["a"]).place("c", entry(), (0, 1))[1].use.card == 0


def test_cards_of_unknown_memory_are_shared_by_percent() -> None:
    """Without NVML each engine still has a card of its own, and nothing is planned by numbers that are not known."""
    facts = machine(2, total=0)
    found = list(place_models(facts, [entry("a"), entry("b"), entry("c")], running=False))
    assert [one.use.card for one in found if isinstance(one, Placed)] == [0, 1]
    assert all(one.plan is None for one in found if isinstance(one, Placed))
    assert "a may hold 90 %, 5 % are left and 90 % are asked for" in str(found[2])
    assert place(facts, *(entry(name, kv_bytes=GIB) for name in "abc")) == [0, 1, 0]


def test_a_card_that_tells_no_memory_beside_others_is_not_used() -> None:
    """A card that has fallen off answers NVML no more: engines go to the others, which can be full."""
    facts = machine(2)
    facts = replace(facts, memory=facts.memory[1:])
    assert place(facts, entry("a")) == [1]
    table, _ = CardTable(cards_of(facts)).place("a", entry("a"), (0, 1))
    with pytest.raises(StartError, match="card 0 tells no memory, as one that is lost"):
        table.place("b", entry("b"), (0, 1))


def test_a_start_waits_for_a_card_that_tells_no_memory() -> None:
    """Where no other has room: a lost card must not keep the appliance from serving its other models. A third model is
    refused."""
    facts = machine(2)
    facts = replace(facts, memory=facts.memory[1:])
    first, second, third = place(facts, entry("a"), entry("b"), entry("c"))
    assert (first, second) == (1, 0)
    assert "card 0 (NVIDIA H100 80GB HBM3): b may hold 90 %" in str(third)


def test_a_card_that_no_engine_gets_is_named_and_passed_over() -> None:
    """One that is lost or cut up is not taken though it is empty, and its sentence stands among the refusals; a list
    that names nothing else is refused with it alone."""
    facts, out = machine(2), {0: "card 0 is lost: it has fallen off the bus"}
    table, first = CardTable(cards_of(facts, out=out)).place("a", entry("a"), (0, 1))
    assert first.use.card == 1
    with pytest.raises(
        StartError, match=r"of b: card 1 .* a may hold 90 %.*; card 0 is lost: it has fallen off the bus; "
    ):
        table.place("b", entry("b"), (0, 1))
    with pytest.raises(StartError, match=r"^no GPU can be given to an engine of b: card 0 is lost: .* bus$"):
        table.place("b", entry("b"), (0,))
    unknown = cards_of(replace(facts, memory=facts.memory[1:]), out=out)
    with pytest.raises(StartError, match="card 0 is lost"):
        CardTable(unknown).place("b", entry("b", gpu_share=95), (0,))
    assert "cut up into MIG instances" in str(place(replace(facts, mig=(1,)), entry("a"), entry("b", gpu=[1]))[1])


def test_without_a_shape_the_configuration_holds() -> None:
    """A description that cannot be read still gets a card with room for its weights, and no plan."""
    table = CardTable((Card(0, "", CARD_80),))
    assert table.place("a", ModelOnCard(model(), None, WEIGHTS_8B), (0,))[1].plan is None
    with pytest.raises(StartError, match=r"are free, 90 % may be held; 93 GiB of weights need"):
        table.place("a", ModelOnCard(model(), None, 100_000_000_000), (0,))


def test_a_list_is_what_a_model_may_use() -> None:
    """An engine takes one of its list; a card that is not there is named alone; cut-up cards are passed over."""
    assert place(machine(3), entry("a", gpu=[2]), entry("b", gpu=[1, 2])) == [2, 1]
    assert candidates(machine(2), model(gpu=[0, 5])) == (5,)
    assert candidates(replace(machine(2), mig=(0,)), model()) == (1,)
    assert candidates(replace(machine(1), mig=(0,)), model()) == (0,)
    assert candidates(machine(2), model(gpu=[0, 5]), lost={5: "card 5 is lost"}) == (0, 5)


def test_a_running_appliance_is_not_its_own_rival() -> None:
    """Memory that its engines hold already is no other program's; without that word it would find no room."""
    facts = machine(1, free=8 * GIB)
    assert isinstance(next(place_models(facts, [entry()], running=True)), Placed)
    assert isinstance(next(place_models(facts, [entry()], running=False)), StartError)


def test_the_command_that_compiles_has_the_numbers_of_the_plan() -> None:
    """Type, block size and rows as the engine will have them."""
    assert kernel_command(model(path="/srv/my llama"), SHAPE, 256, "sm_90") == (
        "athanor kernels gpu /etc/athanor/gpu-kernels --model '/srv/my llama' --architecture sm_90 --dtype bfloat16 "
        "--block-size 16 --max-num-seqs 256"
    )
    assert "--architecture SM --block-size 32" in kernel_command(model(block_size=32), None, 1, "")


def test_an_entry_means_the_same_wherever_it_is_read_again() -> None:
    """What is left to the card is a value: it outlives anchoring, a dump and another reading, so gateway and supervisor
    agree; a model without a GPU has a processor's numbers, and may not leave them to a card."""
    first = model()
    assert (first.gpu_share, first.max_num_seqs, first.max_num_batched_tokens, first.max_context) == (90, 0, 0, 0)
    moved = first.anchored(Path("/srv"))
    again = ModelConfig.model_validate_json(moved.model_dump_json())
    assert again == moved and entry_digest(again) == entry_digest(moved)
    assert entry_digest(first) != entry_digest(model(gpu_share=0, kv_bytes=first.kv_bytes))
    plain = model(gpu="off")
    told = (plain.gpu_share, plain.max_num_seqs, plain.max_num_batched_tokens, plain.max_context)
    assert told == (0, 128, 512, 32_768)
    for keys in ({"gpu": "off", "max_num_seqs": 0}, {"max_context": 15}, {"max_num_batched_tokens": -1}):
        with pytest.raises(ValueError, match=r"it must be (1|16) at least|greater than or equal to 0"):
            model(**keys)
