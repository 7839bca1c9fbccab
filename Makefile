# Everything starts from a virtual environment of its own, made on the first call and again when the
# dependencies change. `make help` lists the targets.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# PYTHON=/path/to/python chooses the interpreter; else the first of these that is 3.10 to 3.12 and can make a venv.
PYTHON ?=
CANDIDATES := python3.11 python3 python3.12 python3.10
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Extra arguments for pytest: make test ARGS='-k verify -x'
ARGS ?=

# The last two make the compiled helper, which an editable install puts beside its source.
$(STAMP): pyproject.toml constraints.txt hatch_build.py ckptengine/storage/streaming.c
	@if ! $(BIN)/python -c '$(SUITABLE)' 2>/dev/null; then \
	  found=; \
	  for candidate in $(if $(PYTHON),'$(PYTHON)',$(CANDIDATES)); do \
	    if "$$candidate" -c '$(SUITABLE)' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "ckptengine needs CPython 3.10, 3.11 or 3.12 with the venv module;" \
	      "none of these is one: $(if $(PYTHON),$(PYTHON),$(CANDIDATES))." >&2; \
	    echo "On Debian or Ubuntu: apt-get install python3-venv. Elsewhere: make PYTHON=/path/to/python ..." >&2; \
	    exit 1; \
	  fi; \
	  echo "making $(VENV) with $$("$$found" --version)"; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	@echo "installing the package and its development tools into $(VENV) (torch is large: this can take minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.PHONY: venv
venv: $(STAMP) ## make the virtual environment

.PHONY: demo
demo: $(STAMP) ## train on two ranks, kill one, recover, compare bit for bit (about two minutes on a quiet machine, CPU only)
	@$(BIN)/python -m trainer.demo

.PHONY: test
test: $(STAMP) ## run the default tests (no GPU, no Lustre needed)
	@$(BIN)/python -m pytest $(ARGS)

.PHONY: test-slow
test-slow: $(STAMP) ## run the slow tests too: many kills, large states
	@$(BIN)/python -m pytest -m slow $(ARGS)

# LIMITS_ARGS='--dir /fsx --quick --json': which storage, how thoroughly, for whom.
LIMITS_ARGS ?=
.PHONY: limits
limits: $(STAMP) ## build the native programs and measure this machine's limits (a few minutes, 5 GiB of memory)
	@$(BIN)/python -m native_bench.limits $(LIMITS_ARGS)

.PHONY: bench-micro
bench-micro: $(STAMP) ## time the parts of the engine, then whole saves and restores (minutes; add ARGS='-k header')
	@$(BIN)/python -m pytest native_bench/suites --benchmark-enable --benchmark-only $(ARGS)

# BENCH_ARGS='--cases large --systems engine,dcp-1 --rounds 7': what to measure. BENCH_DIR: on which storage.
BENCH_ARGS ?=
BENCH_DIR ?= .
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.installed
PEERS_OF := import importlib.metadata as m; print(*(r.split(";")[0].strip() for r in m.requires("ckptengine") if "bench-peers" in r))

# The peers have an environment of their own: what they need must not get into the one that the tests run in. A peer
# that cannot be installed here is skipped in the comparison, with a message.
$(BENCH_STAMP): $(STAMP)
	@$(BIN)/python -m venv --clear $(BENCH_VENV)
	@echo "installing the package and the peers into $(BENCH_VENV) (this can take minutes)"
	@$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,bench]'
	@for peer in $$($(BENCH_VENV)/bin/python -c '$(PEERS_OF)'); do \
	  $(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$peer" \
	    || echo "$$peer cannot be installed here; the comparison goes on without it" >&2; \
	done
	@touch $@

.PHONY: bench
bench: $(BENCH_STAMP) ## measure everything, beside limits and peers (three quarters of an hour, 8 GiB of disk, 20 GiB of memory)
	@$(BENCH_VENV)/bin/python -m native_bench run --dir $(BENCH_DIR) $(BENCH_ARGS)

.PHONY: bench-report
bench-report: $(BENCH_STAMP) ## put the last `make bench` into docs/benchmarks.md, README.md and the baseline of bench-guard
	@$(BENCH_VENV)/bin/python -m native_bench report bench-results/results.json

.PHONY: bench-quick
bench-quick: $(STAMP) ## the same at small sizes, with the peers at hand: is all of it right? (one to two minutes on a quiet machine)
	@$(BIN)/python -m native_bench run --quick --base --dir $(BENCH_DIR) --out bench-results/quick $(BENCH_ARGS)

.PHONY: bench-guard
bench-guard: $(STAMP) ## fail if a ratio to the native limit is more than 25 % behind native_bench/baseline.json, in three tries (eight minutes each)
	@$(BIN)/python -m native_bench guard --dir $(BENCH_DIR) $(BENCH_ARGS)

.PHONY: lint
lint: $(STAMP) ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

.PHONY: format
format: $(STAMP) ## let ruff format the code and sort the imports
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: wheel
wheel: $(STAMP) ## build the wheel into dist/
	@$(BIN)/python -m build --wheel

.PHONY: clean
clean: ## remove what was built or cached (the virtual environments stay: rm -r .venv .venv-bench)
	@rm -rf build dist demo-run bench-results .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find . -path './.venv*' -prune -o -type d -name __pycache__ -print0 | xargs -0 rm -rf

.PHONY: help
help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18
