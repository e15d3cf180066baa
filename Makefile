# Two commands: `make train` and `make test`. Everything they need goes into .venv and build/.
PYTHON ?= python3
TORCH := torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
TRAIN_ARGS ?=
TEST_ARGS ?=

NATIVE := $(shell find op_kernels torch_npu_ext -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt 2>/dev/null)
CPP := $(shell find op_kernels torch_npu_ext tests -name '*.cpp' -o -name '*.h' 2>/dev/null)

.PHONY: help train test build lint format clean

help:
	@echo "make train [TRAIN_ARGS='--movielens DIR']   train a DLRM through cached embeddings"
	@echo "make test  [TEST_ARGS='-k oracle']          lint, types, and every test"
	@echo "make build | lint | format | clean"

$(VENV)/.installed: requirements.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet $(TORCH)
	$(PY) -m pip install --quiet --no-deps -r requirements.txt
	touch $@

$(VENV)/.built: $(VENV)/.installed setup.py pyproject.toml CMakeLists.txt $(NATIVE)
	$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

build: $(VENV)/.built

train: build
	$(PY) examples/train_dlrm.py $(TRAIN_ARGS)

test: lint
	$(PY) -m pytest $(TEST_ARGS)

lint: build
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)

format: build
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

clean:
	rm -rf build $(VENV) rec_sdk_torch/*.so *.egg-info
