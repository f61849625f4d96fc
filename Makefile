# make train: a fresh clone trains. make check: what needs no compiler. make test: the suite. Each creates what it needs.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
SHARD ?= 0/1
LIMIT ?= 0
SEED ?= 0
ONLY ?=
MARKED ?=
BIN := $(VENV)/bin
# Some environments forbid Python to keep bytecode: hundreds of interpreters would compile the package again.
export PYTHONDONTWRITEBYTECODE =
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q

.PHONY: train lint check test test-deep test-newest docs mutants soak bench notebooks accelerator package format clean

train: $(VENV)/.cli
	$(BIN)/python examples/train_text.py data=8 --simulate --verify 3

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/support/proved.py

# Under a minute: lint, types, and all tests that need no compiler.
check: lint
	$(PYTEST) -m "check and not deep"

# That and the rest, the quick ones first: seven minutes on two cores. Lint runs beside the tests.
test: $(VENV)/.test
	@$(MAKE) --no-print-directory lint > $(VENV)/lint.log 2>&1 & lint=$$!; \
	$(PYTEST) -m "not deep"; tests=$$?; \
	wait $$lint || { cat $(VENV)/lint.log; exit 1; }; exit $$tests

# What the default tier does not tell: tests marked deep, tests marked optimized (the laws, and what XLA's optimizations
# could change), and those whose examples hypothesis draws, by the hundred; all compiled as users compile, and with the
# GPU's compiler. SHARD=i/n is one of n parts. LIMIT=s skips, and says so, what has not begun after s seconds. MARKED="not
# clock" leaves out the tests whose faults have deadlines of seconds, MARKED=clock runs those alone.
test-deep: $(VENV)/.gpu
	HYPOTHESIS_PROFILE=deep $(PYTEST) --shard $(SHARD) --limit $(LIMIT) $(if $(MARKED),-m "$(MARKED)")

# One row of every test on the newest interpreter there is, with the newest jax it can have.
test-newest:
	@newest=$$(sh .ci/newest-python) && if [ -n "$$newest" ]; then \
		echo "one row of every test on $$($$newest --version)"; \
		$(MAKE) .newest PYTHON=$$newest VENV=$(VENV)-newest; \
	else echo "a second interpreter: none from python3.12 on was found"; fi

.PHONY: .newest
.newest: $(VENV)/.test
	$(PYTEST) -m "not deep" --rows 1

# The manual, in site/: open site/index.html. A warning, a link that leads nowhere or a name without a page ends it.
docs: $(VENV)/.test
	$(BIN)/python docs/generate/user_code.py  # what a type checker says of the programs of README, manual and examples
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build  # not --quiet, which would hide warnings from strict
	@echo "the manual is in site/index.html"

# 300 wrong places, drawn by SEED, one at a time: which test finds it? See tests/mutants/README.md.
mutants: $(VENV)/.test
	$(PIP) coverage
	$(BIN)/python tests/mutants/run.py --seed $(SEED) --jobs 2

# 100 starts of 60 steps dispatched without waiting; see docs/howto/faults.md.
soak: $(VENV)/.cli
	$(BIN)/python -m benchmarks.soak

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.step_overhead

# Runs the notebooks and stores what they print; ONLY="04 10" picks some.
notebooks: $(VENV)/.test
	$(BIN)/python tests/support/notebooks.py $(ONLY)

# On a machine with real chips, whose jax VENV has ([cuda] or [tpu]): collectives, tokens/s and MFU, in ten minutes.
accelerator: $(VENV)/.cli
	$(BIN)/python -m benchmarks.accelerator --json benchmarks/results/accelerator.jsonl

# dist/ gets the sdist, which has every file, and the wheel, after both were tried where nothing else is installed.
package: $(VENV)/.test
	$(BIN)/python -m pytest -q tests/test_publishing.py
	$(BIN)/python -m build

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
	$(PIP) -e '.[test,docs,aot]'
	@touch $@ $(VENV)/.cli

# 130 MB, and for Linux alone; without it the tests that need it are skipped, with that reason.
$(VENV)/.gpu: $(VENV)/.test
	$(PIP) -e '.[aot-gpu]' || echo "the GPU compiler could not be installed"
	@touch $@

clean:
	rm -rf dist site $(VENV) $(VENV)-newest .pytest_cache .hypothesis .mypy_cache .ruff_cache
