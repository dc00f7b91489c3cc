"""The folder of results: at most eight files, none in a subfolder, none larger than 16 MiB."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from gpu.page import page_of

MAX_FILE_BYTES = 16 * 2**20
MAX_FILES = 8
MAX_RESULT_BYTES = 2**20  # largest result of a part in results.json
_LOG_HEAD_BYTES, _LOG_TAIL_BYTES = 100_000, 900_000  # first and last bytes of a part's log that log.txt contains
OWN_FILES = ("results.json", "gpu.md", "log.txt")


class Results:
    """Writes the report of a run after every change of it, so that an aborted run leaves its results so far."""

    def __init__(self, folder: Path, report: dict[str, Any], extra_files: tuple[str, ...] = ()) -> None:
        """Create the folder, and delete files of the same names that an earlier run left."""
        if len(OWN_FILES) + len(extra_files) > MAX_FILES:
            raise ValueError(f"Results: got {len(extra_files)} more files; at most {MAX_FILES - len(OWN_FILES)} fit.")
        self.folder, self.report, self.extra_files = folder, report, extra_files
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*OWN_FILES, *extra_files):
            (folder / name).unlink(missing_ok=True)
        self.save()

    def save(self) -> None:
        """Write results.json and gpu.md; readers see the old or the new content, never a part of it."""
        self._write("results.json", json.dumps(self.report, indent=1) + "\n")
        self._write("gpu.md", page_of(self.report))

    def add_log(self, title: str, log: Path) -> None:
        """Append the first and the last bytes of a log to log.txt."""
        with (self.folder / "log.txt").open("ab") as output, log.open("rb") as source:
            output.write(f"==== {title} ====\n".encode())
            size = log.stat().st_size
            output.write(source.read(min(size, _LOG_HEAD_BYTES)))
            if size > _LOG_HEAD_BYTES:
                begin = max(_LOG_HEAD_BYTES, size - _LOG_TAIL_BYTES)
                if begin > _LOG_HEAD_BYTES:
                    output.write(f"\n... {begin - _LOG_HEAD_BYTES} bytes left out ...\n".encode())
                source.seek(begin)
                output.write(source.read(_LOG_TAIL_BYTES))
            output.write(b"\n")

    def add_file(self, path: Path) -> str | None:
        """Copy a file into the folder; return a sentence if that is not possible."""
        if path.name not in self.extra_files:
            raise ValueError(f"Results: got the file {path.name}, which is not one of {self.extra_files}.")
        if not path.is_file():
            return f"{path.name} was not written."
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            return f"{path.name} has {size} bytes, more than {MAX_FILE_BYTES}, and is left out."
        shutil.copyfile(path, self.folder / path.name)
        return None

    def _write(self, name: str, text: str) -> None:
        temporary = self.folder / f".{name}"
        temporary.write_text(text)
        os.replace(temporary, self.folder / name)


def bounded(result: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a part's result, or a sentence in its place if it is too large for results.json."""
    if result is None or (size := len(json.dumps(result))) <= MAX_RESULT_BYTES:
        return result
    return {"problem": f"The result has {size} bytes, more than {MAX_RESULT_BYTES}, and is left out."}
