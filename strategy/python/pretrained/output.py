"""Writes a directory of safetensors files that is complete or absent.

It is written under another name, synchronised, and then renamed.
"""

from __future__ import annotations

import glob
import json
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.strategy import durable
from weft.strategy.tensor_files import OutputTensor

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_of(text: int | str) -> int:
    """Return a number of bytes: an int unchanged, or a text such as "5GB" (10**9 bytes each) or "512MiB".

    Raises:
        ValueError: the text is no size, or the size is not positive.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)", str(text).upper()) if isinstance(text, str) else None
    value = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else text
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"save_pretrained got max_shard_size={text!r}; pass a positive size, such as '5GB'.")
    return value


def split_into_files(tensors: Iterable[OutputTensor], max_bytes: int) -> list[list[OutputTensor]]:
    """Return the tensors of each file, in order; a file exceeds `max_bytes` only with a single tensor."""
    files: list[list[OutputTensor]] = []
    size = 0
    for tensor in tensors:
        if not files or size + tensor.num_bytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.num_bytes
    return files


class OutputDirectory:
    """A directory that appears under its name when it is complete.

    Until then it is beside it as ".NAME.tmp-..."; a process that is killed leaves at most that directory. Two jobs must
    not write a directory of the same name at the same time.
    """

    def __init__(self, path: Path, token: str) -> None:
        self.path = path
        self.temporary = path.parent / f".{path.name}.tmp-{token}"

    @staticmethod
    def new_token() -> str:
        return uuid.uuid4().hex[:12]

    def create(self) -> None:
        """Create the temporary directory, and remove those of earlier processes that were killed."""
        durable.announce("mkdir")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for stale in self.path.parent.glob(f".{glob.escape(self.path.name)}.tmp-*"):
            durable.announce("rmtree")
            shutil.rmtree(stale, ignore_errors=True)
        durable.announce("mkdir")
        self.temporary.mkdir()

    def create_folder(self, name: str) -> None:
        """Create a folder inside, unless it exists; "": the directory itself."""
        if name and not (self.temporary / name).is_dir():
            durable.announce("mkdir")
            (self.temporary / name).mkdir(parents=True)

    def write_json(self, name: str, content: Any) -> None:
        file = durable.create_file(self.temporary / name)
        with durable.closing(file):
            durable.write(file, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
            durable.sync(file)

    def commit(self) -> None:
        """Give the directory its name, after all that is in it is on the disk."""
        durable.publish_new(self.temporary, self.path)

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.temporary, ignore_errors=True)
