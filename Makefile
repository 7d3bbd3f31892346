# make setup: the virtual environment.  make run: the first comparison.  make test: all tests, with what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools

# The report is tested in a real browser; where there is none and it cannot be installed, those tests say so and are skipped.
BROWSER = command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	{ command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && \
		{ apt-get update -qq; apt-get install -y -qq chromium chromium-driver; } >/dev/null 2>&1; } || \
	echo "no chromium with chromedriver: tests in a browser will be skipped"

.PHONY: setup run test lint docs clean

setup: $(READY)

# A mark is written last, so a set-up that was cut off is made again.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(TOOLS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs,hub,text,csi,track]"
	@$(BROWSER)
	@touch $@

run: $(READY)
	$(BIN)/protofed compare fedproto fedsap fedavg --config examples/digits.toml --seeds 3

test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal
	$(BIN)/mkdocs build --strict --quiet --site-dir $(VENV)/site

lint: $(TOOLS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(TOOLS)
	$(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
