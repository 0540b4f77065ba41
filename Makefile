# The commands a developer needs. `make demo` and `make test` do everything on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Where `make k8s-setup` builds and tests/k8s looks.
export COREMILL_K8S_FOLDER ?= $(HOME)/.cache/coremill-k8s
# Images of containers often have it set: then processes compile anew, each for itself, what one could have kept for all.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup hosts-setup browser-setup k8s-setup image-setup lock image-weight demo test test-long check docs docs-serve dist bench chaos soak clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[aws,k8s,tensorboard,wandb,mlflow,metrics,lora,dev,docs,peers]'
	touch $(STAMP)

hosts-setup:                ## what tests/hosts needs besides (Debian, as root); `make test` skips those tests without it
	apt-get install --yes --no-install-recommends openssh-server openssh-client openmpi-bin mpich iproute2 nftables

browser-setup:              ## what tests of the pages need besides (Debian, as root); `make test` skips those tests without it
	apt-get install --yes --no-install-recommends chromium

k8s-setup: setup            ## the API server tests/k8s needs, built in COREMILL_K8S_FOLDER (Debian, ten minutes); `make test` skips those tests without it
	$(BIN)/python scripts/k8s_setup.py $(COREMILL_K8S_FOLDER)

image-setup:                ## what builds and runs the image (Debian, as root); `make test-long` skips those tests without it
	apt-get install --yes --no-install-recommends buildah mmdebstrap runc

lock: setup                 ## containers/requirements.lock anew: the packages of the image, with hashes
	$(BIN)/python scripts/lock_image.py

image-weight: setup         ## what the image named by IMAGE= weighs, and what is in it
	$(BIN)/python scripts/image_weight.py $(IMAGE)

demo: setup                 ## train the built-in example: no network, no download
	$(BIN)/coremill train

check: setup                ## lint, types, layers
	$(BIN)/ruff check src tests benchmarks chaos scripts setup.py
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Three at a time, file by file in order: most of a test is one process that imports torch, or waits. Plain `pytest` works as well.
test: check                 ## everything CI runs
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-long: check            ## the same and all that takes long: the second tier, for a night or a release
	COREMILL_LONG_TESTS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

docs: setup                 ## the site, in build/site; no network; a link or anchor that leads nowhere ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: setup           ## the site on 127.0.0.1:8000, made anew when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

dist: setup                 ## wheel and sdist in dist/, checked as a package index does
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

bench: setup                ## coremill beside its peers on this machine
	$(BIN)/python -m benchmarks.peers

chaos: setup                ## every fault experiment, for a night; `python -m chaos --short` is what `make test-long` runs, `make test` four faults
	$(BIN)/python -m chaos --systems all --json runs/chaos/rows.json --markdown runs/chaos/table.md

soak: setup                 ## half an hour of random faults
	$(BIN)/python -m chaos --only X25

clean:
	rm -rf $(VENV) runs build dist
