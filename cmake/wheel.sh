#!/bin/sh
# Builds an sdist and, from it alone, a wheel against the torch of an environment.
# Arguments: the folder for both files; a folder for the unpacked sdist, which is emptied first.
# Environment: PYTHON: the interpreter of that environment, which must also have uv; WEFT_PRESET and WEFT_BUILD_DIR: see
# setup.py.
set -eu
cd "$(dirname "$0")/.."
dist="$1"
source="$2"
PATH="$(dirname "$PYTHON"):$PATH"
export PATH

rm -rf "$source"
mkdir -p "$source" "$dist"
rm -f "$dist"/weft-*.tar.gz
uv build --no-build-logs --no-build-isolation --python "$PYTHON" --sdist --out-dir "$dist" .
tar -xzf "$dist"/weft-*.tar.gz -C "$source" --strip-components 1
uv build --no-build-isolation --python "$PYTHON" --wheel --out-dir "$dist" "$source"
