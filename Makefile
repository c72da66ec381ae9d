PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two OpenMP threads beside two test workers can be 25 times slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test bench peers docs notebooks lint dist clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */\1\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

demo: $(VENV)/.installed  ## train a small model with a flight recorder; name what is behind its loss spikes (about a minute)
	$(BIN)/aftershock demo

test: lint  ## lint, types, import layers, tests
	$(BIN)/pytest -n 2

lint: $(VENV)/.installed  ## lint, types and import layers alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed  ## the speed and memory table, each ratio with its bar; planted culprits
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.culprits

peers: $(VENV)/.installed  ## neighbours side by side: torchopt, bergson, dattri, captum; about twenty minutes
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps bergson
	$(BIN)/python -m benchmarks.peers

docs: $(VENV)/.installed  ## the documentation as site/, built strictly; the code of every page is run, the slow ones too
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/tools/pages.py run

notebooks: $(VENV)/.installed  ## every tutorial as a notebook in notebooks/, each one run
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	rm -rf notebooks
	$(BIN)/python docs/tools/pages.py notebooks notebooks
	$(BIN)/jupyter execute --inplace notebooks/*/*.ipynb

dist: $(VENV)/.installed  ## the wheel and the source archive, in dist/
	$(BIN)/python -c "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"

clean:  ## remove everything that make made
	rm -rf $(VENV) build dist site notebooks aftershock-demo *.egg-info .pytest_cache .mypy_cache .ruff_cache
