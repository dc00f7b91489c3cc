#!/bin/sh
# Builds a wheel from an sdist (wheel.sh) against the torch of another environment, installs it there, and runs the tests
# of the Lightning plugin.
# Environment: PYTHON: the interpreter of that environment, which must also have uv and cmake.
set -eu
cd "$(dirname "$0")/.."
build="$PWD/build/upstream"
MAX_JOBS="${MAX_JOBS:-2}"
WEFT_BUILD_DIR="$build/cmake"
PATH="$(dirname "$PYTHON"):$PATH"
# The tests need no GPU, so kernels are compiled for one architecture.
TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-9.0}"
export MAX_JOBS PATH PYTHON TORCH_CUDA_ARCH_LIST WEFT_BUILD_DIR

rm -rf "$build/dist"
sh cmake/wheel.sh "$build/dist" "$build/source"
uv pip install --python "$PYTHON" --no-deps --reinstall "$build"/dist/weft-*.whl
"$PYTHON" -c 'import lightning, torch, weft; print("torch", torch.__version__, "lightning", lightning.__version__)'
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
"$PYTHON" -m pytest -n "$((MAX_JOBS + 1))" --dist loadfile -p no:cacheprovider tests/lightning_plugin
