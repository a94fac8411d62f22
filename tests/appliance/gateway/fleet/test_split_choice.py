"""Which host computes a prompt, and which prompts are worth asking for. Pure."""

from __future__ import annotations

from array import array
from contextlib import AbstractContextManager

import pytest
from pydantic import ValidationError

from appliance.common.split_config import PrefillHost, SplitConfig
from appliance.gateway.fleet.known_prompts import MAX_KNOWN, STRIDE_BLOCKS, KnownPrompts
from appliance.gateway.fleet.prefill_choice import MAX_CALLS, MAX_EMPTY_REST_S, REST_S, PrefillHosts
from appliance.gateway.front.prefiller import named_prefiller

HOSTS = tuple(
    PrefillHost(host=name, address=f"10.0.0.{number}:8471", identity=f"spiffe://fleet.example/{name}")
    for number, name in enumerate(("a", "b", "c"))
)
TLS = {"certificate": "c", "key": "k", "ca": "a"}


def test_the_router_s_choice_counts_and_else_the_least_loaded() -> None:
    """A configured host that the router names is asked though another is idle; a name of no host, a full host and one
    that rests give way to the host with the least tokens in flight."""
    hosts = PrefillHosts(HOSTS)
    assert hosts.choose("10.0.0.1:8471", "t", 0.0) is HOSTS[1]
    with hosts.asking(HOSTS[0], "t", 500), hosts.asking(HOSTS[1], "t", 300):
        assert hosts.in_flight(HOSTS[0]) == (1, 500)
        assert hosts.choose("", "t", 0.0) is HOSTS[2]
        assert hosts.choose("elsewhere:1", "t", 0.0) is HOSTS[2]
        assert hosts.choose("10.0.0.0:8471", "t", 0.0) is HOSTS[0]
        hosts.rest(HOSTS[2], 0.0)
        assert hosts.choose("10.0.0.2:8471", "t", REST_S / 2) is HOSTS[1]
        assert hosts.choose("10.0.0.2:8471", "t", REST_S) is HOSTS[2]
    assert hosts.in_flight(HOSTS[0]) == (0, 0)


def test_a_host_of_whose_prompts_nothing_comes_rests_for_their_tenant() -> None:
    """A host that says that it has computed a prompt, of which nothing comes, rests for the tenant; twice as long each
    time in a row, up to a bound, where prompts that were under way together count once. Controls: another tenant has it
    computed meanwhile, and the first prompt of which something comes ends the row."""
    hosts, now, rests = PrefillHosts(HOSTS[:1]), 0.0, list[float]()
    for _ in range(8):
        rest_s = hosts.taken(HOSTS[0], "t", now, nothing=True)
        assert hosts.taken(HOSTS[0], "t", now, nothing=True) == 0
        began = now
        while hosts.choose("", "t", now) is None:
            assert hosts.choose("", "other", now) is HOSTS[0]
            assert hosts.rests_for("t", now) and not hosts.rests_for("other", now)
            now += REST_S / 2
        assert rest_s == now - began and not hosts.rests_for("t", now)
        rests.append(now - began)
    assert rests == [REST_S, 2 * REST_S, 4 * REST_S, 8 * REST_S, *[MAX_EMPTY_REST_S] * 4]
    hosts.taken(HOSTS[0], "t", now, nothing=False)
    hosts.taken(HOSTS[0], "t", now, nothing=True)
    assert hosts.choose("", "t", now + REST_S) is HOSTS[0]


def test_calls_in_flight_are_bounded() -> None:
    """A host with its most calls is not asked, whatever the router says and whoever asks; with all of them full nobody
    is."""
    hosts, held = PrefillHosts(HOSTS[:1]), list[AbstractContextManager[None]]()
    for number in range(MAX_CALLS):
        assert hosts.choose(HOSTS[0].address, f"t{number}", 0.0) is HOSTS[0]
        held.append(hosts.asking(HOSTS[0], f"t{number}", 1))
        held[-1].__enter__()
    assert hosts.choose(HOSTS[0].address, "another", 0.0) is None
    held.pop().__exit__(None, None, None)
    assert hosts.choose("", "another", 0.0) is HOSTS[0]


def test_a_tenant_leaves_places_to_others() -> None:
    """A tenant with endless prompts gets half of a host's places, and with them gone one that comes later still gets
    two and another one; what ends is given to who has less. Control: another host's places are its own."""
    hosts, held = PrefillHosts(HOSTS[:2]), list[tuple[str, AbstractContextManager[None]]]()
    address = HOSTS[0].address

    def take(tenant: str) -> int:
        count = 0
        while hosts.choose(address, tenant, 0.0) is HOSTS[0]:
            held.append((tenant, hosts.asking(HOSTS[0], tenant, 1)))
            held[-1][1].__enter__()
            count += 1
        return count

    assert [take(tenant) for tenant in ("greedy", "late", "last", "greedy")] == [MAX_CALLS // 2, 2, 1, 0]
    assert hosts.choose(address, "greedy", 0.0) is HOSTS[1]
    next(call for tenant, call in held if tenant == "greedy").__exit__(None, None, None)
    assert [take(tenant) for tenant in ("greedy", "fourth")] == [0, 1]
    for tenant, call in held[1:]:
        call.__exit__(None, None, None)
    assert hosts._loads[HOSTS[0].host].of_tenants == {}, "a tenant without calls is not remembered"


def test_a_host_that_stalls_rests_for_as_long_as_it_was_waited_for() -> None:
    """A host that said that it works, and computed nothing for anybody in ten seconds, is not asked for the tenant for
    ten seconds, and for nobody once another tenant waited in vain as well: half of the time at most is lost to it.
    Controls: a tenant whose prompts alone take too long has it rest for no other; one that computed another prompt
    meanwhile is asked again at once, and so is one of which a tenant with a short deadline was told nothing."""
    hosts, address = PrefillHosts(HOSTS[:1]), HOSTS[0].address
    for began in (0.0, 10.0):
        assert hosts.late(HOSTS[0], "t", began, began + 10.0)
        assert [hosts.choose(address, "t", began + now) for now in (10.0, 19.9, 20.0)] == [None, None, HOSTS[0]]
        assert hosts.choose(address, "other", began + 10.0) is HOSTS[0]
    assert hosts.late(HOSTS[0], "other", 20.0, 30.0)
    assert [hosts.choose(address, "third", now) for now in (30.0, 39.9, 40.0)] == [None, None, HOSTS[0]]
    hosts.computed(HOSTS[0], 45.0)
    assert not hosts.late(HOSTS[0], "t", 40.0, 50.0)
    assert not hosts.late(HOSTS[0], "t", 50.0, 50.0 + REST_S / 2)
    assert hosts.choose(address, "t", 51.0) is HOSTS[0]
    assert hosts.late(HOSTS[0], "t", 50.0, 60.0) and hosts.choose(address, "other", 60.0) is HOSTS[0]


@pytest.mark.parametrize("tenant", ["", "t"])
def test_a_longer_rest_stays(tenant: str) -> None:
    """Prompts that were under way together end one by one: the last one, which waited least, ends no longer rest.
    Control: a longer one does count."""
    hosts = PrefillHosts(HOSTS[:1])
    for seconds, until in ((30.0, 30.0), (REST_S, 30.0), (40.0, 40.0)):
        hosts.rest(HOSTS[0], 0.0, seconds, tenant=tenant)
        assert hosts.choose("", "t", until - 1) is None and hosts.choose("", "t", until) is HOSTS[0]


def test_tenants_that_leave_are_not_remembered() -> None:
    """What a host is told of a thousand tenants, one after the other, is forgotten some time after their rests.
    Control: a row of failures goes on until then."""
    hosts = PrefillHosts(HOSTS[:1])
    load = hosts._load
    for number in range(1_000):
        now = 100.0 * number
        assert hosts.taken(HOSTS[0], f"t{number}", now, nothing=True) == REST_S
        assert hosts.taken(HOSTS[0], f"t{number}", now + REST_S, nothing=True) == 2 * REST_S
        hosts.rest(HOSTS[0], now, tenant=f"t{number}")
    assert len(load(HOSTS[0]).empty) < 10 and len(load(HOSTS[0]).tenant_rests) < 10


def test_what_the_engine_had_is_known_by_tenant_and_model() -> None:
    """The beginning of a prompt is known to a stride, under the same namespace key and model alone; no more hashes are
    kept than stated."""
    known, step = KnownPrompts(), STRIDE_BLOCKS * 16
    prompt = array("I", range(5 * step))
    known.learn(b"k" * 32, "m", prompt[: 3 * step + 5], 16)
    assert known.tokens(b"k" * 32, "m", prompt, 16) == 3 * step
    assert known.tokens(b"k" * 32, "m", prompt[1:], 16) == 0
    assert known.tokens(b"o" * 32, "m", prompt, 16) == 0
    assert known.tokens(b"k" * 32, "n", prompt, 16) == 0
    known.learn(b"k" * 32, "m", array("I", range(step * (MAX_KNOWN + 9))), 16)
    assert len(known) == MAX_KNOWN


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (("10.0.0.1:8471",), "10.0.0.1:8471"),
        (("a:1", "b:1"), ""),
        ((), ""),
        (("x" * 300,), ""),
        (("a b:1",), ""),
        (("[fd00::1]:8471",), "[fd00::1]:8471"),
    ],
    ids=["one", "two", "none", "long", "blank", "v6"],
)
def test_a_header_that_is_no_name_is_no_error(values: tuple[str, ...], wanted: str) -> None:
    """One HOST:PORT is taken; anything else counts as none."""
    assert named_prefiller(values) == wanted


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"role": "decode", "tls": TLS}, "needs prefill_hosts"),
        ({"role": "decode", "prefill_hosts": [HOSTS[0].model_dump()]}, "needs tls"),
        ({"role": "prefill", "tls": TLS, "listen": "0.0.0.0:1"}, "needs listen, and decode_hosts"),
        ({"prefill_hosts": [HOSTS[0].model_dump()] * 2}, "two of prefill_hosts"),
        ({"decode_hosts": ["dns:host-a"]}, "no identity of a host"),
        ({"listen": "nowhere"}, "not HOST:PORT"),
    ],
    ids=["no-hosts", "no-tls", "no-callers", "twice", "no-spiffe", "no-port"],
)
def test_a_section_that_cannot_work_is_refused(section: dict[str, object], problem: str) -> None:
    """The error names what is missing; the default is ``mixed``, which asks for nothing (control)."""
    with pytest.raises(ValidationError, match=problem):
        SplitConfig.model_validate(section)
    assert SplitConfig().role == "mixed"
