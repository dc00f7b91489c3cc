"""The page "C++ headers": each public header with its opening comment as prose and its declarations as code."""

from __future__ import annotations

import re
from pathlib import Path

# Library -> the folder with its public headers, in the order of the page.
LIBRARIES = {
    "Operators": "ops/include",
    "Collectives": "ops/collectives/include",
    "Memory": "ops/memory/include",
    "Planner": "strategy/include",
    "Kernels": "kernels/include",
}
_INTRODUCTION = """# C++ headers

The headers of an installed weft, by library. [Use weft from C++](../cpp.md) says how to find and link them.
"""


def page(root: Path) -> str:
    """Return the page's Markdown for the headers of the repository at `root`."""
    parts = [_INTRODUCTION]
    for library, folder in LIBRARIES.items():
        parts.append(f"## {library}\n")
        for header in sorted((root / folder).rglob("*.h")):
            prose, code = split_header(header.read_text())
            parts.append(f"### `<{header.relative_to(root / folder).as_posix()}>`\n")
            parts.append(f"{prose}\n")
            parts.append(f"```cpp\n{code}\n```\n")
    return "\n".join(parts)


def split_header(text: str) -> tuple[str, str]:
    """Return the comment that opens a header, as prose, and the declarations without its includes."""
    lines = [line for line in text.splitlines() if line.strip() != "#pragma once"]
    while lines and not lines[0].strip():
        del lines[0]
    prose: list[str] = []
    while lines and lines[0].startswith("//"):
        prose.append(lines.pop(0).removeprefix("//").strip())
    code = "\n".join(line for line in lines if not line.startswith("#include"))
    return "\n".join(prose), re.sub(r"\n{3,}", "\n\n", code).strip()
