# One command per task; each does its own set-up in .venv and needs only Python 3.11+ and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_LAB := $(VENV)/.ready-lab

.PHONY: demo docs pictures test test-all lint unit chromium format dist bench study setup clean

setup: $(READY)

$(READY_LAB): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lab]'
	touch $(READY_LAB)

$(READY): $(READY_LAB)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps timm  # without torchvision
	touch $(READY)

demo: $(READY_LAB)  ## train, map every step to the sphere, write demo/index.html
	$(BIN)/python -m steradian demo --out demo

docs: setup  ## the documentation, build/docs/index.html; it opens without network
	$(BIN)/python -m sphinx -W --keep-going docs build/docs

pictures: setup chromium  ## the pictures of README and docs, docs/images/*.png
	$(BIN)/python docs/pictures.py

test: lint unit  ## everything that CI runs

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: setup chromium
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

test-all: lint chromium  ## also the wheel, and the sweeps that re-prove with more seeds and shapes, before a release
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

chromium:  ## the browser in which the page is tested, where it may be installed; without it those tests are skipped
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  timeout 240 sh -c 'apt-get update && apt-get install --yes --no-install-recommends chromium' \
	    </dev/null >/dev/null 2>&1 ; } || \
	  echo 'No Chromium here and none could be installed: the tests of the page in a browser will be skipped.'

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

dist: setup  ## the wheel and the source archive, in dist/
	$(BIN)/python -m build --no-isolation

bench: setup  ## the benchmarks that run on a CPU; each prints a table and writes JSON under results/
	$(BIN)/python benchmarks/image.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/discovery.py

study: setup  ## every table and figure of the write-up, from results/
	$(BIN)/python -m steradian write-up docs/study.md docs/study-details.md README.md

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
