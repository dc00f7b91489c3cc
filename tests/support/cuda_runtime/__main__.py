"""Starts Python with the given arguments on the CUDA runtime without a device."""

from __future__ import annotations

import os
import sys

from support import cuda_runtime

if not cuda_runtime.is_built():
    sys.exit(
        "The build has no CUDA runtime without a device: put nvcc of torch's CUDA release on PATH, and build again."
    )
os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **cuda_runtime.environment()})
