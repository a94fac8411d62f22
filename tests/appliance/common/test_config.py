"""``athanor.yaml``: what is wrong is said with line and column, and nothing is guessed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from appliance.common.addresses import split_address
from appliance.common.config_loader import load_config
from appliance.common.errors import ConfigError

GOOD = """\
listen: {http: "127.0.0.1:0", grpc: "127.0.0.1:0", admin: "unix:admin.sock"}
models:
  - {name: m, path: model, dtype: float32}
policy: policy.yaml
credentials: credentials.json
pepper: pepper
run_dir: run
"""


def write(tmp_path: Path, text: str) -> Path:
    """The text as a file."""
    path = tmp_path / "athanor.yaml"
    path.write_text(text)
    return path


def test_paths_are_taken_from_the_files_own_folder(tmp_path: Path) -> None:
    """A configuration can be moved with what it names."""
    config = load_config(write(tmp_path, GOOD))
    assert config.models[0].path == tmp_path / "model"
    assert config.policy == tmp_path / "policy.yaml"
    assert config.run_dir == tmp_path / "run"
    assert config.listen.admin == f"unix:{tmp_path}/admin.sock"


def test_the_metrics_listener_is_off_unless_named(tmp_path: Path) -> None:
    """Without the key there is none; a socket and a token are taken from the file's own folder, a port may be any."""
    plain = load_config(write(tmp_path, GOOD)).listen
    assert (plain.metrics, plain.metrics_token) == (None, None)
    for said, metrics in (
        ('metrics: "unix:metrics.sock", metrics_token: token', f"unix:{tmp_path}/metrics.sock"),
        ('metrics: "0.0.0.0:9464", metrics_token: token', "0.0.0.0:9464"),
    ):
        listen = load_config(write(tmp_path, GOOD.replace("listen: {", f"listen: {{{said}, "))).listen
        assert (listen.metrics, listen.metrics_token) == (metrics, tmp_path / "token")


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ('metrics: "nowhere"', "is not HOST:PORT"),
        ('metrics: "127.0.0.1:99999"', "is not HOST:PORT"),
        ('metrics: "127.0.0.1:8080"', "http and metrics name one address"),
        ('metrics: "0.0.0.0:8081"', "grpc and metrics name one address"),
        ('metrics: "127.0.0.1:8082"', "admin and metrics name one address"),
        ('admin: "unix:a.sock", metrics: "unix:a.sock"', "admin and metrics name one address"),
        ('http: "[::]:8081"', "http and grpc name one address"),
        ("metrics_token: token", "metrics_token is for the listener metrics"),
    ],
)
def test_listeners_do_not_share_an_address(tmp_path: Path, listen: str, said: str) -> None:
    """A port or socket that two listeners name, an address that is none and a token without a listener are refused,
    before anything is bound; control: other ports and free ones are taken."""
    text = GOOD.partition("\n")[2]
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        load_config(write(tmp_path, f"listen: {{{listen}}}\n{text}"))
    assert "athanor.yaml:1:" in raised.value.message
    for good in ('metrics: "127.0.0.1:9464"', 'http: "0.0.0.0:0", metrics: "0.0.0.0:0"', 'metrics: "127.0.0.2:8080"'):
        assert load_config(write(tmp_path, f"listen: {{{good}}}\n{text}")).listen.metrics is not None


def test_tenants_may_have_listeners_of_their_own(tmp_path: Path) -> None:
    """Ports and sockets, of which the latter are taken from the file's own folder; without the key there are none."""
    assert load_config(write(tmp_path, GOOD)).listen.tenants == ()
    own = "tenants: [{tenant: acme, http: 'unix:own/a.sock', grpc: '127.0.0.1:9001', group: acme}]"
    (found,) = load_config(write(tmp_path, GOOD.replace("listen: {", f"listen: {{{own}, "))).listen.tenants
    assert found.addresses == (("http", f"unix:{tmp_path}/own/a.sock"), ("grpc", "127.0.0.1:9001"))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("{tenant: acme}", "the listeners of acme have no address"),
        ("{tenant: Acme, http: '127.0.0.1:0'}", "tenant"),
        ("{tenant: acme, http: nowhere}", "is not HOST:PORT"),
        ("{tenant: acme, http: 'unix:'}", "has 1 to 107 bytes"),
        (f"{{tenant: acme, http: 'unix:/{'a' * 107}', group: a}}", "has 1 to 107 bytes"),
        ("{tenant: acme, http: 'unix:/a'}", "group says whose members"),
        ("{tenant: acme, http: '127.0.0.1:9', group: a}", "group is for Unix sockets"),
        ("{tenant: acme, http: '127.0.0.1:8081'}", "grpc and tenants.acme.http name one address"),
        ("{tenant: a, http: 'unix:/a', grpc: 'unix:/a', group: a}", "tenants.a.http and tenants.a.grpc name one"),
        ("{tenant: a, http: '127.0.0.1:9'}, {tenant: a, grpc: '127.0.0.1:10'}", "a tenant has two entries"),
        ("{tenant: a, http: 'unix:/a', group: 'a b'}", "group"),
    ],
)
def test_wrong_listeners_of_tenants_are_refused(tmp_path: Path, own: str, said: str) -> None:
    """With the place, before anything is bound."""
    text = GOOD.partition("\n")[2]
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        load_config(write(tmp_path, f"listen: {{tenants: [{own}]}}\n{text}"))
    assert "athanor.yaml:1:" in raised.value.message


def test_the_audit_log_is_beside_the_file(tmp_path: Path) -> None:
    """Its folder and key are taken from there too; without a section there is none."""
    assert load_config(write(tmp_path, GOOD)).audit is None
    audit = load_config(write(tmp_path, GOOD + "audit: {directory: log, key: secret}\n")).audit
    assert audit is not None
    assert (audit.directory, audit.key, audit.on_failure) == (tmp_path / "log", tmp_path / "secret", "continue")


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("dtype: float32", "dtype: int3", ":3:"),
        ("run_dir: run", "run_dir: run\ntypo: 1", ":8:"),
        ("name: m,", "name: '../m',", ":3:"),
        ('"127.0.0.1:0", grpc', '"nowhere", grpc', ":1:"),
        ('"127.0.0.1:0", grpc', '"unix:http.sock", grpc', ":1:"),
        ("pepper: pepper\n", "", ":1:1"),
        ("  - {name: m, path: model, dtype: float32}", "  []", ":3:"),
        ("run_dir: run", "run_dir: [", ":"),
        ("dtype: float32", "max_context: -5", ":3:"),
        ("dtype: float32", "kv_bytes: .nan", ":3:"),
        ('"unix:admin.sock"', '"0.0.0.0:8082"', ":1:"),
        ("run_dir: run", "run_dir: run\nsandbox: {image: x}", ":8:"),
        ("run_dir: run", "run_dir: run\nsandbox: {spill: {memory: 1}}", ":1:1"),
        ("run_dir: run", "run_dir: run\nsandbox: {spill: {}}\nkeys: {root_key: r, keyring: k}", ":8:"),
        ("run_dir: run", "run_dir: run\nsandbox: {spill: {disk: 1}}\nkeys: {root_key: r, keyring: k}", ":8:"),
        ("run_dir: run", "run_dir: run\nkeys: {root_key: r}", ":8:"),
        ("dtype: float32", "runner: nil", ":3:"),
        ("dtype: float32", "step_us: 5", ":3:"),
        ("dtype: float32", "pairs: template", ":3:"),
        ("dtype: float32", "labels: [good]", ":3:"),
        ("dtype: float32", "gpu: []", ":3:"),
        ("dtype: float32", "gpu: [-1]", ":3:"),
        ("dtype: float32", "gpu: all", ":3:"),
        ("dtype: float32", "gpu: auto, backend: plain", ":3:"),
        ("dtype: float32", "gpu: [0], runner: embed", ":3:"),
        ("dtype: float32", "backend: cuda", ":3:"),
        ("run_dir: run", "run_dir: run\naudit: {on_failure: stop, directory: x}", ":8:"),
        ("run_dir: run", "run_dir: run\naudit: {key: x}", ":8:"),
    ],
)
def test_problems_are_placed(tmp_path: Path, old: str, new: str, place: str) -> None:
    """Unknown keys, wrong values and missing ones are refused with file, line and column."""
    assert old in GOOD
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, GOOD.replace(old, new)))
    assert f"athanor.yaml{place}" in raised.value.message


ORIGINS = 'admin: "unix:admin.sock", cors_origins: '


def test_origins_are_listed_one_by_one(tmp_path: Path) -> None:
    """No page of another origin may call by default; a star, and a listener that demands certificates, are refused with
    the place in the file."""
    assert load_config(write(tmp_path, GOOD)).listen.cors_origins == ()
    text = GOOD.replace('admin: "unix:admin.sock"', ORIGINS + "['https://app.example', 'http://localhost:3000']")
    assert load_config(write(tmp_path, text)).listen.cors_origins == ("https://app.example", "http://localhost:3000")
    demands = ", tls: {certificate: a, key: b, client_ca: c, http_clients: required}"
    for origins, reason in (
        ("['*']", "list the origins one by one"),
        ("['https://app.example/']", "no slash at the end"),
        ("['https://app.example']" + demands, "http_clients is required"),
    ):
        with pytest.raises(ConfigError) as raised:
            load_config(write(tmp_path, GOOD.replace('admin: "unix:admin.sock"', ORIGINS + origins)))
        assert reason in raised.value.message and "athanor.yaml:" in raised.value.message


PROXIES = 'admin: "unix:admin.sock", trusted_proxies: '


def test_trusted_proxies_are_networks(tmp_path: Path) -> None:
    """Nobody is trusted by default; networks and single addresses of both kinds may be."""
    listen = load_config(write(tmp_path, GOOD)).listen
    assert (listen.trusted_proxies, listen.client_address) == ((), "x-forwarded-for")
    text = GOOD.replace('admin: "unix:admin.sock"', PROXIES + "[10.0.0.0/8, '2001:db8::/64', 192.0.2.7, '::1']")
    assert load_config(write(tmp_path, text)).listen.trusted_proxies == (
        "10.0.0.0/8",
        "2001:db8::/64",
        "192.0.2.7",
        "::1",
    )


@pytest.mark.parametrize(
    ("proxies", "reason"),
    [
        ("[proxy.internal]", "'proxy.internal' is no network"),
        ("[10.0.0.0/33]", "is no network"),
        ("[10.0.0.1/8]", "bits set behind its prefix; 10.0.0.0/8 is the whole network"),
        ("['2001:db8::1/64']", "2001:db8::/64 is the whole network"),
        ("[10.0.0.0/8, 0.0.0.0/0]", "0.0.0.0/0 trusts every peer"),
        ("['::/0']", "::/0 trusts every peer"),
        ("['10.0.0.1/0']", "trusts every peer"),
        ("[], client_address: proxy-protocol", "there are none"),
        ("[10.0.0.0/8], client_address: x-real-ip", "client_address"),
    ],
)
def test_proxies_that_cannot_be_trusted_are_refused(tmp_path: Path, proxies: str, reason: str) -> None:
    """What is no network, not exactly one, or everybody, is refused with its place and the reason."""
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, GOOD.replace('admin: "unix:admin.sock"', PROXIES + proxies)))
    assert "athanor.yaml:1:" in raised.value.message
    assert reason in raised.value.message


def test_spill_and_keys_are_read_and_anchored(tmp_path: Path) -> None:
    """A tier in memory and one on a disk; without the section there is neither, and no key is needed."""
    text = GOOD + "sandbox: {spill: {memory: 1024, disk: 4096, directory: spill}}\nkeys: {root_key: r, keyring: k}\n"
    config = load_config(write(tmp_path, text))
    assert config.sandbox.spill is not None
    assert config.sandbox.spill.directory == tmp_path / "spill"
    assert config.keys is not None
    assert (config.keys.root_key, config.keys.keyring) == (tmp_path / "r", tmp_path / "k")
    plain = load_config(write(tmp_path, GOOD))
    assert (plain.sandbox.spill, plain.keys) == (None, None)


@pytest.mark.parametrize(
    ("said", "gpu", "backend"),
    [
        ("dtype: float32", "off", "plain"),
        ("gpu: off", "off", "plain"),
        ("gpu: auto", "auto", "auto"),
        ("gpu: [0, 2], backend: device", (0, 2), "device"),
        ("backend: device", "off", "device"),
    ],
)
def test_gpus_are_asked_for(tmp_path: Path, said: str, gpu: object, backend: str) -> None:
    """No model has a GPU unless that is said, and an engine without one does not look for any."""
    config = load_config(write(tmp_path, GOOD.replace("dtype: float32", said) + "sandbox: {gpu_kernels: g}\n"))
    assert (config.models[0].gpu, config.models[0].engine_backend) == (gpu, backend)
    assert config.sandbox.gpu_kernels == tmp_path / "g"


def test_a_share_is_of_a_gpu(tmp_path: Path) -> None:
    """A share of a card goes with a card; control: with one it is taken."""
    said = "gpu: [0], gpu_share: 45"
    assert load_config(write(tmp_path, GOOD.replace("dtype: float32", said))).models[0].gpu_share == 45
    held = "gpu: auto, weights: fp8"
    assert load_config(write(tmp_path, GOOD.replace("dtype: float32", held))).models[0].weights == "fp8"
    for wrong in ("weights: fp8", "gpu: auto, backend: plain, weights: fp8", "gpu: auto, runner: embed, weights: fp8"):
        with pytest.raises(ConfigError, match="weights: fp8 are for runner: model on a GPU"):
            load_config(write(tmp_path, GOOD.replace("dtype: float32", wrong)))
    with pytest.raises(ConfigError, match="gpu_palette lays matrices in bfloat16 beside"):
        load_config(write(tmp_path, GOOD.replace("dtype: float32", f"{held}, gpu_palette: true")))
    for wrong in ("gpu_share: 45", "gpu: [0], gpu_share: 96"):
        with pytest.raises(ConfigError, match="gpu_share"):
            load_config(write(tmp_path, GOOD.replace("dtype: float32", wrong)))


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    """Names are what requests ask for, so they are unique."""
    text = GOOD.replace("policy: policy", "  - {name: m, path: other}\npolicy: policy")
    with pytest.raises(ConfigError, match="one name"):
        load_config(write(tmp_path, text))


def test_null_runners_stand_alone(tmp_path: Path) -> None:
    """A benchmark's configuration is accepted; one that would serve a model beside it is refused."""
    null = GOOD.replace("dtype: float32", "runner: 'null', step_us: 2000")
    assert load_config(write(tmp_path, null)).models[0].runner == "null"
    with pytest.raises(ConfigError, match="do not go together"):
        load_config(write(tmp_path, null.replace("policy: policy", "  - {name: n, path: other}\npolicy: policy")))


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    """The operator hears which file cannot be read and why."""
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "parts"), [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("a:65535", ("a", 65535))]
)
def test_addresses_are_split(text: str, parts: tuple[str, int]) -> None:
    """Host and port, IPv6 in brackets."""
    assert split_address(text) == parts


@pytest.mark.parametrize("text", ["", "80", ":80", "a:", "a:x", "a:70000", "a:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    """No default is guessed."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(text)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("policy: policy", "polcy: policy"), "polcy: unknown key; did you mean 'policy'?"),
        (("policy: policy", "polcy: policy"), "policy: this key is required"),
        (("dtype: float32", "dtyp: float32"), "models[0].dtyp: unknown key; did you mean 'dtype'?"),
        (("dtype: float32", "kv_bytes: a lot"), "models[0].kv_bytes: must be a whole number, found 'a lot'"),
        (("policy: policy", "sandbox: {spil: {}}\npolicy: policy"), "sandbox.spil: unknown key; did you mean 'spill'?"),
        (("policy: policy", "audit: {dir: d}\npolicy: policy"), "audit.dir: unknown key; known here: directory, "),
    ],
)
def test_problems_are_in_the_words_of_the_policy(tmp_path: Path, wrong: tuple[str, str], said: str) -> None:
    """An unknown key is told with the one that was meant, a wrong value with what was found, each at its place."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, GOOD.replace(*wrong)))
    assert re.search(rf":\d+:\d+: {re.escape(said)}", caught.value.message), caught.value.message
