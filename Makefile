# make train: a fresh clone trains. make test: the suite, but for the rows that only make test-deep runs. Both create what
# they need.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: train test test-fast test-deep test-newest soak bench format clean

train: $(VENV)/.cli
	$(BIN)/shardkit train data=8 --verify 3

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS) -q -m "not sweep"

# What runs on every interpreter: the suite without the tests marked slow, and of a test with many rows four.
test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) -q -m "not slow and not sweep" --rows 4

test-deep: $(VENV)/.test
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -n $(WORKERS) -q

# The fast part again on the newest interpreter there is, with the newest jax it can have.
test-newest:
	@newest=$$(sh .ci/newest-python) && if [ -n "$$newest" ]; then \
		echo "fast part on $$($$newest --version)"; \
		$(MAKE) test-fast PYTHON=$$newest VENV=$(VENV)-newest; \
	else echo "fast part on a second interpreter: none from python3.12 on was found"; fi

# 100 starts of 60 steps dispatched without waiting; see "It hangs" in the README.
soak: $(VENV)/.cli
	$(BIN)/shardkit soak --starts 100 --steps 60

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.step_overhead

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.cli: $(VENV)/.created pyproject.toml
	$(PIP) -e '.[cli]'
	@touch $@

$(VENV)/.test: $(VENV)/.created pyproject.toml
	$(PIP) -e '.[test,aot]'
	@touch $@ $(VENV)/.cli

clean:
	rm -rf $(VENV) $(VENV)-newest .pytest_cache .hypothesis .mypy_cache .ruff_cache
