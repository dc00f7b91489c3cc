#!/bin/sh
# Builds a wheel for the torch of an environment (wheel.sh) into dist/, installs the wheel from that folder into a new
# environment, as a user would, and trains two steps with it on two CPU ranks.
# Environment: PYTHON: the interpreter of the environment with torch, which must also have uv.
set -eu
cd "$(dirname "$0")/.."
build="$PWD/build/wheel"
PATH="$(dirname "$PYTHON"):$PATH"
WEFT_PRESET=release
WEFT_BUILD_DIR="$build/cmake"
export PATH PYTHON WEFT_BUILD_DIR WEFT_PRESET

sh cmake/wheel.sh "$PWD/dist" "$build/source"
torch="$("$PYTHON" -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])')"
uv venv --quiet --clear --python "$PYTHON" "$build/venv"
uv pip install --quiet --python "$build/venv/bin/python" "torch==$torch" 'lightning>=2.5,!=2.6.2,!=2.6.3' numpy pyyaml xxhash
uv pip install --quiet --python "$build/venv/bin/python" --no-index --find-links "$PWD/dist" --only-binary weft 'weft[lightning]'
cp tests/wheel/train_two_steps.py "$build/"
cd "$build"
OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo "$build/venv/bin/python" train_two_steps.py
"$build/venv/bin/python" -c 'import importlib.metadata as m; print("tried weft", m.version("weft"))'
