# make run: when averaging and when prototypes help.  make test: the tests.  make soak: those that take long.
# Each makes the environment it needs, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# What is installed: protofed; what tests, format, lint and types need; what the documentation needs; a browser for tests.
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
DOCS := $(VENV)/.docs
BROWSER := $(VENV)/.browser
# Tests in one process more than there are cores, because federations wait for each other.
SEVERAL := $(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --dist worksteal

.PHONY: setup run check test soak lint docs evidence clean

setup: $(READY)

# A mark is written last, so a set-up that was cut off is made again.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "torch==2.13.0"
	$(PIP) -e .
	@touch $@

$(TOOLS): $(READY)
	$(PIP) -e ".[dev,hub,tables,text,csi,track,deploy,privacy,export,serial,slurm]"
	@touch $@

$(DOCS): $(READY)
	$(PIP) -e ".[docs]"
	@touch $@

# The report is tested in a real browser; where there is none and it cannot be installed, those tests say so and are skipped.
$(BROWSER): $(READY)
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		{ command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && \
			{ apt-get update -qq; apt-get install -y -qq chromium chromium-driver; } >/dev/null 2>&1; } || \
		echo "no chromium with chromedriver: tests in a browser will be skipped"
	@touch $@

run: $(READY)
	$(BIN)/protofed demo

check: lint
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not browser and not soak"

test: lint $(DOCS) $(BROWSER)
	$(SEVERAL) -m "not soak"
	$(BIN)/mkdocs build --strict --quiet --site-dir $(VENV)/site

soak: $(TOOLS) $(BROWSER)
	$(SEVERAL) -m soak

lint: $(TOOLS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The pages whose numbers come from docs/results: the ledger and the claims.
evidence: $(READY)
	$(BIN)/protofed reproduce --ledger docs/results
	$(BIN)/protofed claims docs/results --out docs/claims.md

docs: $(DOCS)
	$(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
