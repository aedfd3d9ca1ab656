# `make demo` and `make test` need Python 3.11 or later with venv and pip, and nothing else.
PYTHON ?= python3
VENV ?= .venv
# A CPU build is enough here. On a GPU machine name the build that fits yours, or set TORCH= and install it yourself.
TORCH ?= torch==2.13.0
# What is installed besides: `dev,mooncake-cpu` for the tests of Mooncake, too, which are skipped without its library.
EXTRAS ?= dev
RUN := $(VENV)/bin
# Tests that start no processes run two at a time; the others need both cores, and look at what is left behind.
PURE := tests/unit tests/model tests/pipelines

.PHONY: demo test check docs bench chaos clean

demo: $(VENV)/installed ## install, start a whole cluster, make a picture
	$(RUN)/diffcluster generate "a panda" --out panda.png --seed 7
	@echo "The picture is $(CURDIR)/panda.png"

test: $(VENV)/installed ## all tests
	$(RUN)/python -m pytest -n 2 $(PURE)
	$(RUN)/python -m pytest $(addprefix --ignore=,$(PURE)) tests

check: $(VENV)/installed ## formatting, lint, types, import directions, generated docs
	$(RUN)/ruff format --check
	$(RUN)/ruff check
	$(RUN)/mypy
	$(RUN)/lint-imports --no-logo
	$(RUN)/python -m docs.generate --check

docs: $(VENV)/installed ## write the generated parts of docs/
	$(RUN)/python -m docs.generate

bench: $(VENV)/installed ## all benchmarks, and which of their claims do not hold
	$(RUN)/python -m bench

chaos: $(VENV)/installed ## a cluster under load while its processes are killed: SEED=1 FAULTS=20
	$(RUN)/python -m tests.chaos --seed $(or $(SEED),1) --faults $(or $(FAULTS),20)

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(RUN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)")
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
