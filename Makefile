# The two commands of a newcomer are `make run` and `make test`; every target sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test verify pythons soak soak-short lint format proto lock bench package phoenix model-signing emulator grpc-clients clients azurite traceql triton envoy helm setup setup-dev kernels ready ready-dev clean

run: ready ## serve the embedded model in a sandbox
	@$(BIN)/athanor demo

# One worker begins with all tests that boot sandboxes or compare times, which never run beside each other and wait for
# much; the others take the remaining files, at a lower priority (tests/conftest.py). `pytest` alone runs all in order.
# With compiled kernels, since the appliances and engines of the tests decode several times slower without.
WORKERS := --dist loadgroup --no-loadscope-reorder
# A test that failed beside the others runs once more, alone (tests/again.py).
FAILED := $(VENV)/failed.json
test: ready-dev ## the whole test suite at small counts, on three workers
	$(BIN)/python -m pytest -q -n 3 $(WORKERS) -m "not full" --failed-to $(FAILED) --durations=25 --durations-min=2 \
	  || $(BIN)/python -m tests.again $(FAILED)

# What `make test` leaves out is marked `full`: image builds, the Debian package, every attack and matrix of the red team,
# all variants of models and the counts of the bars. Hours: nothing else should run on the machine meanwhile.
# In parts where the machine is not free for that long: make verify PART=1/4, and so on.
PART ?= 1/1
verify: ready-dev emulator grpc-clients clients azurite model-signing traceql triton envoy helm ## every test at its full count, on two workers, then the suite on every other Python
	$(BIN)/python -m pytest -q -n 2 $(WORKERS) --part $(PART) --durations=25 --durations-min=10
	$(if $(filter 1/1,$(PART)),$(MAKE) pythons)

# Those on the path; others by name: make pythons PYTHONS="/opt/python3.14/bin/python3.14".
PYTHONS ?= $(foreach version,3.11 3.12 3.13 3.14,$(shell command -v python$(version)))
pythons: setup-dev ## the suite on every other Python, in clones of the last commit
	@set -e; for python in $(PYTHONS); do \
	  case $$($(BIN)/python -V) in "$$($$python -V)") continue;; esac; \
	  clone=$$(mktemp -d); trap 'rm -rf "$$clone"' EXIT; echo "$$($$python -V), in $$clone"; \
	  git clone -q . "$$clone/athanor"; $(MAKE) -C "$$clone/athanor" kernels test PYTHON="$$python"; rm -rf "$$clone"; \
	done

# The seed is the date, so that each night meets another sequence; the report names the command that repeats a turn.
soak: ready-dev ## half an hour of faults under load, for every night; as root (docs/soak.md)
	$(BIN)/python -m bench.soak --minutes 30 --seed $$(date +%Y%m%d) --json .venv/soak-$$(date +%Y%m%d).json

# One sequence, so that what was sound before a change is so after it. 5: this machine cannot show it; it says why.
soak-short: ready-dev ## three minutes of faults under load; as root
	$(BIN)/python -m bench.soak --minutes 3 --seed 1 || test $$? -eq 5

lint: setup-dev ## style, types, import contracts, shell, units
	$(BIN)/python -m pytest -q tests/test_linters.py tests/test_architecture.py

format: setup-dev ## mend what the linter can; lines are wrapped by hand
	$(BIN)/ruff check --fix .

proto: setup-dev ## regenerate the gRPC code
	$(BIN)/python -m appliance.gateway.grpc.generate_code

lock: setup-dev ## renew the pinned versions
	$(BIN)/python requirements/lock.py

bench: setup-dev ## figures of the hot paths
	$(BIN)/python bench/ring.py && $(BIN)/python bench/engine.py && $(BIN)/athanor bench

package: setup ## a Debian package with everything it needs, in dist/
	$(BIN)/athanor package deb dist

# What is set up beside each other: pip and the compiler of kernels compute, and downloads wait. Lines of different parts
# may take turns.
BESIDE = +@$(MAKE) --no-print-directory --silent --jobs=4 --output-sync=line

ready: ## what `make run` needs
	$(BESIDE) setup kernels

ready-dev: ## what `make test` needs
	$(BESIDE) setup-dev kernels

# For every processor of this architecture; without a compiler the engine does without them. As `athanor kernels build`,
# which needs what pip installs.
KERNELS := $(VENV)/share/athanor/kernels
kernels: $(KERNELS)/kernels.txt
$(KERNELS)/kernels.txt: $(wildcard engine/backends/native/csrc/*) engine/backends/native/manifest.py appliance/operator/kernels.py | $(BIN)/python
	-@$(BIN)/python -m appliance.operator.kernels $(KERNELS)

setup: $(VENV)/.run $(BIN)/runsc
setup-dev: $(VENV)/.dev $(BIN)/runsc $(VENV)/.observers

# torch's CPU build where the machine's own settings offer it and no GPU is there; else its CUDA build with what that brings.
TORCH = $(if $(wildcard /dev/nvidiactl),cuda,cpu)
PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --require-hashes
# In a sandbox the sources are read-only: what is not compiled here is compiled at every start. pip compiles on one core,
# and all of it. What no sandbox imports, with more files than all others, is compiled where it is imported.
UNUSED = (accelerate|anthropic|fontTools|huggingface_hub|matplotlib|mpmath|mypy|networkx|numpy/.*/tests|openai|peft|pip|pygments|setuptools|sympy|torch/(_dynamo|_inductor|onnx|testing/_internal/distributed)|transformers)
COMPILE = $(BIN)/python -m compileall -qq -x 'site-packages/$(UNUSED)/'
SOURCES = $(VENV)/lib appliance bench engine isolation policy
define install
	$(PIP_INSTALL) -r $(1) -r requirements/$(TORCH).lock || $(PIP_INSTALL) -r $(1) -r requirements/cuda.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@# On one core where several processes cannot be had; some package always has a file of another Python.
	@$(COMPILE) -j 0 $(SOURCES) || $(COMPILE) $(SOURCES) || true
endef

# pip's script is the last file of an environment: one without it was cut off, and pip may be there in part.
$(BIN)/python: | $(BIN)/pip ;
$(BIN)/pip:
	$(PYTHON) -c 'import sys; sys.exit("Athanor needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	rm -rf $(VENV)/lib/python*/site-packages/pip $(VENV)/lib/python*/site-packages/pip-*
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: requirements/run.lock pyproject.toml | $(BIN)/python
	@echo "Installing what Athanor needs into $(VENV) ..."
	$(call install,requirements/run.lock)
	@touch $@

# The lock's pip, before two run beside each other: one would replace the other's modules.
$(VENV)/.pip: requirements/dev.lock | $(BIN)/python
	@sed -n '/^pip==/,/[^\\]$$/p' $< > $@.lock
	@$(PIP_INSTALL) -r $@.lock
	@touch $@

$(VENV)/.dev: requirements/dev.lock pyproject.toml | $(VENV)/.pip
	@echo "Installing what Athanor and its tests need into $(VENV) ..."
	$(call install,requirements/dev.lock)
	@touch $@ $(VENV)/.run

$(BIN)/runsc: | $(BIN)/python
	@$(BIN)/python images/runsc.py --into $(BIN)

# What tests look through: a Prometheus, a collector, a browser, a store, proxies, the schemas of Kubernetes. Without them
# those tests are skipped. The mark is set only when all are there: what could not be had is tried again by the next `make`.
$(VENV)/.observers: $(addprefix requirements/,observers.py debian_parts.py placing.py observers.lock kubernetes.lock) | $(VENV)/.pip
	@! $(BIN)/python requirements/observers.py --into $(BIN) || touch $@

emulator: setup-dev ## a compiler and an emulator for aarch64, for tests of its kernels
	-@$(BIN)/python requirements/observers.py --emulator $(VENV)/share/emulator

grpc-clients: setup-dev ## gRPC clients of Node and Go, for tests of the gRPC API
	-@$(BIN)/python requirements/observers.py --grpc-clients $(VENV)/share/grpc-clients

azurite: setup-dev ## a server of Azure's blob storage, for tests of pulls
	-@$(BIN)/python requirements/observers.py --azurite $(VENV)/share/azurite

traceql: setup-dev ## the grammar of TraceQL, for the test of the dashboards' queries
	-@$(BIN)/python requirements/observers.py --traceql $(VENV)/share/traceql

triton: setup-dev ## Triton 3.6 beside the environment's own, for tests that GPU kernels compile with it
	-@$(BIN)/python requirements/observers.py --triton $(VENV)/share/triton

envoy: setup-dev ## a proxy, for tests of docs/proxies.md and deploy/fleet/envoy.yaml
	-@$(BIN)/python requirements/observers.py --envoy $(VENV)/share/envoy

helm: setup-dev ## Helm and kubectl, for tests of deploy/helm/athanor and deploy/kubernetes
	-@$(BIN)/python requirements/observers.py --helm $(VENV)/share/helm

clients: setup-dev ## clients and agent frameworks of the HTTP APIs, for tests of docs/clients.md
	-@$(BIN)/python requirements/observers.py --clients .clients

model-signing: setup-dev ## an environment with model-signing, for the test of signatures that it makes
	-@$(BIN)/python requirements/observers.py --model-signing $(VENV)/model-signing

phoenix: setup-dev ## an environment with Phoenix, for the test of traces in it
	$(BIN)/python requirements/observers.py --phoenix $(VENV)/phoenix

clean:
	rm -rf $(VENV) .athanor .clients
