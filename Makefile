# Two commands: make serve (a model answers on http://127.0.0.1:8000) and make test (the whole check). A rerun installs nothing.

PYTHON ?= python3
VENV := .venv
INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
HAS_FLASHINFER := $(VENV)/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("flashinfer") is None)'
SOURCES := pyproject.toml constraints.txt flashinfer-without-cuda.txt

.PHONY: serve test clean

serve: $(VENV)/.stamp
	@exec $(VENV)/bin/launch local $(ARGS)

test: $(VENV)/.stamp-dev
	@exec ./check $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed. Set PYTHON, as in: make serve PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tandem needs Python 3.11 or later; $(PYTHON) is `$(PYTHON) -V 2>&1`. Set PYTHON, as in: make serve PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python -m venv failed: on Debian and Ubuntu, install python3-venv" >&2; exit 1; }

# The environment with the development tools can serve as well. A FlashInfer that is there (the extra, for a GPU) stays.
$(VENV)/.stamp: $(SOURCES) | $(VENV)/bin/python
	@echo "installing dependencies"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.stamp-dev: $(SOURCES) | $(VENV)/bin/python
	@echo "installing dependencies and development tools"
	@$(INSTALL) -e ".[dev]"
	@$(HAS_FLASHINFER) || $(INSTALL) --no-deps -r flashinfer-without-cuda.txt
	@touch $@ $(VENV)/.stamp
