# make demo     a swarm of four nodes on this machine: installs, trains, prints the result   (ROUNDS=8 PEERS=4 ARGS=--json)
# make test     the tests, but for the slow ones                                             (ARGS="tests/optim -x")
# make help     the rest
#
# Everything is installed into .venv, and again only when pyproject.toml or constraints.txt have changed.
# PYTHON=python3.12 chooses the interpreter; PIP_ARGS goes to `pip install`, for instance to name the index of a CUDA or CPU
# build of PyTorch (docs/install.md).

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
# What `make coverage` reports (96.1 % on 2026-11-27), rounded down.
COVERAGE_FLOOR ?= 96
PEERS ?= 4
ROUNDS ?= 40
ARGS ?=
# Twice the cores of a small machine: much of four groups of tests is waiting (tests/conftest.py).
WORKERS ?= 4
EXTRAS ?= test

BIN := $(VENV)/bin
CORE := $(VENV)/.installed
TEST := $(VENV)/.installed-test
BENCH := $(VENV)/.installed-bench
# One command for all that is installed: pip then finds versions that fit together (hivemind is strict about protobuf).
# PIP_USE_PEP517 spares the users of an older pip its warnings about how three small packages are built.
INSTALL = PIP_USE_PEP517=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo install test test-slow standin gpu-test gpu-check arm64-check coverage libp2p lint format bench clean distclean

help:
	@echo "make demo       train with PEERS=$(PEERS) nodes on this machine for ROUNDS=$(ROUNDS) rounds"
	@echo "make test       run the tests, but for what only CI runs and for the slow ones"
	@echo "make test-slow  run the slow ones"
	@echo "make gpu-test   those for GPUs, on the GPU of this machine or else on a stand-in for one, which g++ builds"
	@echo "make gpu-check  all that is worth knowing of this machine's GPU, in a report for an issue"
	@echo "make arm64-check  a node for arm64, under an emulator, in a swarm with one of this machine"
	@echo "make coverage   what the tests run of the product, in their processes too; fails below $(COVERAGE_FLOOR) % of lines and branches"
	@echo "make libp2p     install py-libp2p too, without a compiler"
	@echo "make lint       ruff and mypy"
	@echo "make format     lay the code out by ruff"
	@echo "make bench      an exchange against raw TCP and hivemind"
	@echo "make install    install shoal into $(VENV), without the tools for tests"
	@echo "make clean      remove caches and build products; make distclean: $(VENV) too"

demo: $(CORE)
	@$(BIN)/shoal demo --peers $(PEERS) --rounds $(ROUNDS) $(ARGS)

install: $(CORE)

# Else each of their hundreds of processes would compile Shoal anew where the environment says to write no bytecode.
test test-slow gpu-test arm64-check coverage: export PYTHONDONTWRITEBYTECODE =

test: $(TEST)
	$(BIN)/python -m pytest -m "not slow and not ci" -n $(WORKERS) --durations=25 $(ARGS)

test-slow: $(TEST)
	$(BIN)/python -m pytest -m slow $(ARGS)

# The folder that makes this machine's CPU play a GPU, for PYTHONPATH (tests/standin).
standin: $(TEST)
	@$(BIN)/python tests/standin/build.py

# Two devices: some tests want both.
gpu-test: $(TEST)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then standin=; else \
	    standin=$$($(BIN)/python tests/standin/build.py) || exit 1; fi; set -x; \
	PYTHONPATH=$$standin STANDIN_DEVICES=2 $(BIN)/python -m pytest -m gpu -n $(WORKERS) --durations=10 $(ARGS)

gpu-check: $(TEST)
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(BIN)/python bench/gpu_check.py $(ARGS)

arm64-check: $(TEST)
	$(BIN)/python -m pytest -m slow tests/e2e/test_platforms.py $(ARGS)

coverage: $(TEST)
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) -q \
	    --cov=shoal --cov-report=term --cov-fail-under=$(COVERAGE_FLOOR) $(ARGS)

# libp2p pins a release of fastecdsa that has to be compiled; a later one has wheels. pip cannot override a pin: so first it comes alone,
# then all that it needs. What pip says of the pin afterwards can be ignored.
libp2p: $(TEST)
	@$(INSTALL) --no-deps libp2p==0.8.1
	@$(BIN)/python -c 'from importlib.metadata import requires; print(*(need for need in requires("libp2p") \
	    if not need.startswith("fastecdsa") and "extra ==" not in need), "fastecdsa>=4", sep="\n")' > $(VENV)/libp2p.txt
	@$(INSTALL) --only-binary fastecdsa -r $(VENV)/libp2p.txt

lint: $(TEST)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(TEST)
	$(BIN)/python -m ruff check --fix --select I .
	$(BIN)/python -m ruff format .

bench: $(BENCH)
	$(BIN)/python bench/exchange.py --mb 4,40,400 --against tcp,hivemind,allreduce $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -name .git -prune -o -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

$(CORE): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing shoal into $(VENV) (PyTorch is large: this takes some minutes the first time)"
	@$(INSTALL) -e .
	@touch $@

$(TEST): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing shoal and what its tests need into $(VENV)"
	@$(INSTALL) -e '.[$(EXTRAS)]'
	@touch $(CORE) $@

$(BENCH): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing shoal and what its benchmarks need into $(VENV)"
	@$(INSTALL) -e '.[bench]'
	@touch $(CORE) $@

# Debian and Ubuntu ship venv without ensurepip; where pip itself is there, it can fill the environment from outside.
$(BIN)/python:
	@say() { echo "Error: $$1" >&2; exit 1; }; \
	command -v $(PYTHON) >/dev/null || \
	    say "$(PYTHON) was not found: install Python 3.11 or newer, or name one with make PYTHON=/path/to/python3."; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    say "shoal needs Python 3.11 or newer, and $(PYTHON) is older: name another with make PYTHON=python3.12."; \
	if $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then \
	    $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); say "$(VENV) could not be created: see the lines above."; }; \
	else \
	    { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; } \
	        >/dev/null 2>&1 || { rm -rf $(VENV); \
	        say "Python's venv is not installed: sudo apt install python3-venv, then run make again."; }; \
	fi
