# `make demo` and `make test` are all that a newcomer needs: each prepares .venv on its first run.
# Other targets: lint, clean.   Variables: PYTHON (>= 3.10), TORCH_INDEX, ARGS (more arguments for pytest or the demo).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=

# The CPU build of torch. PyPI's own torch for Linux on x86-64 is a CUDA build of several GB, which nothing here needs.
# An index that pip is configured with is asked first, then TORCH_INDEX, then PyPI (where macOS and ARM find a CPU build).
TORCH := $(shell sed -n 's/.*"\(torch==[0-9.]*\)".*/\1/p' pyproject.toml)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-build
	$(BIN)/dgcompile demo $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis bundles

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "dgcompile needs Python 3.10 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-torch: | $(BIN)/python
	$(PIP) install --quiet '$(TORCH)+cpu' 2>/dev/null \
	    || $(PIP) install --quiet --retries 1 --extra-index-url $(TORCH_INDEX) '$(TORCH)+cpu' \
	    || $(PIP) install --quiet '$(TORCH)'
	@touch $@

$(VENV)/.installed-build $(VENV)/.installed-dev: $(VENV)/.installed-%: pyproject.toml $(VENV)/.installed-torch
	$(PIP) install --quiet --editable '.[$*]'
	@touch $@
