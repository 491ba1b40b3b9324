# One command list; CI calls the same recipes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NAME ?=
HOURS ?= 1
# More than there are cores: these tests mostly wait for engines. Each worker starts engines of its own (2 to 3 GB).
ENGINE_WORKERS ?= 3
# Of `make image`.
ENGINE ?= $(if $(shell command -v docker),docker,podman)
IMAGE ?= gpukeeper-accept:latest
# One after another, and beside nothing else: they inspect all processes and mounts of the machine, or compare times.
ALONE := tests/real/disk tests/real/launch/test_group_torch.py
# Two at a time, beside nothing else: they inspect all processes, too, but may share the machine with each other.
HOST := tests/real/host
# Up to so many failed tests on engines are run again at the end, alone (CI: 5). Both results are in the output.
AGAIN ?= 0
FAILED := .pytest_cache/engines
# Tests start hundreds of Python processes; without cached bytecode each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run install demo demo-web test check format bench simulate kube ray torch image operator-image rootfs helm ansible systemd docs package sbom bundle pins clean help

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
	@rm -rf $(FAILED); failed=; engines=; \
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/real || failed=yes; \
	export PYTEST_ADDOPTS="$$PYTEST_ADDOPTS -o cache_dir=$(FAILED)"; \
	$(BIN)/python -m pytest $(ALONE) || engines=failed; \
	$(BIN)/python -m pytest -n 2 --dist worksteal $(HOST) || engines=failed; \
	$(BIN)/python -m pytest -n $(ENGINE_WORKERS) --dist worksteal tests/real $(foreach one,$(ALONE) $(HOST),--ignore=$(one)) || engines=failed; \
	if [ "$$engines" ] && [ "$$(grep -c :: $(FAILED)/v/cache/lastfailed)" -le $(AGAIN) ]; then \
		echo "Run again, alone. What passes now is a defect, too: find out why it failed above."; \
		$(BIN)/python -m pytest -v --last-failed --last-failed-no-failures none tests/real && engines=; \
	fi; \
	$(BIN)/python -m tests.docs.checklist && [ -z "$$failed$$engines" ]

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
bundle: package ## one file to install from without a network, for this Python; make bundle PYTHONS="3.11 3.12"
	$(BIN)/python deploy/bundle/build.py dist $(PYTHONS)

pins: ## resolve the requirements files again (needs uv); existing pins stay where they still fit
	uv pip compile -q --universal --generate-hashes --no-header --python-version 3.11 pyproject.toml --extra all -o requirements.txt
	uv pip compile -q --universal --generate-hashes --no-header --python-version 3.11 pyproject.toml --extra all --extra parquet --group dev -c requirements.txt \
		-o requirements-dev.txt
	uv pip compile -q --universal --generate-hashes --no-header --python-version 3.11 --group docs -o requirements-docs.txt

image: ## build the acceptance image: make image IMAGE=NAME:TAG BASE=IMAGE NCCL_TESTS=DIRECTORY NCCL_TESTS_BASE=IMAGE
	@PYTHON=$(PYTHON) NCCL_TESTS=$(NCCL_TESTS) deploy/acceptance/context.sh build/image
	$(ENGINE) build -f build/image/Containerfile -t $(IMAGE) $(foreach one,BASE NCCL_TESTS_BASE,$(if $($(one)),--build-arg $(one)=$($(one)))) build/image

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
