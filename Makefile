# Everything runs in a virtual environment of its own, made on first use.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Python compiles what tests import, which is a small part of what pip would compile.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-runtime test-launcher test-all test-exhaustive rig-packages check docs package compat chaos soak fuzz bench clean

# More processes than cores: many tests wait for something most of the time. Files begin
# in the order of tests/conftest.py, not by how many tests they have.
PYTEST = $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder \
	--durations 30

help:
	@echo "make demo      train the digits example on three tasks of this machine"
	@echo "make test      run the tests: each feature once"
	@echo "make test-runtime   the rules of the runtime, on simulated ranks: two minutes"
	@echo "make test-launcher  the launcher without launches: two minutes"
	@echo "make test-all  run all tests but test-exhaustive; as root, install what they need"
	@echo "make test-exhaustive  variants that test-all leaves out, for more than an hour"
	@echo "make check     formatting, lint, types"
	@echo "make docs      build the site in site/"
	@echo "make package   build the packages in dist/, install the wheel, train from it"
	@echo "make compat    the runtime's tests with five versions of TensorFlow and Keras"
	@echo "make chaos     faults at random times, on this machine and rigs (TRIALS=200 HOSTS=4)"
	@echo "make soak      an hour of training with a fault every minute (MINUTES=60)"
	@echo "make fuzz      mutated inputs for every parser of outside data (EXAMPLES=20000)"
	@echo "make bench     benchmarks beside the alternatives (installs those too)"

demo: $(VENV)/.ready-demo
	$(BIN)/tfcluster launch configs/digits.yaml

test: $(VENV)/.ready-test
	$(PYTEST)

# Its files are not kept together: each test is a process of its own.
test-runtime: $(VENV)/.ready-test
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal \
		-m "not exhaustive" -k "not (op_coverage or loops_that_take)" \
		tests/runtime/test_partition.py

test-launcher: $(VENV)/.ready-test
	$(PYTEST) --ignore tests/runtime --ignore tests/launch --ignore tests/verify \
		--ignore tests/interruptions --ignore tests/rigs/chaos --ignore tests/rigs/soak \
		--ignore tests/api tests

# The packages come first: some tests of the default tier use sshd where there is one.
test-all: rig-packages
	$(PYTEST) -m 'not exhaustive'

test-exhaustive: $(VENV)/.ready-test
	$(PYTEST) -m exhaustive
	TFCLUSTER_PARTITION_EXAMPLES=10 $(BIN)/python -m pytest --numprocesses 3 \
		--dist worksteal -m "" tests/runtime/test_partition.py

rig-packages: $(VENV)/.ready-test
	$(BIN)/python -m tests.rigs.testbed install

check: $(VENV)/.ready-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.ready-publish
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# It needs TensorFlow and pytest, too.
package: $(VENV)/.ready-test $(VENV)/.ready-publish
	$(BIN)/python -m tools.package

compat: $(VENV)/.ready-test
	$(BIN)/python -m tests.compat

TRIALS ?= 200
HOSTS ?= 4

chaos: $(VENV)/.ready-test
	$(BIN)/python -m tests.rigs.chaos --trials $(TRIALS) --hosts $(HOSTS)
	$(BIN)/python -m tests.interruptions --trials $(TRIALS)

MINUTES ?= 60

soak: $(VENV)/.ready-test
	$(BIN)/python -m tests.rigs.soak --minutes $(MINUTES)

EXAMPLES ?= 20000

fuzz: $(VENV)/.ready-test
	TFCLUSTER_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -n 2 \
		--timeout $(EXAMPLES) tests/fuzz/test_mutated.py

bench: $(VENV)/.ready-bench
	$(BIN)/python -m benchmarks

# pip's own cache makes the second of these cheap.
$(VENV)/.ready-demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[tf,examples]'
	@touch $@

$(VENV)/.ready-test: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) -e '.[tf,examples,test,returnn]'
	@touch $@

$(VENV)/.ready-publish: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) -e '.[docs,package]'
	@touch $@

$(VENV)/.ready-bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[tf,examples,bench]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

clean:
	rm -rf $(VENV) .compat build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
