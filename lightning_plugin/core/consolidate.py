"""Converts a directory of shards to one checkpoint file, which `LitModel.load_from_checkpoint` needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from weft._plugin.averaged_entries import put_entries
from weft._plugin.checkpoint import MODEL_KEYS, optimizer_key, write_file
from weft.strategy.checkpoint import Checkpoint, is_checkpoint, location_of, open_checkpoint

DIRECTORY_NOTE = (
    "weft writes checkpoints as directories of shards, which trainer.fit(ckpt_path=...) reads; for "
    "LightningModule.load_from_checkpoint, convert the directory to a file with "
    "weft.lightning.consolidate_checkpoint(directory), or pass save_distributed_checkpoint=False."
)


def consolidate_checkpoint(
    directory: str | os.PathLike[str],
    file: str | os.PathLike[str] | None = None,
    weights_only: bool | None = None,
    allow_pickle: bool = False,
) -> Path:
    """Write a directory of shards as one checkpoint file, which any Trainer and `load_from_checkpoint` read.

        model = LitModel.load_from_checkpoint(weft.lightning.consolidate_checkpoint("last.ckpt"))

    Not collective: call it in one process, in a script of several ranks under `if trainer.is_global_zero:`. The process
    holds the full checkpoint in CPU memory.

    Args:
        directory: the path or URL of a checkpoint of `trainer.save_checkpoint` or a ModelCheckpoint, written by any
            number of ranks.
        file: the local path of the new file; None: "DIRECTORY.consolidated", not for a URL.
        weights_only: as in `torch.load`, for the file meta.pt of a directory that weft 0.1 or Lightning has written.
        allow_pickle: unpickle the objects that JSON cannot carry; see the strategy's option of that name.

    Returns:
        The path of the file.

    Raises:
        ValueError: `directory` is not a Trainer's directory of shards, or a URL without `file`.
        FileExistsError: `file` exists.
    """
    source = location_of(directory)
    if file is None and not source.is_local:
        raise ValueError(
            f"consolidate_checkpoint got the URL {str(source)!r} and no file; pass the path of the file to write."
        )
    path = Path(str(source))
    written = location_of(path.with_name(f"{path.name}.consolidated") if file is None else file)
    if not written.is_local:
        raise ValueError(f"consolidate_checkpoint got the file {str(written)!r}; pass a local path, and upload it.")
    target = Path(str(written))
    source = source.existing()
    if not is_checkpoint(source):
        raise ValueError(
            f"consolidate_checkpoint got {str(source)!r}, which is not a directory of shards; "
            "pass the path that trainer.save_checkpoint or a ModelCheckpoint has written."
        )
    if target.exists():
        raise FileExistsError(
            f"consolidate_checkpoint would write {str(target)!r}, which exists; remove it, or pass another file."
        )
    opened = open_checkpoint(source, allow_pickle=allow_pickle, weights_only=weights_only)
    checkpoint = opened.rest()
    tensors = _read_shards(opened)
    model_key = next((key for key in MODEL_KEYS if key in tensors), None)
    if model_key is None:
        raise ValueError(
            f"consolidate_checkpoint got {str(source)!r}, which has {', '.join(sorted(tensors)) or 'nothing'} and no "
            "LightningModule's state_dict; pass a checkpoint that a Trainer has written."
        )
    checkpoint["state_dict"] = tensors.pop(model_key)
    put_entries(checkpoint, tensors)
    states: list[Any] = []
    # An optimizer that had no state when it was saved is in the other entries.
    while (key := optimizer_key(len(states))) in tensors or key in checkpoint:
        states.append(tensors[key] if key in tensors else checkpoint.pop(key))
    if states:
        checkpoint["optimizer_states"] = states
    write_file(checkpoint, target)
    return target


def _read_shards(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return all entries of the sharded state, nested as saved, with unsharded tensors on the CPU."""
    metadata = checkpoint.metadata
    flat = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    checkpoint.load(flat, alone=True)
    nested: dict[Any, Any] = {}
    for key, value in flat.items():
        holder = nested
        *outer, last = metadata.planner_data[key]
        for name in outer:
            holder = holder.setdefault(name, {})
        holder[last] = value
    return {name: _with_lists(value) for name, value in nested.items()}


def _with_lists(value: Any) -> Any:
    """Return `value` with dicts of int keys as lists: int keys are positions in a saved list."""
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_with_lists(value[idx]) for idx in sorted(value)]
    return {key: _with_lists(item) for key, item in value.items()}
