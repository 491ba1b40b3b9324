# One command list; CI calls the same recipes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
NAME ?=
HOURS ?= 1
# Of the tests on engines: more than there are cores, because they mostly wait. Each starts its own engines (2 to 3 GB).
WORKERS ?= 3
# Of `make test-engines`: folders of tests/real, files, or single tests.
ENGINES ?= $(wildcard tests/real/*/)
# Of `make image`.
ENGINE ?= $(if $(shell command -v docker),docker,podman)
IMAGE ?= gpukeeper-accept:latest
# Tests start hundreds of Python processes; without cached bytecode each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run install demo demo-web test test-slow test-smoke test-engines test-all base check format bench bench-compare simulate kube ray torch image program operator-image rootfs helm ansible systemd docs package sbom bundle pins clean help

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

test: $(VENV)/.installed-dev ## the tests of every day: no engine, no root, no GPU; four minutes on two cores
	@HYPOTHESIS_PROFILE=quick $(PYTEST) -n 2 --dist worksteal --ignore=tests/real -m "not slow"
	@echo "Not run: make test-slow (the rest without engines, 8 minutes), make test-engines (Docker, Kubernetes, Ray, …: skipped where" \
		"an engine is missing), make test-all (everything). See docs/how-to/test-on-a-real-engine.md."

test-slow: $(VENV)/.installed-dev ## the other tests without engines: whole command line, documentation, more seeds and examples
	@$(PYTEST) -n 2 --dist worksteal --ignore=tests/real -m slow
	@$(BIN)/python -m tests.docs.checklist

# First those that inspect all processes of the machine, one after the other or two at a time, and no engine beside them.
# pytest exits with 5 if none of the tests is wanted.
define on-engines
	@$(PYTEST) -m "alone$(1)" $(2) || [ $$? -eq 5 ]
	@$(PYTEST) -n 2 --dist worksteal -m "paired$(1)" $(2) || [ $$? -eq 5 ]
	@$(PYTEST) -n $(WORKERS) --dist loadgroup -m "not alone and not paired$(1)" $(2) || [ $$? -eq 5 ]
endef

test-smoke: $(VENV)/.installed-dev ## about a hundred tests on all engines
	$(call on-engines, and smoke,tests/real)

test-engines: $(VENV)/.installed-dev ## the tests on real engines; make test-engines ENGINES="docker kube" runs these folders of tests/real
	$(call on-engines,,$(foreach one,$(ENGINES),$(if $(findstring /,$(one)),$(one),tests/real/$(one))))

test-all: $(VENV)/.installed-dev ## everything, whatever changed; at the beginning of a piece of work, in the background
	@$(BIN)/python -m tests.stages --all

base: ## before a change: record the commit of main on which it begins; CI runs the engine tests of what changed since
	@git rev-parse HEAD > .ci/base

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

bench-compare: $(VENV)/.installed-dev ## make bench-compare BASE=commit: the important benchmarks on two trees in turns
	@$(BIN)/python -m benchmarks.compare $(BASE) $(NAME)

simulate: $(VENV)/.installed-dev ## make simulate HOURS=8: new seeds for 8 hours; SEEDS=2000: the first 2000 seeds; SEED=n repeats one
	@$(BIN)/python -m tests.simulation.long --hours $(HOURS) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SEED),--seed $(SEED))

kube: ## build the Kubernetes for the tests, once, outside the repository (Go, 20 to 30 minutes)
	@tests/real/kube/build.sh

ray: ## install the Ray releases for the tests, once, outside the repository (pip, 5 minutes)
	@PYTHON=$(PYTHON) tests/real/ray/build.sh

torch: ## install PyTorch for the tests, once, outside the repository (pip, one minute, 5 GB)
	@PYTHON=$(PYTHON) tests/real/torch/build.sh

helm: ## build helm for the tests of the chart, once, outside the repository (Go, 4 minutes)
	@tests/real/kube/helm.sh

ansible: ## install ansible-core and ansible-lint for the tests of the role, once, outside the repository (pip, one minute)
	@PYTHON=$(PYTHON) tests/real/ansible/build.sh

systemd: ## make the Debian root filesystem that tests boot with systemd, once, outside the repository (root, one minute)
	@tests/real/systemd/build.sh

docs: build/site-venv/.installed ## the documentation as pages with search, in build/site
	NO_MKDOCS_2_WARNING=1 build/site-venv/bin/mkdocs build --strict --quiet -f deploy/site/mkdocs.yml -d $(CURDIR)/build/site
	@echo "To read it with its search: python3 -m http.server --directory build/site"

build/site-venv/.installed: requirements-docs.txt
	$(PYTHON) -m venv build/site-venv
	build/site-venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-docs.txt
	@touch $@

package: $(VENV)/.installed-dev ## the wheel, the sdist, the Helm chart and the SBOM of the pinned dependencies, in dist/
	rm -rf dist && mkdir dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python deploy/helm/package.py dist
	cp deploy/sbom/gpukeeper.cdx.json dist/

sbom: $(VENV)/.installed-dev ## write the SBOM of the pinned dependencies again, which the wheel has; after `make pins`
	$(BIN)/python deploy/sbom/write.py

PYTHONS ?=
MACHINE ?=
bundle: package ## one file to install from without a network, for this Python; make bundle PYTHONS="3.11 3.12" MACHINE=aarch64
	$(BIN)/python deploy/bundle/build.py dist $(PYTHONS) $(if $(MACHINE),--machine $(MACHINE))

pins: ## resolve the requirements files again (needs uv); existing pins stay where they still fit
	uv pip compile -q --no-strip-extras --universal --generate-hashes --no-header --python-version 3.11 pyproject.toml --extra all -o requirements.txt
	uv pip compile -q --no-strip-extras --universal --generate-hashes --no-header --python-version 3.11 pyproject.toml --extra all --extra parquet --group dev -c requirements.txt \
		-o requirements-dev.txt
	uv pip compile -q --no-strip-extras --universal --generate-hashes --no-header --python-version 3.11 --group docs -o requirements-docs.txt

image: ## build the acceptance image: make image IMAGE=NAME:TAG BASE=IMAGE NCCL_TESTS=DIRECTORY NCCL_TESTS_BASE=IMAGE
	@PYTHON=$(PYTHON) NCCL_TESTS=$(NCCL_TESTS) deploy/acceptance/context.sh build/image
	$(ENGINE) build -f build/image/Containerfile -t $(IMAGE) $(foreach one,BASE NCCL_TESTS_BASE,$(if $($(one)),--build-arg $(one)=$($(one)))) build/image

program: $(VENV)/.installed ## gpukeeper as one file, and as ConfigMaps for images that have only PyTorch, in dist/
	@PYTHON=$(PYTHON) deploy/acceptance/context.sh build/image
	@$(BIN)/python deploy/acceptance/program.py build/image dist

OPERATOR_IMAGE ?= gpukeeper:latest
operator-image: ## build the image of operator, CronJob and agent: make operator-image OPERATOR_IMAGE=NAME:TAG BASE=IMAGE
	@PYTHON=$(PYTHON) deploy/acceptance/context.sh build/image
	$(ENGINE) build -f build/image/Containerfile.operator -t $(OPERATOR_IMAGE) $(if $(BASE),--build-arg BASE=$(BASE)) build/image

rootfs: ## the same without a base image, as a root filesystem outside the repository: root, mmdebstrap, 2 minutes; TORCH=2.15.0: with PyTorch
	@PYTHON=$(PYTHON) TORCH=$(TORCH) tests/real/image/build.sh

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
