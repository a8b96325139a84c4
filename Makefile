# One command per thing; `make test` is what CI runs. Every suite runs under a time limit that kills and a check for
# what it left behind (scripts/leftovers.py). Building is a suite of its own, so that limits measure tests only.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# The order below is part of the meaning (cheapest first), and two benchmarks at once measure nothing.
.NOTPARALLEL:

CACHE := $(HOME)/.cache/deuteron
# Outside the clone, so that a fresh clone on the same machine builds only what changed.
export CARGO_TARGET_DIR ?= $(CACHE)/target
export PATH := $(PATH):$(HOME)/.cargo/bin
export TOOLS := $(CACHE)/tools
export CARGO_DENY_VERSION := 0.20.2
export RUFF_VERSION := 0.17.4

# In CI the lock file is checked, elsewhere it follows an edited Cargo.toml.
LOCKED := $(if $(filter true,$(CI)),--locked)
DENY := $(TOOLS)/cargo-deny-$(CARGO_DENY_VERSION)/bin/cargo-deny
RUFF := $(TOOLS)/ruff-$(RUFF_VERSION)/bin/ruff
PYTHON_SOURCES := $(wildcard bench examples scripts python)
COLLECTIVE := -p deuteron-collective
LIBRARIES := $(COLLECTIVE) -p deuteron-gang -p deuteron-exchange -p deuteron-cli
# $(call suite,SECONDS) COMMAND
suite = scripts/leftovers.py $(1)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## from files to predictions: prepare, train on two ranks, predict; a few minutes on two cores
	scripts/setup.sh peers package
	.venv/bin/python examples/rossmann

setup: ## install all that the tests and the benchmark need, skipping what is there
	scripts/setup.sh tools system peers package

setup-tools:
	scripts/setup.sh tools

setup-test:
	scripts/setup.sh system peers package

check: setup-tools ## format, lints, bans, licences, sources and documentation
	cargo fmt --all --check
	$(RUFF) format --check $(PYTHON_SOURCES)
	$(RUFF) check $(PYTHON_SOURCES)
	$(DENY) $(LOCKED) check bans licenses sources
	$(call suite,900) cargo clippy $(LOCKED) --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(call suite,900) cargo doc $(LOCKED) --workspace --no-deps

format: setup-tools ## write the format that check expects
	cargo fmt --all
	$(RUFF) format $(PYTHON_SOURCES)
	$(RUFF) check --fix $(PYTHON_SOURCES)

test-fast: ## unit, documentation and cheap integration tests, under two minutes once built
	$(call suite,900) cargo test $(LOCKED) $(LIBRARIES) --no-run
	$(call suite,240) cargo test $(LOCKED) $(LIBRARIES)

test: check setup-test check-python test-python test-workspace bench-quick ## everything that CI runs, cheapest first

test-workspace:
	$(call suite,1200) cargo test $(LOCKED) --workspace --no-run
	$(call suite,1200) cargo test $(LOCKED) --workspace

check-python: setup-test ## types of the Python package, and that its stubs tell the truth
	.venv/bin/python -m mypy --strict python/deuteron python/horovod/horovod
	.venv/bin/python -m mypy.stubtest deuteron._core

test-python: setup-test ## the Python package on real processes
	$(call suite,1800) .venv/bin/python -m pytest python/tests

test-large: setup-test ## tests that need much memory or time, on demand
	$(call suite,1200) cargo test $(LOCKED) --release --workspace --tests --no-run
	$(call suite,3600) cargo test $(LOCKED) --release --workspace --tests -- --ignored
	$(call suite,7200) env DEUTERON_LARGE=1 .venv/bin/python -m pytest python/tests -k the_demo_is_as_good

fuzz: export DEUTERON_FUZZ_SECONDS ?= 600
fuzz: ## fuzz the frame decoder for DEUTERON_FUZZ_SECONDS, 600 by default
	$(call suite,1200) cargo test $(LOCKED) --release $(COLLECTIVE) --no-run
	$(call suite,$$((DEUTERON_FUZZ_SECONDS + 300))) cargo test $(LOCKED) --release $(COLLECTIVE) fuzz -- --nocapture

bench: setup-test ## compare with Gloo and Open MPI, and write docs/benchmarks.md
	$(call suite,7200) .venv/bin/python bench/run.py

bench-quick: setup-test ## a minute of the same: results are checked, ratios printed
	$(call suite,900) .venv/bin/python bench/run.py --quick

clean: ## remove what was built here; the tools stay
	cargo clean
	rm -rf .venv

.PHONY: help demo setup setup-tools setup-test check format test-fast test check-python test-python test-workspace test-large \
	fuzz bench bench-quick clean
