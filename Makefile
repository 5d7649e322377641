# Every job on this repository. `make` alone lists them; CI and pre-commit call these targets and nothing else.
PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=
BENCH ?= permute
CARGO := $(shell command -v cargo 2>/dev/null)
# For tests only: the Python module refuses to be built with it.
WITH_DEALER := --features insecure-test-dealer

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format bench docs clean

help: ## Show these targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## Make .venv and install everything (does nothing when it is up to date)
	@$(PYTHON) scripts/install.py

demo: install ## Ask a private question on this machine and see what the server saw
	@$(BIN)/cloister demo --yes

test: install ## Run all tests (PYTEST_ARGS="-k wire" for some of them)
	@if [ -d rust ]; then \
	  if [ -n "$(CARGO)" ]; then cd rust && cargo test --release -p cloister-core $(WITH_DEALER) --quiet \
	    && cargo test --release -p cloister-routing --quiet; \
	  else echo "The Rust tests are left out: cargo is not installed." >&2; fi; fi
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: install ## Check style and types
	@if [ -d rust ]; then \
	  if [ -n "$(CARGO)" ]; then cd rust && cargo fmt --check \
	    && cargo clippy --release -p cloister-core $(WITH_DEALER) --all-targets --quiet -- -D warnings \
	    && cargo clippy --release -p cloister-python -p cloister-routing --all-targets --quiet -- -D warnings; \
	  else echo "The Rust lints are left out: cargo is not installed." >&2; fi; fi
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: install ## Rewrite the code in the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@if [ -d rust ] && [ -n "$(CARGO)" ]; then cd rust && cargo fmt; fi

bench: install ## Measure (BENCH=permute; about twenty minutes) and write artefacts/bench-*.json
	@mkdir -p artefacts
	@$(BIN)/cloister bench $(BENCH) --json artefacts/bench-$(BENCH).json --plots artefacts

docs: install ## Rewrite the generated pages and check every link
	@$(BIN)/python scripts/docs.py

clean: ## Remove what was built, .venv too
	@rm -rf .venv build dist artefacts out .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
