# The main commands are `make train` and `make test`. Everything they need is put into .venv, .venv-npu, .venv-docs and
# build/.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Without CANN or the emulated NPU, an installed torch_npu breaks `import torch`; it therefore has its own environment.
NPU_VENV := .venv-npu
NPU_PY := $(NPU_VENV)/bin/python
# The environment with Sphinx, which only the documentation needs.
DOCS_VENV := .venv-docs
DOCS_PY := $(DOCS_VENV)/bin/python
# The interpreter of an environment with a CUDA build of torch, pytest, and the requirements of setup.py; .venv has the
# torch of the pip index.
CUDA_PY ?= $(PYTHON)
TRAIN_ARGS ?=
TEST_ARGS ?=
# Number of processes that share the tests of a stage. Use more on a machine with more cores.
WORKERS ?= 2
FULL :=
PYTEST = -m pytest -n $(WORKERS) --dist worksteal $(FULL)
# The tests to run on the emulated NPU. test_import.py is left out, because imports do not depend on devices.
NPU_SUITES := --ignore=tests/modules/test_import.py tests/ops tests/tbe tests/modules tests/optim tests/distributed \
	tests/saves/test_saver.py tests/saves/test_deltas.py tests/saves/test_saved_lifecycle.py
NPU_TESTS ?= tests/emulator tests/examples/test_whole_job.py $(NPU_SUITES)
# Tests that run again with streams as late as their events allow, which reveals missing events. The oracle is left out,
# because it would take longer than all others together.
NPU_LATE_TESTS ?= tests/tbe --ignore=tests/tbe/test_oracle.py tests/modules/test_hybrid_pipeline.py
# Tests that run without the kernels, as on a device for which there are none.
NPU_DEFAULT_TESTS ?= tests/ops/test_lookups.py tests/ops/test_arguments.py tests/ops/test_edges.py \
	tests/ops/test_streams.py tests/tbe/test_oracle.py
CUDA_TESTS ?= tests
BENCH_ARGS ?=

NATIVE := $(shell find op_kernels torch_npu_ext emulator cmake -name '*.cpp' -o -name '*.h' -o -name '*.cu' \
	-o -name CMakeLists.txt -o -name '*.cmake' 2>/dev/null)
CPP := $(shell find op_kernels torch_npu_ext emulator tests examples -name '*.cpp' -o -name '*.h' -o -name '*.asc' \
	-o -name '*.cu' 2>/dev/null)

.PHONY: help train test test-full test-room test-cpu test-npu test-cuda test-aarch64 sanitize-cuda \
	test-versions wheel bench bench-fbgemm bench-prefetch bench-sharding bench-checkpoint bench-background-saves bench-cuda \
	build build-npu build-cuda docs lint format hooks clean

help:
	@echo "make train [TRAIN_ARGS='--movielens DIR']   train a DLRM through cached embeddings"
	@echo "make test  [TEST_ARGS='-k oracle']          lint, types, and every kind of test: test-cpu, then test-npu"
	@echo "make test-full                              the same with all repetition: more seeds, every combination"
	@echo "make test-room ROOM=tbe                     the tests of one room on the CPU: a folder of tests/, or a file"
	@echo "make test-npu                               the suite on torch_npu, on the emulated NPU"
	@echo "make test-cuda | sanitize-cuda | bench-cuda [CUDA_PY=python3]"
	@echo "                                            on a GPU, with a Python whose torch is a CUDA build"
	@echo "make bench [BENCH_ARGS=--full]               ours and its rivals on the CPU, interleaved in one process"
	@echo "make bench-fbgemm [BENCH_ARGS=...]           FBGEMM's module and ours of its name, option by option"
	@echo "make bench-prefetch [BENCH_ARGS=--quick]     training steps behind prefetch(), on two cores of the CPU"
	@echo "make bench-sharding [BENCH_ARGS=--quick]     bytes that ranks exchange, counted; more devices, modelled"
	@echo "make bench-checkpoint                       saves and loads against numpy with the same bytes"
	@echo "make bench-background-saves                 what training waits for during saves"
	@echo "make test-versions [VERSIONS='2.11.0 2.13.0'] this build with other versions of torch; fetches each"
	@echo "make wheel                                   a wheel and a source archive to upload, in dist/"
	@echo "make test-aarch64                           the C++ unit tests on 64-bit Arm, under qemu"
	@echo "make build-npu                              .venv-npu with torch_npu and the emulated NPU; then, for example,"
	@echo "    .venv-npu/bin/python -m rec_sdk_torch.emulate examples/train_npu.py --steps 100"
	@echo "make docs                                   the documentation site, build/docs/index.html; a warning is an error"
	@echo "make build | lint | format | hooks | clean"

REQUIREMENTS := requirements.txt requirements-build.txt requirements-dev.txt

$(VENV)/.installed: requirements-torch.txt $(REQUIREMENTS)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -r requirements-torch.txt
	$(PY) -m pip install --quiet --no-deps $(REQUIREMENTS:%=-r %)
	touch $@

$(VENV)/.built: $(VENV)/.installed setup.py pyproject.toml CMakeLists.txt $(NATIVE)
	$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

build: $(VENV)/.built

# Creates an environment that also contains the packages of .venv.
BESIDE_VENV = $(PYTHON) -m venv --without-pip $(1) && \
	$(PY) -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> "$$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth"

$(NPU_VENV)/.installed: $(VENV)/.installed requirements-npu.txt
	$(call BESIDE_VENV,$(NPU_VENV))
	$(NPU_PY) -m pip install --quiet --no-deps -r requirements-npu.txt
	touch $@

$(DOCS_VENV)/.installed: $(VENV)/.installed docs/requirements.txt
	$(call BESIDE_VENV,$(DOCS_VENV))
	$(DOCS_PY) -m pip install --quiet --no-deps -r docs/requirements.txt
	touch $@

$(NPU_VENV)/.built: $(NPU_VENV)/.installed $(VENV)/.built
	$(NPU_PY) setup.py --quiet build_ext --inplace --projects npu,ascendc,emulator
	touch $@

build-npu: $(NPU_VENV)/.built

train: build
	$(PY) examples/train_dlrm.py $(TRAIN_ARGS)

# Runs lint, site and builds, two at a time: one can compile while another waits for a package index.
test:
	+$(MAKE) --jobs=2 --output-sync=target lint docs build-npu
	+$(MAKE) --jobs=1 test-cpu test-npu CHECKED=yes

# Also repeats tests, and runs every suite with late streams and with randomly late streams.
test-full:
	$(MAKE) test FULL=--full NPU_LATE_TESTS='$(NPU_SUITES)'
	$(NPU_PY) -m rec_sdk_torch.emulate --streams random:$$(date +%Y%m%d) $(PYTEST) --device npu $(NPU_SUITES) $(TEST_ARGS)

# The room is a folder of tests/, or the name of a test file between test_ and .py.
ROOM ?=
test-room: build
	$(PY) $(PYTEST) $(or $(wildcard tests/$(ROOM)/),$(wildcard tests/test_$(ROOM).py),\
		$(error no room is called '$(ROOM)': say ROOM=tbe, or another folder of tests/)) $(TEST_ARGS)

test-cpu: build $(if $(CHECKED),,lint docs)
	$(PY) $(PYTEST) $(TEST_ARGS)

test-npu: build-npu
	$(NPU_PY) -m rec_sdk_torch.emulate $(PYTEST) --device npu $(NPU_TESTS) $(TEST_ARGS)
	$(NPU_PY) -m rec_sdk_torch.emulate --streams late $(PYTEST) --device npu $(NPU_LATE_TESTS) $(TEST_ARGS) || \
		test $$? -eq 5  # TEST_ARGS may choose none of these
	$(NPU_PY) -m rec_sdk_torch.emulate $(PYTEST) --device npu --operators default --scenarios 4 \
		-k 'not random_arguments' $(NPU_DEFAULT_TESTS) $(TEST_ARGS) || test $$? -eq 5

# Installs nothing: a machine with a GPU often has no access to a package index, and has its own torch.
build-cuda:
	$(CUDA_PY) setup.py --quiet build_ext --inplace --projects engine,cuda

test-cuda: build-cuda
	$(CUDA_PY) -m pytest $(CUDA_TESTS) --device cuda $(TEST_ARGS)

# Without torch's caching allocator, an access beyond a tensor is out of bounds of its memory and is detected.
SANITIZER := PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --report-api-errors no --error-exitcode 1

sanitize-cuda: build-cuda
	$(SANITIZER) --tool memcheck $(CUDA_PY) -m pytest tests/ops --device cuda $(TEST_ARGS)
	$(SANITIZER) --tool racecheck $(CUDA_PY) -m pytest tests/ops --device cuda $(TEST_ARGS)

# Cross-compiles the C++ code that does not need torch, and runs it under emulation. The kernels print checksums of
# their results, which must equal the checksums of this machine.
CONFIGURE := $(VENV)/bin/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja
TO_AARCH64 := -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/aarch64-linux-gnu.cmake -DCMAKE_COMPILE_WARNING_AS_ERROR=ON

test-aarch64: $(VENV)/.installed
	$(CONFIGURE) $(TO_AARCH64) -S tests/engine -B build/aarch64/engine
	$(CONFIGURE) $(TO_AARCH64) -S tests/kernels -B build/aarch64/kernels
	$(CONFIGURE) -S tests/kernels -B build/native/kernels
	$(VENV)/bin/cmake --build build/aarch64/engine
	$(VENV)/bin/ctest --test-dir build/aarch64/engine --output-on-failure --no-tests=error
	$(VENV)/bin/cmake --build build/aarch64/kernels --target checksums
	$(VENV)/bin/cmake --build build/native/kernels --target checksums
	diff -r build/native/kernels/checksums build/aarch64/kernels/checksums
	@echo "aarch64: every test passed, and the results have the bits they have on $$(uname -m)"

# Runs one build, made with the torch of requirements-torch.txt, under all torch versions that pyproject.toml allows;
# only tests that do not need TorchRec. Each version gets an environment in build/versions, with any build of torch from
# the pip index.
VERSIONS ?= 2.11.0 2.12.1 2.13.0
VERSION_TESTS ?= tests/ops tests/tbe
TESTERS := pytest pytest-random-order pytest-xdist hypothesis packaging numpy

build/versions/%/.installed: requirements-dev.txt
	$(PYTHON) -m venv build/versions/$*
	build/versions/$*/bin/python -m pip install --quiet -c requirements.txt -c requirements-dev.txt torch==$* $(TESTERS)
	touch $@

test-versions: build $(VERSIONS:%=build/versions/%/.installed)
	for version in $(VERSIONS); do \
		build/versions/$$version/bin/python $(PYTEST) $(VERSION_TESTS) $(TEST_ARGS) || exit; \
	done

# The time of the last commit, or of the changelog in an archive without a history, so that the same files give the same
# bytes.
EPOCH = $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md))
# torch is loaded before these libraries and provides its own.
OF_TORCH := --exclude libtorch.so --exclude libtorch_cpu.so --exclude libc10.so

wheel: build
	$(PY) -m pip install --quiet --no-deps -r requirements-wheel.txt
	rm -rf dist build/wheel
	SOURCE_DATE_EPOCH=$(EPOCH) $(PY) setup.py --quiet sdist
	SOURCE_DATE_EPOCH=$(EPOCH) REC_SDK_CUDA=0 $(PY) -m pip wheel --quiet --no-build-isolation --no-deps --no-index \
		-w build/wheel dist/*.tar.gz
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH $(PY) -m auditwheel repair $(OF_TORCH) -w dist build/wheel/*.whl
	@ls -l dist

bench: build
	$(PY) -m benchmarks cpu $(BENCH_ARGS)

bench-fbgemm: build
	$(PY) -m benchmarks fbgemm $(BENCH_ARGS)

bench-prefetch: build
	$(PY) -m benchmarks prefetch $(BENCH_ARGS)

bench-sharding: build
	$(PY) -m benchmarks sharding $(BENCH_ARGS)

bench-checkpoint: build
	$(PY) -m benchmarks checkpoint $(BENCH_ARGS)

bench-background-saves: build
	$(PY) -m benchmarks background_saves $(BENCH_ARGS)

bench-cuda: build-cuda
	$(CUDA_PY) -m benchmarks cuda $(BENCH_ARGS)

# Builds from scratch each time: an incremental build reads changed pages only, and would miss broken links in other
# pages.
docs: $(DOCS_VENV)/.installed build
	$(DOCS_PY) -m sphinx -q -E -W --keep-going -c docs -d build/docs-trees . build/docs

lint: build
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	@$(VENV)/bin/clang-format --dry-run --Werror $(CPP)
	@$(PY) tests/line_counts.py

format: build
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

hooks:
	git config core.hooksPath .githooks

clean:
	rm -rf build $(VENV) $(NPU_VENV) $(DOCS_VENV) rec_sdk_torch/*.so rec_sdk_torch/_engine.pyi rec_sdk_torch/_emulator *.egg-info
