# One command list; CI calls the same recipes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NAME ?=
HOURS ?= 1
# More than there are cores: these tests mostly wait for engines. Each worker starts engines of its own (2 to 3 GB).
ENGINE_WORKERS ?= 3
# One after another, and beside nothing else: they inspect all processes and mounts of the machine.
ALONE := tests/real/disk tests/real/host
# Tests start hundreds of Python processes; without cached bytecode each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run install demo demo-web test check format bench simulate kube ray torch clean help

help:            ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

run: $(VENV)/.installed ## detect the platforms of this machine and print the plan; changes nothing
	@$(BIN)/gpukeeper plan --verbose
	@echo "Nothing was changed. To try gpukeeper on a simulated fleet: make demo" >&2

demo: $(VENV)/.installed ## simulate a week on a fleet
	@$(BIN)/gpukeeper demo

demo-web: $(VENV)/.installed ## the dashboard of a simulated fleet, in a browser
	@$(BIN)/gpukeeper demo --web

install: $(VENV)/.installed ## install gpukeeper and its pinned dependencies in .venv

test: $(VENV)/.installed-dev ## all tests; those whose engine is missing are skipped and report how to install it
	@failed=; \
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/real || failed=yes; \
	$(BIN)/python -m pytest $(ALONE) || failed=yes; \
	$(BIN)/python -m pytest -n $(ENGINE_WORKERS) --dist worksteal tests/real $(ALONE:%=--ignore=%) || failed=yes; \
	$(BIN)/python -m tests.docs.checklist && [ -z "$$failed" ]

check: $(VENV)/.installed-dev ## format, lint, types, imports, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

format: $(VENV)/.installed-dev ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-dev ## make bench NAME=decisions; without NAME: the list
	@$(BIN)/python -m benchmarks $(NAME)

simulate: $(VENV)/.installed-dev ## make simulate HOURS=8: new seeds for 8 hours; SEEDS=2000: the first 2000 seeds; SEED=n repeats one
	@$(BIN)/python -m tests.simulation.long --hours $(HOURS) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SEED),--seed $(SEED))

kube: ## build the Kubernetes for the tests, once, outside the repository (Go, 20 to 30 minutes)
	@tests/real/kube/build.sh

ray: ## install the Ray releases for the tests, once, outside the repository (pip, 5 minutes)
	@PYTHON=$(PYTHON) tests/real/ray/build.sh

torch: ## install PyTorch for the tests, once, outside the repository (pip, one minute, 5 GB)
	@PYTHON=$(PYTHON) tests/real/torch/build.sh

clean: ## delete the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gpukeeper needs Python 3.11 or newer; this is $$($(PYTHON) --version). Name one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.txt
	@touch $@
