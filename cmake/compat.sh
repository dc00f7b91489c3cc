#!/bin/sh
# Builds against the torch of another environment and runs the C++ tests there, those of the operators, of the
# strategy those that lean most on torch's inside, and the C++ examples.
# Environment: PYTHON, CMAKE: the interpreter and the cmake of that environment.
set -eu
cd "$(dirname "$0")/.."
build=build/compat
package="$PWD/$build/package/weft"

mkdir -p "$package/strategy"
# The packages' Python files, linked beside the libraries of this build.
for file in ops/python/*.py ops/python/py.typed ops/python/memory ops/python/nn; do
  ln -sfn "$PWD/$file" "$package/$(basename "$file")"
done
for file in strategy/python/*.py strategy/python/data_parallel strategy/python/deferred strategy/python/pipeline strategy/python/verification; do
  ln -sfn "$PWD/$file" "$package/strategy/$(basename "$file")"
done
PATH="$(dirname "$PYTHON"):$PATH" "$CMAKE" --preset dev -B "$build" \
  "-DPython_EXECUTABLE=$PYTHON" "-DWEFT_PACKAGE_DIR=$package" \
  "-DWEFT_STRATEGY_PACKAGE_DIR=$package/strategy"
"$CMAKE" --build "$build" --parallel "${MAX_JOBS:-2}"
"$(dirname "$CMAKE")/ctest" --test-dir "$build" --output-on-failure --parallel "${MAX_JOBS:-2}"
OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONPATH="$build/package" WEFT_BUILD_DIR="$build" \
  "$PYTHON" -m pytest tests/ops tests/strategy/test_deferred_init.py tests/strategy/test_fused_optimizers.py \
  tests/strategy/test_in_backward.py tests/strategy/test_data_parallel.py tests/strategy/test_activation_checkpointing.py tests/examples/test_cpp.py -p no:cacheprovider
