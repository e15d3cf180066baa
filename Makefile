# Two commands: `make train` and `make test`. Everything they need goes into .venv and build/.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
TRAIN_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=

NATIVE := $(shell find op_kernels torch_npu_ext -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt 2>/dev/null)
CPP := $(shell find op_kernels torch_npu_ext tests -name '*.cpp' -o -name '*.h' 2>/dev/null)

.PHONY: help train test test-aarch64 bench build lint format clean

help:
	@echo "make train [TRAIN_ARGS='--movielens DIR']   train a DLRM through cached embeddings"
	@echo "make test  [TEST_ARGS='-k oracle']          lint, types, and every test"
	@echo "make bench [BENCH_ARGS=--full]               ours and its rivals on the CPU, interleaved in one process"
	@echo "make test-aarch64                           the C++ unit tests on 64-bit Arm, under qemu"
	@echo "make build | lint | format | clean"

$(VENV)/.installed: requirements-torch.txt requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -r requirements-torch.txt
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

# The C++ that needs no torch, cross-compiled and run under emulation. The kernels print checksums of their results;
# they must be those of this machine.
CONFIGURE := $(VENV)/bin/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja
TO_AARCH64 := -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/aarch64-linux-gnu.cmake -DCMAKE_COMPILE_WARNING_AS_ERROR=ON

test-aarch64: $(VENV)/.installed
	$(CONFIGURE) $(TO_AARCH64) -S tests/host -B build/aarch64/host
	$(CONFIGURE) $(TO_AARCH64) -S tests/kernels -B build/aarch64/kernels
	$(CONFIGURE) -S tests/kernels -B build/native/kernels
	$(VENV)/bin/cmake --build build/aarch64/host
	$(VENV)/bin/ctest --test-dir build/aarch64/host --output-on-failure --no-tests=error
	$(VENV)/bin/cmake --build build/aarch64/kernels --target checksums
	$(VENV)/bin/cmake --build build/native/kernels --target checksums
	diff -r build/native/kernels/checksums build/aarch64/kernels/checksums
	@echo "aarch64: every test passed, and the results have the bits they have on $$(uname -m)"

bench: build
	$(PY) -m benchmarks.cpu $(BENCH_ARGS)

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
