"""Finds and opens the files of pretrained weights: one safetensors file, an index with many, or files of torch.save."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.strategy.deferred.files import FileTensor, tensor_of_safetensors

# In the order in which a directory is searched. An index maps each tensor's name to its file.
_NAMES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


def open_tensors(path: str | os.PathLike[str]) -> dict[str, FileTensor]:
    """Return the tensors of a file, of an index's files, or of a directory with one of both, by name.

    The files are mapped into memory and stay open as long as a tensor of them is used; their values are not read.

    Raises:
        ImportError: a file needs the package safetensors.
        FileNotFoundError: there is no such file, the directory has none of the known names, or a file of the index is
            missing.
    """
    file = find_file(path)
    if file.name.endswith(".index.json"):
        return _open_index(file)
    return _open_file(file)


def find_file(path: str | os.PathLike[str]) -> Path:
    """Return the file of weights, or the index of several, that a path stands for; see `open_tensors`."""
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(
            f"got the pretrained weights {str(path)!r}, which do not exist; pass a directory or a file that exists."
        )
    for name in _NAMES:
        if (path / name).is_file():
            return path / name
    raise FileNotFoundError(
        f"got the directory {str(path)!r}, which has none of {', '.join(_NAMES)}; pass the path of the "
        "file with the weights."
    )


def _open_index(index: Path) -> dict[str, FileTensor]:
    file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
    missing = [name for name in sorted(set(file_of.values())) if not (index.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"got the index {str(index)!r}, whose file {missing[0]!r} is not in its folder; copy all "
            "files of the index there."
        )
    opened = {name: _open_file(index.parent / name) for name in set(file_of.values())}
    return {name: opened[file][name] for name, file in file_of.items()}


def _open_file(file: Path) -> dict[str, FileTensor]:
    if file.suffix == ".safetensors":
        try:
            from safetensors import safe_open
        except ImportError:
            raise ImportError(
                f"load_pretrained got {str(file)!r}, which needs the package safetensors; `pip install safetensors`."
            ) from None
        handle = safe_open(file, framework="pt")
        names: list[str] = handle.keys()  # type: ignore[no-untyped-call]
        return {name: tensor_of_safetensors(handle, name) for name in names}
    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return {name: _mapped(value) for name, value in loaded.items() if isinstance(value, Tensor)}


def _mapped(tensor: Tensor) -> FileTensor:
    values = tensor.detach()
    return FileTensor(tuple(values.shape), values.dtype, values.__getitem__)
