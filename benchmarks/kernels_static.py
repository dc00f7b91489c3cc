"""Static figures of the compiled CUDA kernels: registers, spills, memory instructions, occupancy, bytes moved.

    python benchmarks/kernels_static.py [--all] [--arch sm_90] [--json]    # needs no GPU
    python benchmarks/kernels_static.py --check    # exit status 1 if a kernel differs from kernels_static.json
    python benchmarks/kernels_static.py --write    # store the figures there and in docs/cuda.md

The default library is libweft_ops_cuda.so of the source tree or of the installed package. Without --all, each kernel
has one row for its dtypes, with the widest pack. docs/cuda.md describes the columns.

The golden file is valid for the version of nvcc that it names. For a library that another version compiled, --check
requires that no kernel spills, and that those with 128-bit loads and stores in the golden file have some.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels_binary import Kernel, compiler_of, read_kernels
from kernels_golden import golden_text, violations
from kernels_occupancy import TRAFFIC, occupancy, threads_of

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs/cuda.md"
PAGE_ARCH = "sm_90"
BEGIN = "<!-- Written by benchmarks/kernels_static.py --write. -->"
END = "<!-- End of the generated tables. -->"
COLUMNS = {
    "kernel": "kernel",
    "registers": "registers",
    "stack_bytes": "stack",
    "shared_bytes": "shared",
    "loads_128": "loads",
    "stores_128": "stores",
    "narrow": "narrow",
    "generic": "generic",
    "instructions": "instructions",
    "threads": "threads",
    "occupancy": "occupancy",
    "limit": "limit",
}
TRAFFIC_COLUMNS = ("operation", "kernel", "loads", "stores", "bfloat16 bytes", "minimum", "ratio")
Row = dict[str, Any]


def default_library() -> Path:
    """Return the CUDA library of the source tree or, if that has none, of the installed package.

    Raises:
        ValueError: neither has one.
    """
    spec = importlib.util.find_spec("weft")  # does not import it
    folders = [ROOT / "ops/python", *map(Path, (spec and spec.submodule_search_locations) or ())]
    for folder in folders:
        library = folder / "lib/libweft_ops_cuda.so"
        if library.is_file():
            return library
    raise ValueError(
        f"got no lib/libweft_ops_cuda.so in {', '.join(map(str, folders))}, expected a build with CUDA sources: "
        "run `make build` with nvcc on PATH, or pass --library PATH."
    )


def row_of(kernel: Kernel) -> Row:
    """Return the figures of the kernel by column."""
    resident = occupancy(kernel)
    return {
        "kernel": kernel.name,
        "registers": kernel.registers,
        "stack_bytes": kernel.stack_bytes,
        "shared_bytes": kernel.shared_bytes,
        "loads_128": kernel.code.loads_128,
        "stores_128": kernel.code.stores_128,
        "narrow": kernel.code.narrow,
        "generic": kernel.code.generic,
        "instructions": kernel.code.instructions,
        "threads": threads_of(kernel),
        "occupancy": resident and round(resident.share, 3),
        "limit": resident and resident.limit,
    }


def select(kernels: Sequence[Kernel], archs: Sequence[str] | None) -> list[Kernel]:
    """Return the kernels of these architectures, or all.

    Raises:
        ValueError: there is no kernel of one of them.
    """
    existing = {kernel.arch for kernel in kernels}
    if archs and not existing.issuperset(archs):
        raise ValueError(f"got --arch {' '.join(archs)}, expected some of {', '.join(sorted(existing))}.")
    return [kernel for kernel in kernels if not archs or kernel.arch in archs]


def widest(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return the kernel with the widest pack from each set of kernels that differ only in the width of a pack."""
    by_name: dict[tuple[str, str], Kernel] = {}
    for kernel in sorted(kernels, key=_width):
        by_name[kernel.arch, kernel.name.rpartition(" x")[0] or kernel.name] = kernel
    return [by_name[key] for key in sorted(by_name)]


def _width(kernel: Kernel) -> int:
    return int(kernel.name.rpartition(" x")[2]) if " x" in kernel.name else 1


def cells(row: Row) -> list[str]:
    """Return the texts of a row."""
    share = row["occupancy"]
    shown = {**row, "occupancy": "-" if share is None else f"{100 * share:.1f} %", "limit": row["limit"] or "-"}
    return [str(shown[column]) for column in COLUMNS]


def traffic_cells(element_bytes: int = 2) -> list[list[str]]:
    """Return the texts of the rows of bytes moved for each element."""
    texts = []
    for traffic in TRAFFIC:
        moved, minimum = traffic.bytes_of(element_bytes)
        numbers = (traffic.loads, traffic.stores, moved, minimum, f"{moved / minimum:.2f}")
        texts.append([traffic.operation, traffic.family, *map(str, numbers)])
    return texts


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, *rows]:
        aligned = [
            text.rjust(width) if header[i] not in {"kernel", "operation", "limit"} else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def page(text: str, kernels: Sequence[Kernel], compiler: str, date: str) -> str:
    """Return the page of the documentation with new tables between its markers.

    Raises:
        ValueError: no kernel is of the architecture that the page shows.
    """
    rows = [cells(row_of(kernel)) for kernel in widest(kernels) if kernel.arch == PAGE_ARCH]
    if not rows:
        raise ValueError(
            f"got no kernel of {PAGE_ARCH}, which docs/cuda.md shows: build with TORCH_CUDA_ARCH_LIST=9.0."
        )
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [
        before + BEGIN,
        f"{PAGE_ARCH}, compiled by nvcc {compiler}, {date}:",
        markdown_table(list(COLUMNS.values()), rows),
        "Bytes moved for each element of the input:",
        markdown_table(TRAFFIC_COLUMNS, traffic_cells()),
        END + after,
    ]
    return "\n\n".join(parts)


def check(golden: Mapping[str, Any], kernels: Sequence[Kernel], compiler: str) -> int:
    """Print the violations, or that there is none; return the exit status."""
    if compiler != golden["nvcc"]:
        print(
            f"nvcc {compiler} compiled the library, and the golden file is of nvcc {golden['nvcc']}: registers, shared "
            "memory and the numbers of 128-bit loads and stores are not compared.",
            file=sys.stderr,
        )
    sentences = violations(golden, kernels, compiler)
    for sentence in sentences:
        print(sentence, file=sys.stderr)
    if sentences:
        print("Correct these kernels or, if the figures are intended, store them with --write.", file=sys.stderr)
        return 1
    print(f"{len(kernels)} kernels as in the golden file.")
    return 0


def show(kernels: Sequence[Kernel], libraries: Sequence[Path], compiler: str, as_json: bool) -> None:
    """Print the rows of the kernels by architecture, and the bytes that the operations move."""
    rows: dict[str, list[Row]] = {}
    for kernel in kernels:
        rows.setdefault(kernel.arch, []).append(row_of(kernel))
    if as_json:
        traffic = [dict(zip(TRAFFIC_COLUMNS, texts, strict=True)) for texts in traffic_cells()]
        facts = {"benchmark": "kernels_static", "libraries": list(map(str, libraries)), "nvcc": compiler}
        print(json.dumps({**facts, "kernels": rows, "traffic": traffic}, indent=2))
        return
    for arch, rows_of_arch in rows.items():
        print(f"{arch}, nvcc {compiler}")
        print(text_table(list(COLUMNS.values()), list(map(cells, rows_of_arch))), end="\n\n")
    print("bytes moved for each element of the input")
    print(text_table(TRAFFIC_COLUMNS, traffic_cells()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", nargs="+", type=Path, metavar="PATH", help="libraries, archives or object files")
    parser.add_argument("--arch", nargs="+", metavar="SM", help="show or check only these, such as sm_90")
    parser.add_argument("--all", action="store_true", help="a row for every kernel, also for those of narrower packs")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not tables")
    parser.add_argument("--check", action="store_true", help="compare with the golden file instead")
    parser.add_argument("--write", action="store_true", help="write the golden file and the page's tables instead")
    args = parser.parse_args()
    if args.write and args.arch:
        parser.error("got --write with --arch, which would remove the other architectures: leave one of them out.")
    try:
        libraries = args.library or [default_library()]
        kernels = select(read_kernels(libraries), args.arch)
        compiler = compiler_of(libraries)
        golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {"accepted_stack_bytes": {}}
        if args.write:
            PAGE.write_text(page(PAGE.read_text(), kernels, compiler, datetime.date.today().isoformat()))
            GOLDEN.write_text(golden_text(compiler, golden["accepted_stack_bytes"], kernels))
            golden = json.loads(GOLDEN.read_text())
    except ValueError as error:
        print(f"kernels_static: {error}", file=sys.stderr)
        return 2
    if args.check or args.write:
        return check(golden, kernels, compiler)
    show(kernels if args.all else widest(kernels), libraries, compiler, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
