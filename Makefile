PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test test-slow lint types sweep clean

test: lint types
	$(BIN)/python -m pytest -m "not slow" -n auto

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow -n auto

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

# Nine configurations of the bundled model on its own documents; made to run anywhere.
sweep: $(VENV)/installed
	$(BIN)/python -m orchestrator.sweep --tasks gsm8k,minerva_math --limit 100

# The marker comes last, so an interrupted installation is repeated.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
