# One screen. Everything here only calls the command line.
PYTHON ?= python3
VENV   ?= .venv
PEERS  ?= .venv-peers
BIN    := $(VENV)/bin
FOLD   ?= 0
DATA   ?=
RUN    ?=
PRESET ?=
NETWORK ?=
IN     ?=
OUT    ?= predictions
REF    ?=
ARGS   ?=
NOTEBOOKS = $(wildcard notebooks/*.py)
SOURCES = $(wildcard brats_seg/*.py brats_seg/*/*.py)
CHOICES = $(if $(PRESET),--preset $(PRESET)) $(if $(NETWORK),--network $(NETWORK))

.DEFAULT_GOAL := help
.PHONY: always help setup train crossval predict evaluate notebook pages test test-all check bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo "variables:  FOLD=0 DATA=scans RUN=runs/name PRESET=kaggle-t4 NETWORK=unet IN=scans OUT=folder REF=scans ARGS=\"--hours 8\""

setup: $(BIN)/.installed ## make .venv with the tested versions (PYTHON=python3.12 takes another Python)
$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@
	@echo "installed in $(VENV); type '. $(BIN)/activate', and then brats-seg is found"

train: setup ## train fold FOLD of the scans in DATA, or resume it (no DATA, and nothing in data/: a demo on phantoms)
	$(BIN)/brats-seg train --fold $(FOLD) $(if $(DATA),--data $(DATA)) $(if $(RUN),--run $(RUN)) $(CHOICES) $(ARGS)

crossval: setup ## train every fold of the scans in DATA, score the held-out cases, export the ensemble
	$(BIN)/brats-seg crossval $(if $(DATA),--data $(DATA)) $(CHOICES) $(ARGS)

predict: setup ## write label maps of the scans in IN to OUT, by the network of RUN (or of several)
	$(BIN)/brats-seg predict $(IN) -o $(OUT) $(foreach run,$(or $(RUN),runs/fold$(FOLD)),--model $(run)) $(ARGS)

evaluate: setup ## score the label maps in OUT against the references in REF
	$(BIN)/brats-seg evaluate $(REF) $(OUT) $(ARGS)

notebook: $(addprefix build/notebooks/,$(notdir $(NOTEBOOKS:.py=.html))) ## run the notebooks on DATA, or on a demo set; work in runs/notebook is resumed
	@echo "pages: build/notebooks/*.html"

build/notebooks/%.html: notebooks/%.ipynb $(SOURCES) | setup
	$(if $(DATA),BRATS_DATA="$(abspath $(DATA))") BRATS_WORK="$(abspath runs/notebook)" \
		$(BIN)/python -m jupyter nbconvert --to html --execute --output-dir build/notebooks $< $(ARGS)

build/notebooks/brats_segmentation.html: always # training may go on, or DATA be another folder

notebooks/%.ipynb: notebooks/%.py | setup
	$(BIN)/jupytext --quiet --update --to ipynb $<
	@touch $@

pages: $(NOTEBOOKS:.py=.ipynb) ## run the notebooks on phantoms and renew the pages in notebooks/pages
	$(BIN)/python notebooks/pages/make_pages.py $(ARGS)

test: setup ## the tests, in 4 to 6 minutes on 2 cores
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not gpu" $(ARGS)

test-all: setup ## all tests, the slow ones too
	$(BIN)/pytest -n 2 --dist worksteal -m "not gpu" $(ARGS)

check: setup ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(PEERS)/.installed ## compare with other programs, in half an hour or more on 2 cores, and write benchmarks/RESULTS.md
	$(PEERS)/bin/python benchmarks/all.py $(ARGS)

# an environment that sees the packages of $(VENV), so that all programs compute with the same torch
$(PEERS)/.installed: $(BIN)/.installed benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/brats_seg_packages.pth"
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt --requirement benchmarks/peers.txt
	$(PEERS)/bin/pip install --quiet --no-deps panoptica==2.1.7 brats-evaluation==0.0.10
	# torchvision, which nnU-Net does not need here, is built for CUDA and fails beside a torch for the CPU
	$(PEERS)/bin/python -c "import torchvision" 2>/dev/null || $(PEERS)/bin/pip uninstall --quiet --yes torchvision
	@touch $@

clean: ## remove what was built; scans, prepared cases and runs stay
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
