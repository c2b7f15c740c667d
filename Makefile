# Two commands: make serve (a model answers on http://127.0.0.1:8000) and make test (the whole check). A rerun installs nothing.
# make lock writes the versions of constraints.txt anew, as pyproject.toml allows them; those that still fit stay. To have the newest:
# make lock ARGS=--upgrade.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt
# Of pip's hundreds of lines, those that take long. Errors come as they are.
SHOW := sed -u -n -e 's/^ *Downloading \(.*[MG]B)\).*/    downloading \1/p' -e 's/^Installing collected.*/    unpacking what was downloaded/p'
HAS_FLASHINFER := $(VENV)/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("flashinfer") is None)'
SOURCES := pyproject.toml constraints.txt flashinfer-without-cuda.txt
LOCK := build/lock
UV := uv==0.13.9

.PHONY: serve test lock clean

serve: $(VENV)/.stamp
	@exec $(VENV)/bin/launch local $(ARGS)

test: $(VENV)/.stamp-dev
	@exec ./check $(ARGS)

# For every extra, every platform and every Python that pyproject.toml allows, from the package index's metadata: nothing is installed,
# so a host without a GPU locks what one with a GPU installs.
lock:
	@$(PYTHON) -m venv $(LOCK) && $(LOCK)/bin/python -m pip install --quiet --disable-pip-version-check $(UV)
	@$(LOCK)/bin/uv pip compile --quiet pyproject.toml --all-extras --universal --python-version 3.11 --no-annotate --no-header \
		$(ARGS) --output-file constraints.txt >/dev/null
	@sed -i '1i # The version of everything that pyproject.toml asks for, with every extra, on CPU and CUDA. Made by: make lock' constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed. Set PYTHON, as in: make serve PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tandem needs Python 3.11 or later; $(PYTHON) is `$(PYTHON) -V 2>&1`. Set PYTHON, as in: make serve PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python -m venv failed: on Debian and Ubuntu, install python3-venv" >&2; exit 1; }

# The environment with the development tools can serve as well. A FlashInfer that is there (the extra, for a GPU) stays.
# setuptools comes first, for a build of our package that takes what is locked and not what is newest.
$(VENV)/.stamp: $(SOURCES) | $(VENV)/bin/python
	@echo "installing dependencies: torch is large, so the first time takes minutes"
	@$(PIP) setuptools | $(SHOW)
	@$(PIP) --no-build-isolation -e . | $(SHOW)
	@touch $@

$(VENV)/.stamp-dev: $(SOURCES) | $(VENV)/bin/python
	@echo "installing dependencies and development tools: torch is large, so the first time takes minutes"
	@$(PIP) setuptools | $(SHOW)
	@$(PIP) --no-build-isolation -e ".[dev]" | $(SHOW)
	@$(HAS_FLASHINFER) || $(PIP) --no-deps -r flashinfer-without-cuda.txt | $(SHOW)
	@touch $@ $(VENV)/.stamp
