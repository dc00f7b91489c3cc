"""Calls each kernel with small odd sizes, for compute-sanitizer; checks no values.

    PYTHONPATH=benchmarks python -m gpu.sanitizer_suite [--device cpu] [--output FILE]

Inputs are made on the CPU and copied, so that few kernels but weft's run. Without torch's caching allocator
(PYTORCH_NO_CUDA_MEMORY_CACHING, which `gpu.sanitize` sets) each tensor is a separate allocation, so that memcheck finds
accesses beyond its end.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from gpu.kernel_calls import kernel_calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the number of calls as JSON")
    args = parser.parse_args()
    count = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for call in kernel_calls(dtype):
            call.run(args.device)
            count += 1
        if args.device == "cuda":
            torch.cuda.synchronize()
        if args.output is not None:
            args.output.write_text(json.dumps({"calls": count}))
    print(f"{count} calls of kernels ended.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
