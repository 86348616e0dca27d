# Troupe: every command of a working day. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Index of torch's CPU build, since PyPI's torch for Linux is the CUDA build. Empty: pip's
# configured index.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BUF := npx --yes @bufbuild/buf@1.75.0

# A process that uses every core for its computations slows its neighbours many times over.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Without bytecode, every process that a test starts compiles the project again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real test test-slow test-numeric lint format types walls house protos protos-check lock docs site wheel up down clean check

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the pinned dependencies

$(STAMP): deploy/requirements/dev.txt deploy/requirements/reasoning-gym.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): 3 GB with torch's CPU build, some minutes"
	@# Where that index cannot be reached, the next line takes torch from where pip finds it.
	$(if $(TORCH_INDEX),-$(BIN)/python -m pip install --disable-pip-version-check --no-deps --timeout 15 --retries 1 \
	  --index-url $(TORCH_INDEX) $$(grep '^torch==' deploy/requirements/dev.txt))
	$(BIN)/python -m pip install --disable-pip-version-check -r deploy/requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r deploy/requirements/reasoning-gym.txt \
	  || echo "reasoning_gym is not installed: it needs a C compiler. Its tests will be skipped."
	@# `troupe` was this project's name before; on PyPI it is another project's (troupe/installation.py).
	@$(BIN)/python -m pip uninstall --yes -qq --disable-pip-version-check troupe
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup ## train the example team on this machine and show before and after
	$(BIN)/troupe demo

demo-real: setup ## train a real pretrained model (135M) on this machine: 15 minutes on two free cores
	$(BIN)/python -m examples.real_team.model runs/models/smollm2-135m-instruct
	$(BIN)/troupe train examples/real_team/job.yaml

# Most tests wait for processes more than they compute, so two at a time halve the wait.
TEST_WORKERS ?= 2

test: setup ## the default test suite
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile

test-slow: setup ## the tests that need minutes, a browser, containers or SGLang
	$(BIN)/python -m pytest -m slow --timeout 1800 -rs -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# Tests of computations, whose rounding depends on the CPU. (Not test_consistency: hypothesis repeats
# the same computation there, for twice as long as all of these take.)
NUMERIC := tests/algorithms tests/networks tests/trainer/learning tests/trainer/networks \
  $(addprefix tests/trainer/test_,compute.py exports.py) \
  $(addprefix tests/rollout/engines/test_engine_,adapters.py deterministic.py embedded.py \
    models.py sampling.py scoring.py slots.py updates.py)

test-numeric: setup ## what computes, as a CPU with AVX2 and no more would
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
	$(BIN)/python -m pytest $(NUMERIC) -n $(TEST_WORKERS) --dist loadfile

lint: setup ## ruff and buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BUF) lint

format: setup ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup ## mypy, strict
	$(BIN)/mypy troupe services testbed examples benchmarks scripts

walls: setup ## who may import whom
	$(BIN)/lint-imports

house: setup ## counts of the layout: files, lines, names, circles
	$(BIN)/python -m scripts.house

protos: setup ## generate troupe/v1 from protos/
	$(BIN)/python scripts/generate_stubs.py

protos-check: setup ## fail when troupe/v1 is stale
	$(BIN)/python scripts/generate_stubs.py --check

docs: setup ## generate the job reference, the SDK's and the sizing page
	$(BIN)/troupe job reference --out docs/job-reference.md
	$(BIN)/python -m scripts.sizing
	$(BIN)/python -m scripts.sdk

site: setup ## build the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lock: setup ## pin the dependencies of every image anew
	$(BIN)/python scripts/lock.py

check: lint types walls house protos-check ## all that CI runs, but the slow tests
	@before=$$(mktemp) && trap "rm $$before" EXIT && $(BIN)/python -m scripts.leftovers > $$before && \
	$(MAKE) --no-print-directory test && $(BIN)/python -m scripts.leftovers $$before

# pip builds in this directory: leftovers of an earlier build would be part of the wheel.
wheel: ## build dist/troupe_rl-*.whl; needs only Python and pip
	rm -rf build dist
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@echo "to install it: pip install \"$$(ls dist/*.whl)[cpu]\""

up: setup ## start an embedded cluster and leave it running
	$(BIN)/troupe up --detach

down: setup ## stop it
	$(BIN)/troupe down

clean: ## remove what builds and tests left (not runs/)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
