"""convert: writes the model of a training checkpoint in the layout of Hugging Face, in one process.

A tensor is read when it is written, so that no more than one full tensor is in memory.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from weft.strategy.checkpoint import Checkpoint, Location, location_of, open_checkpoint
from weft.strategy.pretrained.hugging_face import converted_for_saving, save_configuration
from weft.strategy.pretrained.output import size_of
from weft.strategy.pretrained.values import LazyTensor
from weft.strategy.pretrained.writing import write_tensors
from weft.strategy.tensor_files import DTYPES

_MODEL_KEYS = ("model", "state_dict")  # of a LightningModule's tensors in a checkpoint
_MAX_NAMES = 10
# Files of a pretrained directory that are not copied: weights of any format, and what is written anew.
_NOT_COPIED = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.gguf", "*.index.json"),
    *("config.json", "generation_config.json", "README.md", ".*"),
)


def convert(
    checkpoint: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    module: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the model of a checkpoint to a new directory in the layout of Hugging Face; needs no process group.

    Args:
        checkpoint: what a Trainer has written, or `fabric.save` with the key "model": a directory of shards, from any
            layout, or a file; its path or URL.
        directory: must not exist; it is complete or absent, as with `save_pretrained`.
        base: the pretrained directory from which the training started, or one with the config.json of the trained
            model, if that has another architecture or other sizes. The result has the names that this model has on
            disk, each tied tensor once, and the configuration and tokenizer files of `base`. None: only tensors are
            written, under their names in the checkpoint.
        module: the name, in the LightningModule, of the module that is written, such as "model"; its name is taken off
            the tensors' names. None: with `base` the module with all names of that model, otherwise the full model.
        dtype: convert floating-point tensors to this dtype; None: keep their dtypes.
        max_shard_size: as in `save_pretrained`.

    Raises:
        FileExistsError: `directory` exists.
        FileNotFoundError: there is no `checkpoint`, or no config.json in `base`.
        ValueError: the checkpoint has no tensors of a model, or not exactly those of `base`; the text has up to ten
            names. Or the checkpoint has Python objects other than tensors and containers.
    """
    max_bytes = size_of(max_shard_size)
    path = location_of(checkpoint)
    tensors = _tensors_of(path, dtype)
    model = None if base is None else _model_of(Path(base))
    if model is None:
        values = _inside(tensors, module or "", path)
    else:
        prefix = _prefix_of(model, tensors) if module is None else module
        values = converted_for_saving(model, _matching(model, _inside(tensors, prefix, path), path))

    def write_configuration(folder: Path) -> None:
        if model is not None:
            assert base is not None
            save_configuration(model, model, folder, dtype or _dtype_of(values))
            for file in sorted(Path(base).iterdir()):
                if file.is_file() and not any(fnmatch.fnmatch(file.name, pattern) for pattern in _NOT_COPIED):
                    shutil.copyfile(file, folder / file.name)

    write_tensors(values, Path(directory), max_bytes, write_configuration)


def _tensors_of(path: Location, dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """Return the tensors of the model in a checkpoint, by their names in it."""
    path = path.existing()
    if not path.is_used():
        raise FileNotFoundError(f"convert got the checkpoint {str(path)!r}, which does not exist; pass its path.")
    found, keys = _tensors_of_directory(path, dtype) if path.is_directory() else _tensors_of_file(path, dtype)
    if not found:
        raise ValueError(
            f"convert found no tensors under {' or '.join(map(repr, _MODEL_KEYS))} in {str(path)!r}, which has "
            f"{_listed(keys) or 'no keys'}; pass a checkpoint that a Trainer has written."
        )
    adapted = next((name for name in found if ".base_layer." in name or ".lora_A." in name), None)
    if adapted is not None:
        raise ValueError(
            f"convert got {str(path)!r}, which has adapters ({adapted!r}); load it in a training, and call "
            "weft.save_pretrained there, after merge_and_unload() for the full model."
        )
    return found


def _tensors_of_directory(path: Location, dtype: torch.dtype | None) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return the tensors of the model by their names, and the first parts of all names in the directory."""
    checkpoint = open_checkpoint(path)
    found: dict[str, LazyTensor] = {}
    for key, entry in checkpoint.metadata.state_dict_metadata.items():
        top, _, name = key.partition(".")
        if top in _MODEL_KEYS and isinstance(entry, TensorStorageMetadata):
            own = entry.properties.dtype
            read = functools.partial(_read_shards, checkpoint, key, tuple(entry.size), own)
            found[name] = _lazy(tuple(entry.size), own, dtype, read)
    return found, list(dict.fromkeys(key.partition(".")[0] for key in checkpoint.metadata.state_dict_metadata))


def _read_shards(checkpoint: Checkpoint, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    checkpoint.load({key: tensor}, alone=True)
    return tensor


def _tensors_of_file(path: Location, dtype: torch.dtype | None) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return the tensors of the model by their names, and the keys of the file."""
    try:
        with contextlib.ExitStack() as stack:  # removed files stay readable while they are mapped
            file = Path(str(path))
            if not path.is_local:
                file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-"))) / "checkpoint"
                path.copy_to(file)
            content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"convert got {str(path)!r}, which torch.load(weights_only=True, mmap=True) does not read "
            f"({str(error).splitlines()[0]}); save it without Python objects, or as a directory."
        ) from error
    content = content if isinstance(content, Mapping) else {}
    found: dict[str, LazyTensor] = {}
    for key in _MODEL_KEYS:
        state = content.get(key)
        for name, tensor in state.items() if isinstance(state, Mapping) and not found else ():
            if isinstance(tensor, Tensor):
                found[name] = _lazy(tuple(tensor.shape), tensor.dtype, dtype, functools.partial(_same, tensor))
    return found, list(map(str, content))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _lazy(shape: tuple[int, ...], own: torch.dtype, dtype: torch.dtype | None, read: Any) -> LazyTensor:
    result = dtype if dtype is not None and own.is_floating_point else own
    return LazyTensor(shape, result, torch.device("cpu"), False, read)


def _model_of(base: Path) -> Any:
    """Return the model of a pretrained directory without values."""
    import transformers

    if not (base / "config.json").is_file():
        raise FileNotFoundError(f"convert finds no config.json in {str(base)!r}; pass a pretrained directory.")
    config = transformers.AutoConfig.from_pretrained(base, local_files_only=True)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    if not names:
        raise ValueError(
            f"convert finds no class of transformers in the architectures of {str(base / 'config.json')!r}; add its "
            "name."
        )
    with torch.device("meta"):
        model = getattr(transformers, names[0])(config)
    if (base / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(base, local_files_only=True)
    return model


def _inside(tensors: dict[str, LazyTensor], module: str, path: Location) -> dict[str, LazyTensor]:
    prefix = f"{module}." if module else ""
    found = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
    if not found:
        raise ValueError(
            f"convert got module={module!r}, but {str(path)!r} has tensors such as {next(iter(tensors))!r}; pass the "
            "name of a module in it."
        )
    return found


def _names_of(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Return the names of a model's tensors, each tied tensor once, and the first name of each other tied name."""
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.setdefault(id(tensor), name)
        if first != name:
            tied[name] = first
    return list(names.values()), tied


def _prefix_of(model: nn.Module, tensors: dict[str, LazyTensor]) -> str:
    """Return the name of the module in the checkpoint that has all tensors of a model; "" if there is none.

    Raises:
        ValueError: there are several.
    """
    names, _ = _names_of(model)
    ends = [name[: -len(names[0])] for name in tensors if f".{name}".endswith(f".{names[0]}")]
    found = [end.removesuffix(".") for end in ends if all(f"{end}{name}" in tensors for name in names)]
    if len(found) > 1:
        raise ValueError(
            f"convert finds several modules that fit `base`: {_listed(found)}; pass one of them as module."
        )
    return found[0] if found else ""


def _matching(model: nn.Module, tensors: dict[str, LazyTensor], path: Location) -> dict[str, LazyTensor]:
    """Return the tensors of a model, each tied one once; raises ValueError unless they are all, and have its shapes."""
    names, tied = _names_of(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    differing = [
        f"{name} {list(tensors[name].shape)} in place of {list(shapes[name])}"
        for name in names
        if name in tensors and tensors[name].shape != shapes[name]
    ]
    problems = {
        "misses": [name for name in names if name not in tensors],
        "has unexpected": [name for name in tensors if name not in names and name not in tied],
        "has other shapes:": differing,
    }
    texts = [f"{kind} {_listed(found)}" for kind, found in problems.items() if found]
    if texts:
        raise ValueError(
            f"convert got {str(path)!r}, which does not fit the model of `base`: it {', and '.join(texts)}; pass the "
            "module in the checkpoint, or a config.json with the trained model's architectures and sizes."
        )
    return {name: tensors[name] for name in names}


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(map(repr, names[:_MAX_NAMES])) + (f" and {more} more" if more > 0 else "")


def _dtype_of(values: dict[str, LazyTensor]) -> torch.dtype | None:
    dtypes = (value.dtype for value in values.values())
    return next((dtype for dtype in dtypes if dtype in DTYPES and dtype.is_floating_point), None)
