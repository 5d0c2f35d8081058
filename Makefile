# `make test` and `make demo` need python3 (3.10 or newer), a C++ compiler and pip's network access; they create .venv themselves.
#   TORCH   another build of PyTorch:  make test TORCH=torch==2.12.0
#   PYTHON  another interpreter:       make test PYTHON=python3.12
#   PROCESSES of pytest, 1 GB each:    make test PROCESSES=4
PYTHON ?= python3
TORCH ?= torch==2.13.0
PROCESSES ?= 2
RUN := .venv/bin/python

# Byte code is kept whatever the environment says: a process imports torch in 2.5 s with it, and in 7 s without.
export PYTHONDONTWRITEBYTECODE :=

# A stamp names everything the environment depends on, so a change of any of it installs again.
KEY := $(shell { cat pyproject.toml Makefile .ci/setup; echo '$(CURDIR) $(PYTHON) $(TORCH)'; } | cksum | cut -d' ' -f1)
BASE := .venv/.base-$(KEY)
FULL := .venv/.full-$(KEY)

.DEFAULT_GOAL := help
.PHONY: help demo test bench docs clean

help:
	@echo 'make demo    train a DLRM, optimize it, show the report and the times before and after (2 minutes)'
	@echo 'make test    ruff, mypy and pytest'
	@echo 'make bench   models, training, cold calls and growth with the columns on this machine (3 minutes)'
	@echo 'make docs    the documents as a site, in build/site (mkdocs)'
	@echo 'make clean   remove .venv, caches and generated data'

demo: $(BASE)
	@$(RUN) examples/dlrm/demo.py

# Beside the linters, kernels are built, and the tests' byte code is made, which each process of pytest would make for itself.
test: $(FULL)
	@$(RUN) -m fxopt build >.venv/build.log 2>&1 & $(RUN) -m pytest --collect-only >.venv/collect.log 2>&1 & \
	$(RUN) -m ruff check . && $(RUN) -m mypy; checked=$$?; wait; exit $$checked
	@$(RUN) -m pytest -n $(PROCESSES) --dist worksteal

bench: $(BASE)
	@$(RUN) -m bench quick

$(BASE) $(FULL): .venv/.%-$(KEY):
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' KEY='$(KEY)' .ci/setup $*

docs: $(BASE)
	@$(RUN) -c 'import mkdocs' 2>/dev/null || $(RUN) -m pip install --quiet --editable '.[docs]' --constraint .venv/constraints.txt
	@$(RUN) -m mkdocs build --strict -f site/mkdocs.yml

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis examples/dlrm/data examples/dlrm/runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
