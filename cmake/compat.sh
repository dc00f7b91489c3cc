#!/bin/sh
# Builds against the torch of another environment and runs the C++ and operator tests there.
# Environment: PYTHON, CMAKE: the interpreter and the cmake of that environment.
set -eu
cd "$(dirname "$0")/.."
build=build/compat
package="$PWD/$build/package/weft"

mkdir -p "$package"
# The operator package alone, its Python files linked beside the library of this build.
for file in ops/python/*.py ops/python/py.typed ops/python/nn; do
  ln -sfn "$PWD/$file" "$package/$(basename "$file")"
done
PATH="$(dirname "$PYTHON"):$PATH" "$CMAKE" --preset dev -B "$build" \
  "-DPython_EXECUTABLE=$PYTHON" "-DWEFT_PACKAGE_DIR=$package" \
  "-DWEFT_STRATEGY_PACKAGE_DIR=$package/strategy"
"$CMAKE" --build "$build" --parallel "${MAX_JOBS:-2}"
"$(dirname "$CMAKE")/ctest" --test-dir "$build" --output-on-failure --parallel "${MAX_JOBS:-2}"
OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONPATH="$build/package" \
  "$PYTHON" -m pytest tests/ops -p no:cacheprovider
