"""What an operator has beside a booted Debian with the appliance: clients, a Prometheus with the shipped rules, and the
times that docs/operate.md states."""

from __future__ import annotations

import contextlib
import json
import os
import py_compile
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.booted_debian import COMMAND_S, ROOT, Container
from tests.observers import observer

CONFIG, POLICY, CREDENTIALS = (f"/etc/athanor/{name}" for name in ("athanor.yaml", "policy.yaml", "credentials.json"))
MODEL = "athanor-mini"
RULES, SCRAPES = ROOT / "docs/monitoring/alerts.yaml", ROOT / "docs/monitoring/prometheus.yml"
TOKEN = "/etc/athanor/metrics-token"

FACTOR = 10
"""Every duration of the rules and of the scrapes is divided by it: windows, `for:`, intervals, and how far a line is
extended. Thresholds are as shipped, and so are all times of the appliance."""

AS_SHIPPED = ("AthanorDown", "AthanorSandboxDown")
"""Alerts that wait as long as shipped: for a restart, whose time no factor divides."""

CALL = r"""
import http.client, json, os, secrets, ssl, sys, threading
given = json.loads(sys.argv[1])
counts, lock, no_check = {}, threading.Lock(), ssl._create_unverified_context()


def once():
    where, timeout_s = ("127.0.0.1", given["port"]), given["timeout_s"]
    if given["tls"]:
        connection = http.client.HTTPSConnection(*where, timeout=timeout_s, context=no_check)
    else:
        connection = http.client.HTTPConnection(*where, timeout=timeout_s)
    headers = {"Authorization": "Bearer " + given["key"], "Content-Type": "application/json"}
    body = json.dumps(given["body"]).replace("NONCE", secrets.token_hex(8))
    try:
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()
    if answer.status != 200:
        return f"{answer.status} {json.loads(text)['error'].get('code') or json.loads(text)['error']['type']}"
    return "stream ended by an error" if '"error"' in text else "answered"


def go():
    left = given["times"]
    while left != 0 and not (given["end"] and os.path.exists(given["end"])):
        left -= 1
        outcome = once()
        with lock:
            counts[outcome] = counts.get(outcome, 0) + 1


threads = [threading.Thread(target=go) for _ in range(given["callers"])]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(counts))
"""
"""Asks as several callers at once, so many times each or until a file is there; every NONCE is another word."""

TAKE_SPANS = r"""
import http.server
class Taker(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        open("/root/spans", "a").write(self.path + "\n")
http.server.HTTPServer(("127.0.0.1", 4318), Taker).serve_forever()
"""
"""A collector that notes each batch of spans."""


def promises() -> dict[str, float]:
    """Seconds that docs/operate.md promises, by step."""
    section = (ROOT / "docs/operate.md").read_text().partition("\n## Times")[2].partition("\n## ")[0]
    return {step: float(seconds) for step, seconds in re.findall(r"^\| (.+?) \| (\d+) s \|$", section, re.MULTILINE)}


def rules() -> dict[str, dict[str, Any]]:
    """The shipped alerts by name."""
    groups = YAML(typ="safe").load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def seconds_of(duration: str) -> float:
    """A duration as Prometheus writes it."""
    return float(duration[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[duration[-1]]


def held_s(alert: str) -> float:
    """For how long the condition of an alert holds before it fires, as ``shorten`` leaves it."""
    return seconds_of(rules()[alert].get("for", "0s")) / (1 if alert in AS_SHIPPED else FACTOR)


def shorten(text: str) -> str:
    """Divide every duration of rules or of a configuration by ``FACTOR``, but the waits of ``AS_SHIPPED``."""
    return "".join(map(_shorten_part, re.split(r"(?=- alert: )", text)))


def _shorten_part(text: str) -> str:
    keeps = text.startswith(tuple(f"- alert: {name}\n" for name in AS_SHIPPED))

    def divided(found: re.Match[str]) -> str:
        return f"{found[1]}{round(seconds_of(found[2]) * 1000 / FACTOR)}ms{found[3]}"

    text = re.sub(r"(\[)(\d+[smhd])(\])", divided, text)
    text = re.sub(r"(offset )(\d+[smhd])\b()", divided, text)
    waits = "interval|_interval" if keeps else "\\bfor|interval|_interval"
    text = re.sub(rf"((?:{waits}): )(\d+[smhd])\b()", divided, text)
    return re.sub(r"(predict_linear\(.*\], )4 \* 3600\)", rf"\g<1>4 * {3600 // FACTOR})", text)


class Operator:
    """An operator's hands in the container: files, clients, and the alerts of a Prometheus."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self.port, self.tls = 8080, False
        self.measured: list[tuple[str, float, float]] = []
        """Step, seconds that it took, seconds that the document promises."""
        self._promises = promises()

    @contextlib.contextmanager
    def within(self, step: str) -> Iterator[None]:
        """The block takes no longer than docs/operate.md promises for the step."""
        begin = time.monotonic()
        yield
        took = time.monotonic() - begin
        self.measured.append((step, took, self._promises[step]))
        print(f"{step}: {took:.1f} s of {self._promises[step]:g} s")
        assert took <= self._promises[step], step

    def path(self, inside: str) -> Path:
        """A file of the container as this machine sees it."""
        return self.container.root / inside.lstrip("/")

    def edit(self, inside: str, *changes: tuple[str, str]) -> str:
        """Replace texts in a file, which keeps owner and mode; gives what it was."""
        path = self.path(inside)
        before = text = path.read_text()
        for old, new in changes:
            assert old in text, (old, text)
            text = text.replace(old, new)
        path.write_text(text)
        return before

    def succeed(self, *argv: str) -> str:
        """Run a command that has to end with 0."""
        status, said = self.attempt(*argv)
        assert status == 0, (argv, said, self.container.journal("-n", "30", "-o", "cat"))
        return said

    def attempt(self, *argv: str) -> tuple[int, str]:
        """Exit status of a command, and what it said."""
        said = self.container.run("sh", "-c", '"$@" 2>&1; echo "status $?"', "sh", *argv)
        before, _, number = said.rpartition("status ")
        return int(number), before.strip()

    def findings(self) -> list[dict[str, str]]:
        """What the doctor finds."""
        said = self.container.run("sh", "-c", "athanor doctor -o json 2>/dev/null")
        return list(json.loads(said)["findings"])

    def problems(self) -> list[dict[str, str]]:
        """What the doctor calls a problem."""
        return [one for one in self.findings() if one["level"] == "problem"]

    def status(self) -> dict[str, Any]:
        """``athanor status``, or nothing while it does not answer."""
        said = self.container.run("sh", "-c", "athanor status -o json 2>/dev/null")
        with contextlib.suppress(ValueError):
            return dict(json.loads(said))
        return {}

    def sandbox(self, role: str = "engine") -> dict[str, Any]:
        """A sandbox as status has it."""
        return dict(self.status()["models"][0][role])

    def _command(
        self, tenant: str, callers: int, times: int, end: str, timeout_s: float, body: dict[str, Any]
    ) -> list[str]:
        body = {"model": MODEL, "prompt": "What is a sandbox?", "max_tokens": 4, **body}
        given = {"port": self.port, "tls": self.tls, "key": self.container.keys[tenant], "callers": callers}
        given |= {"times": times, "end": end, "timeout_s": timeout_s, "body": body}
        return ["python3", "-c", CALL, json.dumps(given)]

    def call(
        self, tenant: str = "alpha", *, callers: int = 1, times: int = 1, timeout_s: float = 60, **body: Any
    ) -> dict[str, int]:
        """Outcomes of requests, counted."""
        return dict(json.loads(self.container.run(*self._command(tenant, callers, times, "", timeout_s, body))))

    def answered(self, tenant: str = "alpha", seconds: float = 60) -> None:
        """Wait for an answer."""
        self.container.until(lambda: self.call(tenant) == {"answered": 1}, seconds)

    @contextlib.contextmanager
    def calling(
        self, tenant: str = "alpha", *, callers: int = 1, times: int = -1, timeout_s: float = 120, **body: Any
    ) -> Iterator[dict[str, int]]:
        """Callers that ask while the block runs; what became of it is in the dictionary afterwards."""
        end = f"/root/end-{os.urandom(4).hex()}"
        counts: dict[str, int] = {}
        command = self._command(tenant, callers, times, end, timeout_s, body)
        client = subprocess.Popen([*self.container.enter(), *command], stdout=subprocess.PIPE, text=True)
        try:
            yield counts
        finally:
            self.container.run("touch", end)
            counts.update(json.loads(client.communicate(timeout=COMMAND_S)[0]))

    def restart(self, *units: str) -> None:
        """Restart units, both by default, and wait for an answer."""
        self.container.run("systemctl", "reset-failed")
        self.succeed("systemctl", "restart", *(units or ("athanor-supervisor", "athanor-gateway")))
        # A request that waits for a start would be one with a late first token.
        self.container.until(self.ready, 60)
        self.answered()

    def ready(self) -> bool:
        """Whether both sandboxes are."""
        models = self.status().get("models", [])
        return bool(models) and {models[0][role]["state"] for role in ("engine", "text")} == {"ready"}

    def kill(self, pid: object, how: str = "KILL") -> None:
        """Send a signal to a process of the container."""
        self.succeed("sh", "-c", f"kill -{how} {pid}")

    @contextlib.contextmanager
    def defect(self, module: str, *changes: tuple[str, str]) -> Iterator[None]:
        """The installed package has a defect, for the sandboxes that are started while the block runs."""
        (path,) = self.path("/usr/lib/athanor/lib").glob(f"python3.*/site-packages/{module}")
        before = path.read_text()

        def write(text: str) -> None:
            path.write_text(text)
            inside = f"/{path.relative_to(self.container.root)}"
            unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(path), dfile=inside, doraise=True, invalidation_mode=unchecked)

        text = before
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        write(text)
        try:
            yield
        finally:
            write(before)

    # The alerts.

    def watch(self) -> None:
        """Start a Prometheus in the container, with the shipped configuration and rules, ``FACTOR`` times as quick; one
        that runs is ended, and what it has seen removed."""
        self.container.run("systemctl", "stop", "prometheus")
        self.container.run("rm", "-rf", "/root/data")
        program = self.path("/usr/local/bin/prometheus")
        if not program.exists():
            shutil.copy(observer("prometheus"), program)
        self.path("/root/alerts.yaml").write_text(shorten(RULES.read_text()))
        text = shorten(SCRAPES.read_text()).replace("/etc/prometheus/athanor-token", TOKEN)
        self.path("/root/prometheus.yml").write_text(text)
        options = ("--config.file=/root/prometheus.yml", "--storage.tsdb.path=/root/data", "--log.level=error")
        argv = ("/usr/local/bin/prometheus", *options, "--web.listen-address=127.0.0.1:9090")
        self.succeed("systemd-run", "--quiet", "--unit=prometheus", *argv)
        self.container.until(lambda: self.query('up{job="athanor"} == 1'), 30)

    def query(self, text: str) -> list[dict[str, Any]]:
        """Samples that an expression has now; none while nothing answers."""
        url = "http://127.0.0.1:9090/api/v1/query"
        said = self.container.run("curl", "-sG", url, "--data-urlencode", f"query={text}")
        with contextlib.suppress(ValueError):
            return list(json.loads(said)["data"]["result"])
        return []

    def firing(self) -> set[str]:
        """Alerts that fire now."""
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="firing"}')}

    def pending(self) -> set[str]:
        """Alerts whose condition holds, and that do not fire yet."""
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="pending"}')}

    def episodes(self) -> dict[str, int]:
        """How many times each alert has begun to fire, for whatever labels; what falls silent for less than two minutes
        has not ended."""
        moments: dict[str, list[float]] = {}
        for one in self.query('ALERTS{alertstate="firing"}[3h]'):
            moments.setdefault(one["metric"]["alertname"], []).extend(moment for moment, _ in one["values"])
        # Windows are shorter and restarts are not: one cause may let its alert fire, fall silent and fire again.
        gap = 120.0
        return {
            name: 1 + sum(after - before > gap for before, after in zip(sorted(found), sorted(found)[1:], strict=False))
            for name, found in moments.items()
        }
