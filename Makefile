# make demo: set up, then calibrate, plan, run, validate and report on this machine.
# make test: set up, then the tests.
# TORCH_INDEX_URL: where to take PyTorch from (unset: pip's configured index).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: setup demo test test-slow check docs clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		$(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[run,dev]'
	touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/magicdec demo --output demo-output

test: $(INSTALLED)
	$(BIN)/python -m pytest

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) build dist site demo-output .pytest_cache .mypy_cache .ruff_cache
