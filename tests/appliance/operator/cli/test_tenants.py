"""``athanor tenant add``, ``list``, ``show`` and ``remove`` over real files, against a real admin listener."""

from __future__ import annotations

import json
import shlex
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from appliance.common.credentials import read_key_records
from appliance.common.policy_signature import check_signed
from appliance.common.status import ReloadOutcome
from appliance.common.usage.book import open_book
from appliance.operator.cli import tenant as tenant_command
from appliance.operator.cli.tenant_view import value_text
from appliance.operator.key_table import KeyFiles, WantedKey, changing
from appliance.supervisor.batches.book import open_book as open_store
from isolation.keys.keyring import Keyring
from isolation.keys.root import create_root, read_root
from isolation.keys.signing import load_or_make
from policy.files import read_sources
from policy.loader import load_policy
from policy.model import PolicySet
from tests.appliance import golden
from tests.appliance.admin_server import FakeAppliance
from tests.appliance.common.audit.entries import filled
from tests.appliance.operator.cli.conftest import Run, without_digests

GOLDEN = Path(__file__).with_name("golden")

NOBODY = "http://127.0.0.1:9"
"""Nothing answers there."""

POLICY = """\
# Who may use what.
version: 1
defaults:
  limits: {requests_per_minute: 300}
tenant_groups:
  staff:
    models: ["*"]
    limits: {tokens_per_minute: {rate: 500000, burst: 900000, exceeded: queue}, max_output_tokens: 64}
tenants:
  # the first one
  alpha:
    credentials: ["key:alpha-1", "spiffe://example.org/a"]   # both
    inherits: staff
    limits: {concurrency: 8}
    # weight: 2

  beta:
    credentials: ["key:beta-1", "key:beta-gone"]
    class: strict
    kv: {reservation: 20%}
    models: ["m"]
prices:
  currency: EUR
  rules:
    - {models: ["*"], input: 1, output: 2}
"""

DROP_IN = 'version: 1\ntenants:\n  gamma: {credentials: ["key:gamma-1"], models: ["m"], retention: none}\n'


class Place:
    """An appliance's configuration with policy, keys, keyring and usage book."""

    def __init__(self, folder: Path, policy: str = "policy.yaml") -> None:
        self.folder = folder
        self.policy = folder / policy
        self.config = folder / "athanor.yaml"
        self.values = {
            "run_dir": str(folder / "run"),
            "policy": policy,
            "models": [{"name": "m", "path": str(folder)}],
            "credentials": "credentials.json",
            "pepper": "pepper",
            "audit": {"directory": "audit"},
            "keys": {"root_key": "root-key", "keyring": "keyring"},
        }
        (folder / "audit").mkdir()
        (folder / "policy.d").mkdir()
        (folder / "policy.d" / "gamma.yaml").write_text(DROP_IN)
        (folder / "policy.yaml").write_text(POLICY)
        create_root(folder / "root-key")
        self.configure()
        now = datetime.now(UTC)
        with changing(KeyFiles(folder / "credentials.json", folder / "pepper"), make=True) as table:
            for one in ("alpha-1", "beta-1", "gamma-1"):
                table.add(WantedKey(tenant=one[:-2], id=one), now)
            table.add(WantedKey(tenant="beta", id="beta-old", expires=now - timedelta(days=1)), now)

    def configure(self, **values: object) -> None:
        """Write the configuration with other values."""
        self.values |= values
        self.config.write_text(json.dumps(self.values))

    def loaded(self) -> PolicySet:
        """The policy on the disk."""
        return load_policy(read_sources(self.policy))

    def revoked(self) -> set[str]:
        """Ids of the keys that are revoked."""
        return {name for name, one in read_key_records(self.folder / "credentials.json").items() if one.revoked}

    def keys(self) -> set[str]:
        """Ids of all keys."""
        return {*read_key_records(self.folder / "credentials.json")}

    def state(self) -> dict[str, bytes]:
        """Policy files and key table."""
        files = [*self.folder.glob("policy*"), *(self.folder / "policy.d").iterdir(), self.folder / "credentials.json"]
        return {path.name: path.read_bytes() for path in files if path.is_file()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A place."""
    return Place(tmp_path)


@pytest.fixture
def used(place: Place) -> Place:
    """A place whose book has three requests of alpha today, and whose disk keeps files and a batch of beta."""
    now = int(datetime.now(UTC).timestamp() * 1_000)
    sums = {"input_tokens": 1_000, "cached_tokens": 400, "output_tokens": 70, "cost": 1_140_000}
    book, _ = open_book(place.folder / "audit")
    entries = [filled("request", request=f"r{one}", tenant="alpha", model="m", **sums) for one in range(3)]
    book.apply("log", 0, [(now, one) for one in entries])
    book.close()
    place.configure(batches={"directory": "kept"})
    keyring = Keyring(place.folder / "keyring", read_root(place.folder / "root-key"))
    keyring.derive("beta", bytes(32), b"test")
    with closing(open_store(place.folder / "kept", keyring)) as store, store.change() as changing_store:
        changing_store.execute(
            "INSERT INTO files (id, tenant, kek, purpose, batch, ok, name, size, parts, whole, created, expires) "
            "VALUES ('f', 'beta', x'', 'batch', '', 1, x'', 2048, 1, 1, 0, 0)"
        )
        changing_store.execute("INSERT INTO used VALUES ('beta', 2048)")
        changing_store.execute(
            "INSERT INTO batches (id, tenant, kek, credential, endpoint, input_file, status, created, expires, total, "
            "notes) VALUES ('b', 'beta', x'', 'key:beta-1', '', 'f', 'in_progress', 0, 0, 3, x'')"
        )
    keyring.close()
    return place


def test_a_tenant_is_added_with_a_key(run: Run, place: Place, appliance: FakeAppliance) -> None:
    """The policy has it, with every other line as it was, and is in force; its key holds and was printed once."""
    at = ("-c", str(place.config), "--admin", appliance.url)
    told = run("tenant", "add", "acme", "--models", "m, qwen3-*", "--key", "--expires", "90d", *at)
    assert told.exit_code == 0, told.output
    assert "acme" in told.stdout
    assert "is new: models m and qwen3-*" in " ".join(told.stdout.split())
    assert "in force" in told.stdout
    assert appliance.reloads == 1
    [key] = place.keys() - {"alpha-1", "beta-1", "beta-old", "gamma-1"}
    entry_of = f'  acme:\n    credentials: ["key:{key}"]\n    models: ["m", "qwen3-*"]\n'
    assert place.policy.read_text() == POLICY.replace("prices:", f"{entry_of}prices:".replace("  acme", "\n  acme"))
    record = read_key_records(place.folder / "credentials.json")[key]
    assert (record.tenant, record.expires is not None) == ("acme", True)
    assert told.stdout.count(f"ath_{key}_") == 1
    again = run("tenant", "add", "acme", "--models", "m", "--key", *at)
    assert (again.exit_code, "there is a tenant acme already" in again.stderr) == (1, True)


def test_a_group_gives_the_models_and_a_credential_takes_the_place_of_a_key(run: Run, place: Place) -> None:
    """A tenant of a group needs no models, and one with a certificate no key; class and reservation are written."""
    at = ("-c", str(place.config), "--admin", NOBODY)
    words = ("--group", "staff", "--credential", "spiffe://example.org/n", "--class", "strict", "--reservation", "10%")
    told = run("tenant", "add", "new", *words, *at)
    assert told.exit_code == 0, told.output
    assert "in force at the next start" in told.stdout
    tenant = place.loaded().tenants["new"]
    assert (tenant.models, tenant.credentials, tenant.isolation_class) == (
        ("*",),
        ("spiffe://example.org/n",),
        "strict",
    )
    assert place.keys() == {"alpha-1", "beta-1", "beta-old", "gamma-1"}


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["No!", "--key", "--models", "m"], 1, "is no tenant id"),
        (["gamma", "--key", "--models", "m"], 1, "there is a tenant gamma already"),
        (["new", "--key", "--group", "stuff"], 1, "no tenant group 'stuff'"),
        (["new", "--models", "m"], 2, "new has no credential"),
        (["new", "--key"], 2, "new has no models"),
        (["new", "--models", "m", "--credential", "key:x", "--expires", "3d"], 2, "--expires is the end of the key"),
        (["new", "--models", "m", "--key", "--expires", "soon"], 1, "soon"),
        (["new", "--models", "m", "--credential", "key:alpha-1"], 1, "belongs to tenant 'alpha' already"),
        (["new", "--models", "m", "--key", "--class", "strict"], 1, "needs a part of the KV pool"),
        (["new", "--models", "a b", "--key"], 1, "does not fit the pattern"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(
    run: Run, place: Place, words: list[str], status: int, said: str
) -> None:
    """Each mistake is told, as a usage error or at its place in the text; neither policy nor key table changes."""
    before = place.state()
    told = run("tenant", "add", *words, "-c", str(place.config), "--admin", NOBODY, columns=160)
    assert (told.exit_code, said in " ".join(told.output.split())) == (status, True), told.output
    assert place.state() == before


def test_a_refusal_leaves_neither_tenant_nor_key(run: Run, place: Place, appliance: FakeAppliance) -> None:
    """An appliance that refuses the policy, and a person who does not agree, leave everything as it was; of a removal
    too, whose keys are not revoked."""
    before = place.state()
    appliance.outcome = ReloadOutcome(ok=False, digest="d", problems=("the pool is too small",), message="no")
    at = ("-c", str(place.config), "--admin", appliance.url)
    for words in (("add", "new", "--models", "m", "--key"), ("remove", "beta")):
        told = run("tenant", *words, *at)
        assert (told.exit_code, "the pool is too small" in told.stderr, place.state()) == (1, True, before)
        assert "ath_new" not in told.stdout


def test_a_person_is_asked(run: Run, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal a no changes nothing, and ``--yes`` does not ask."""
    before = place.state()
    monkeypatch.setattr(tenant_command, "_is_person", lambda: True)
    at = ("-c", str(place.config), "--admin", NOBODY)
    for words in (("add", "new", "--models", "m", "--key"), ("remove", "beta")):
        told = run("tenant", *words, *at, typed="n\n")
        assert (told.exit_code, "nothing was done" in told.stderr, place.state()) == (1, True, before)
    assert run("tenant", "remove", "beta", *at, "--yes").exit_code == 0
    assert "beta" not in place.loaded().tenants


def test_a_folder_has_a_file_for_new_tenants(run: Run, tmp_path: Path) -> None:
    """Where the policy is a folder, new tenants come to tenants.yaml, which is made; a tenant leaves its own file."""
    place = Place(tmp_path, "policy.d")
    at = ("-c", str(place.config), "--admin", NOBODY)
    for name in ("new", "newer"):
        assert run("tenant", "add", name, "--models", "m", "--credential", f"key:{name}", *at).exit_code == 0
    assert {*place.loaded().tenants} == {"gamma", "new", "newer"}
    written = (tmp_path / "policy.d" / "tenants.yaml").read_text()
    assert [line for line in written.splitlines() if not line.startswith("    ")] == [
        "version: 1",
        "tenants:",
        "  new:",
        "  newer:",
    ]
    assert run("tenant", "remove", "gamma", *at).exit_code == 0
    assert (tmp_path / "policy.d" / "gamma.yaml").read_text() == "version: 1\ntenants: {}\n"


def test_a_signed_policy_is_signed_again_or_drafted(run: Run, place: Place, appliance: FakeAppliance) -> None:
    """With policy_keys an unsigned change is refused before anything is written, and says what to do; --sign signs what
    it writes, also a drop-in; --draft writes a whole policy that sign and apply take, and changes nothing else."""
    key, _ = load_or_make(place.folder / "policy.key")
    place.configure(policy_keys=[key.public.hex()])
    at = ("-c", str(place.config), "--admin", appliance.url)
    add = ("tenant", "add", "new", "--models", "m", "--key")
    before = place.state()
    told = run(*add, *at)
    assert (told.exit_code, place.state(), appliance.reloads) == (1, before, 0)
    assert "--sign FILE" in told.stderr
    assert "--draft DIR" in told.stderr
    load_or_make(place.folder / "other.key")
    told = run(*add, *at, "--sign", str(place.folder / "other.key"))
    assert (told.exit_code, "not among policy_keys" in told.output, place.state()) == (1, True, before)
    draft = place.folder / "draft"
    told = run(*add, *at, "--draft", str(draft))
    assert told.exit_code == 0, told.output
    assert f"athanor policy apply {draft}/policy.yaml" in told.stdout
    assert {name: data for name, data in place.state().items() if name != "credentials.json"} == {
        name: data for name, data in before.items() if name != "credentials.json"
    }
    assert (draft / "policy.d" / "gamma.yaml").read_text() == DROP_IN
    assert run("policy", "sign", str(draft / "policy.yaml"), "--key", str(place.folder / "policy.key")).exit_code == 0
    assert run("policy", "apply", str(draft / "policy.yaml"), *at, "--yes").exit_code == 0
    check_signed(read_sources(place.policy), place.policy, (key.public.hex(),))
    assert "new" in place.loaded().tenants
    told = run("tenant", "remove", "gamma", *at, "--sign", str(place.folder / "policy.key"))
    assert told.exit_code == 0, told.output
    check_signed(read_sources(place.policy), place.policy, (key.public.hex(),))
    assert "gamma" not in place.loaded().tenants


def test_removal_ends_all_and_shreds_where_told(run: Run, used: Place, appliance: FakeAppliance) -> None:
    """What ends is shown; the policy has every line but the tenant's, its keys are revoked, those of others are not;
    what is sealed stays until it is shredded, and with --shred its key is destroyed too."""
    at = ("-c", str(used.config), "--admin", appliance.url)
    told = run("tenant", "remove", "beta", *at)
    assert told.exit_code == 0, told.output
    golden.check(GOLDEN / "tenant-remove-80.txt", without_digests(told.stdout))
    begin, end = POLICY.index("  beta:"), POLICY.index("prices:")
    assert used.policy.read_text() == POLICY[:begin].rstrip() + "\n" + POLICY[end:]
    assert used.revoked() == {"beta-1", "beta-old"}
    assert (used.folder / "keyring" / "beta.kek").exists()
    used.policy.write_text(POLICY)
    told = run("tenant", "remove", "beta", *at, "--shred", "--yes")
    assert told.exit_code == 0, told.output
    assert "its key is destroyed" in told.stdout
    assert not (used.folder / "keyring" / "beta.kek").exists()
    unknown = run("tenant", "remove", "betta", *at)
    assert (unknown.exit_code, "no tenant 'betta'" in unknown.stderr) == (1, True)


def test_a_list_that_would_be_too_short_is_told(run: Run, place: Place) -> None:
    """A sharing group of two and a prefix of one tenant have to go first; a longer list loses the tenant."""
    at = ("-c", str(place.config), "--admin", NOBODY)
    share = "sharing_groups:\n  lab: {tenants: [alpha, delta]}\n"
    delta = '  delta: {credentials: ["key:d"], models: ["m"]}\n  eps: {credentials: ["key:e"], models: ["m"]}\n'
    place.policy.write_text(POLICY.replace("prices:", f"{delta}{share}prices:"))
    told = run("tenant", "remove", "delta", *at)
    assert (told.exit_code, "sharing group lab would have one tenant" in told.stderr) == (1, True)
    place.policy.write_text(place.policy.read_text().replace("[alpha, delta]", "[alpha, delta, eps]"))
    assert run("tenant", "remove", "delta", *at).exit_code == 0
    assert place.loaded().groups["lab"].tenants == ("alpha", "eps")


def test_tenants_are_listed(run: Run, used: Place, appliance: FakeAppliance) -> None:
    """Each with class, group, models, keys in force, what runs and what it used today; the same in JSON."""
    at = ("-c", str(used.config), "--admin", appliance.url)
    for columns in (80, 120):
        told = run("tenant", "list", *at, columns=columns)
        assert told.exit_code == 0, told.output
        golden.check(GOLDEN / f"tenant-list-{columns}.txt", told.stdout)
    found = {one["tenant"]: one for one in json.loads(run("tenant", "list", *at, "-o", "json").stdout)["tenants"]}
    alpha = {name: found["alpha"][name] for name in ("group", "keys", "running", "requests_today", "tokens_today")}
    assert alpha == {"group": "staff", "keys": 1, "running": 3, "requests_today": 3, "tokens_today": 3_210}
    assert (found["beta"]["credentials"], found["beta"]["keys"], found["beta"]["cost_today"]) == (2, 1, "0")
    assert found["gamma"]["running"] is None


def test_one_tenant_is_shown_whole(run: Run, used: Place, appliance: FakeAppliance) -> None:
    """Each setting with where it is written, credentials, use, and what is kept."""
    at = ("-c", str(used.config), "--admin", appliance.url)
    for name in ("alpha", "beta"):
        told = run("tenant", "show", name, *at, columns=100)
        assert told.exit_code == 0, told.output
        text = told.stdout.replace(str(used.folder), "/etc/athanor")
        golden.check(GOLDEN / f"tenant-show-{name}-100.txt", text)
    page = json.loads(run("tenant", "show", "alpha", *at, "-o", "json").stdout)
    settings = {one["path"]: one for one in page["settings"]}
    assert settings["limits.max_output_tokens"]["origin"]["path"] == "tenant_groups.staff.limits.max_output_tokens"
    assert settings["limits.requests_per_minute"]["origin"]["path"] == "defaults.limits.requests_per_minute"
    assert settings["limits.concurrency"]["origin"]["path"] == "tenants.alpha.limits.concurrency"
    assert settings["weight"]["origin"] is None
    assert page["used"]["today"]["cost"] == "0.00342"


def test_the_commands_of_the_document_work(run: Run, place: Place, root: Path) -> None:
    """docs/policy.md: the commands of its section on tenants, in their order."""
    section = (root / "docs/policy.md").read_text().partition("## Tenants that come and go")[2].partition("\n## ")[0]
    lines = section.partition("```sh\n")[2].partition("```")[0].splitlines()
    assert [line.split()[2] for line in lines] == ["add", "list", "show", "remove"]
    for line in lines:
        told = run(*shlex.split(line)[1:], "-c", str(place.config), "--admin", NOBODY)
        assert told.exit_code == 0, (line, told.output)
    assert place.policy.read_text() == POLICY


def test_what_is_not_known_is_said(run: Run, place: Place) -> None:
    """Without an appliance, a book and a key table the rest is shown, and standard error has the reasons."""
    (place.folder / "credentials.json").unlink()
    told = run("tenant", "list", "-c", str(place.config), "--admin", NOBODY)
    assert told.exit_code == 0, told.output
    for word in ("not known: keys:", "not known: use:", "not known: what runs:"):
        assert word in told.stderr
    shown = run("tenant", "show", "alpha", "-c", str(place.config), "--admin", NOBODY)
    assert (shown.exit_code, "running now: not known" in shown.stdout) == (0, True)
    unknown = run("tenant", "show", "alhpa", "-c", str(place.config), "--admin", NOBODY)
    assert (unknown.exit_code, "did you mean alpha?" in unknown.stderr) == (1, True)


def test_a_list_of_sections_is_read_as_words() -> None:
    """Entries of ``model_regions`` stand in parentheses, without the marks of any program."""
    value = [{"models": ["legal-*"], "regions": ["eu", "us"]}, {"models": ["m"], "regions": ["eu"]}]
    assert value_text(value) == "(models legal-*, regions eu, us), (models m, regions eu)"
