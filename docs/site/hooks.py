"""mkdocs hooks: pages from files outside docs/, and links to files that have no page.

`pages_from_repository` lists the generated pages. On every page, a relative link to a file of the repository becomes a
link to that file's page, or plain code if it has none. A link to a file that does not exist is a warning, which fails
`make site`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LANGUAGES = {".py": "python", ".cpp": "cpp", ".yaml": "yaml", ".txt": "cmake"}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.DOTALL | re.MULTILINE)

_log = logging.getLogger("mkdocs.weft")


def pages_from_repository() -> dict[str, Path]:
    """Return, for each generated page, the file of the repository that the page shows."""
    pages = {
        "index.md": ROOT / "README.md",
        "changelog.md": ROOT / "CHANGELOG.md",
        "contributing.md": ROOT / "CONTRIBUTING.md",
        "security.md": ROOT / "SECURITY.md",
        "examples/index.md": ROOT / "examples/README.md",
        "examples/cpp/index.md": ROOT / "examples/cpp/README.md",
    }
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.suffix in LANGUAGES:
            pages[f"{path.relative_to(ROOT).as_posix()}.md"] = path
    return pages


def on_startup(command: str, dirty: bool) -> None:
    """Lay the packages out as in site-packages, because mkdocstrings looks for them when it is configured."""
    _neighbour("package_layout").lay_out_packages()


def on_config(config: Any) -> Any:
    """List the decisions in the navigation."""
    decisions = [f"decisions/{path.name}" for path in sorted((DOCS / "decisions").glob("0*.md"))]
    for section in config.nav:
        for entries in section.values():
            for entry in entries if isinstance(entries, list) else []:
                if "Decisions" in entry:
                    entry["Decisions"] = ["decisions/README.md", *decisions]
    return config


def on_files(files: Files, config: Any) -> Files:
    for page, path in pages_from_repository().items():
        files.append(File.generated(config, page, content=_content(path)))
    headers = _neighbour("cpp_reference").page(ROOT)
    files.append(File.generated(config, "reference/cpp.md", content=headers))
    return files


def _neighbour(name: str) -> ModuleType:
    """Import another file of this folder, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"weft_site_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _content(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".md":
        return text
    return f"# {path.relative_to(ROOT / 'examples')}\n\n```{LANGUAGES[path.suffix]}\n{text.rstrip()}\n```\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    sources = pages_from_repository()
    own = sources.get(page.file.src_uri, DOCS / page.file.src_uri)
    page_of = {path: name for name, path in sources.items()} | {DOCS / "README.md": "index.md"}
    page_of |= {DOCS / file.src_uri: file.src_uri for file in files if file.src_uri not in sources}

    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        name, _, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+:", target):
            return match[0]
        path = Path(os.path.normpath(own.parent / name))
        if path in page_of:
            relative = os.path.relpath(page_of[path], Path(page.file.src_uri).parent)
            return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"
        if path.is_dir() and path / "README.md" in page_of:
            return f"[{text}]({os.path.relpath(page_of[path / 'README.md'], Path(page.file.src_uri).parent)})"
        if not path.exists():
            _log.warning("%s links to %s, which does not exist", own.relative_to(ROOT), target)
        return text if text.startswith("`") else f"`{path.relative_to(ROOT).as_posix()}`"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)
