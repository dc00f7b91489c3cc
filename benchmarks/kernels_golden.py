"""Compares the static figures of CUDA kernels with the golden file kernels_static.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kernels_binary import Kernel

Figures = dict[str, int]


def golden_figures(kernel: Kernel) -> Figures:
    """Return the figures that the golden file has of a kernel."""
    return {
        "registers": kernel.registers,
        "shared_bytes": kernel.shared_bytes,
        "loads_128": kernel.code.loads_128,
        "stores_128": kernel.code.stores_128,
    }


def golden_text(compiler: str, accepted: Mapping[str, int], kernels: Iterable[Kernel]) -> str:
    """Return the text of the golden file: one line for each kernel, sorted."""
    figures = {f"{kernel.arch} {kernel.name}": golden_figures(kernel) for kernel in kernels}
    text = json.dumps({"nvcc": compiler, "accepted_stack_bytes": accepted, "kernels": {}}, indent=1)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(figures[name])}" for name in sorted(figures))
    return text.replace('"kernels": {}', f'"kernels": {{\n{lines}\n }}') + "\n"


def violations(golden: Mapping[str, Any], kernels: Sequence[Kernel], compiler: str) -> list[str]:
    """Return a sentence for each kernel that spills, differs from the golden file, or is in only one of both.

    For an architecture that is in only one of both, only spills are checked.
    """
    is_same_compiler = compiler == golden["nvcc"]
    by_name = {f"{kernel.arch} {kernel.name}": kernel for kernel in kernels}
    expected: dict[str, Figures] = golden["kernels"]
    archs = {kernel.arch for kernel in kernels} & {name.split()[0] for name in expected}
    missing = [name for name in expected if name.split()[0] in archs and name not in by_name]
    sentences = [f"{name}: the library does not have this kernel." for name in missing]
    for name, kernel in by_name.items():
        accepted = golden["accepted_stack_bytes"].get(name, 0)
        spills = f"{kernel.stack_bytes} bytes of stack and {kernel.code.local_accesses} local loads and stores"
        if kernel.stack_bytes > accepted or (kernel.code.local_accesses and not accepted):
            sentences.append(f"{name}: {spills}, expected {accepted} bytes.")
        elif is_same_compiler and kernel.stack_bytes < accepted:
            sentences.append(f"{name}: {spills}; remove it from accepted_stack_bytes.")
        if name not in expected:
            if kernel.arch in archs:
                sentences.append(f"{name}: the golden file does not have this kernel.")
            continue
        for figure, found in golden_figures(kernel).items():
            wanted = expected[name][figure]
            text = f"{name}: {figure} {found}, expected {wanted}"
            if not is_same_compiler:
                if figure.endswith("_128") and wanted and not found:
                    sentences.append(f"{text} with nvcc {golden['nvcc']}.")
            elif found > wanted if figure == "registers" else found != wanted:
                sentences.append(f"{text}{' or fewer' if figure == 'registers' else ''}.")
    return sorted(sentences)
