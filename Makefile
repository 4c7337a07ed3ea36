# Everything a developer runs. Each target sets up .venv first if it has to.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test test-all fuzz fuzz-training lint types layering docs site-check cases bench distribution load peers matrix fresh dist clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

# torch first and by its pin, so that nothing later pulls in another one.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch lightning-thunder
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)  ## run examples/digits.py
	$(BIN)/python examples/digits.py

# A file at a time, because the blocks of a page of the documentation share a namespace.
test: $(INSTALLED)  ## run the tests, but for those that take long
	$(BIN)/python -m pytest -n auto --dist loadfile -m 'not long'

test-all: $(INSTALLED)  ## run all tests
	$(BIN)/python -m pytest -n auto --dist loadfile

fuzz: $(INSTALLED)  ## try random programs, for 30 minutes or as in: make fuzz MINUTES=5
	$(BIN)/python tests/fuzz.py $(or $(MINUTES),30)

fuzz-training: $(INSTALLED)  ## train random programs, for 30 minutes or as in: make fuzz-training MINUTES=5
	$(BIN)/python tests/fuzz_training.py $(or $(MINUTES),30)

lint: $(INSTALLED)  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## check hookkit's annotations
	$(BIN)/mypy

layering: $(INSTALLED)  ## check that imports point downwards only
	$(BIN)/python scripts/layering.py

docs: $(INSTALLED)  ## build the documentation in docs/_build/html
	$(BIN)/sphinx-build -W -n --keep-going -b html docs docs/_build/html

site-check: docs  ## open every page of the documentation in Chromium, which has to be there
	$(BIN)/python scripts/site_check.py

cases: $(INSTALLED)  ## run the contract's programs with hookkit and without it, and count what becomes of them
	$(BIN)/python scripts/cases.py

bench: $(INSTALLED)  ## run every benchmarks/bench_*.py; figures also as JSON in build/bench
	set -e; for name in compile step region registry; do \
		$(BIN)/python benchmarks/bench_$$name.py --json build/bench/$$name.json; done

distribution: $(INSTALLED)  ## train with two and four processes, and compare gradients with those of one
	$(BIN)/python scripts/distribution.py

load: $(INSTALLED)  ## compile, run and drop programs thousands of times, and count what stays
	$(BIN)/python scripts/load.py

peers: $(INSTALLED)  ## run thunder's own tests with hookkit enabled
	$(BIN)/python scripts/peer_tests.py

# An environment at a time, because one takes 7 GB.
matrix:  ## run the tests with each torch of the range, or with some: make matrix TORCH='2.9.1 2.15.0'
	PYTHON='$(PYTHON)' scripts/matrix.sh $(TORCH)

fresh:  ## install as a user does, with the newest torch, and run what the README and the contract promise
	PYTHON='$(PYTHON)' scripts/fresh_install.sh

dist: $(INSTALLED)  ## build wheel and sdist in dist/, check them, and run the wheel away from the checkout
	scripts/dist.sh

clean:  ## remove the environments and everything built
	rm -rf $(VENV) .venv-* build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
