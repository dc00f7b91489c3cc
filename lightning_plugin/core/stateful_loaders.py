"""Saves the positions of training loaders that have a state of their own, such as torchdata's StatefulDataLoader.

Lightning saves the states that these loaders have at a save, and restores those of the rank that writes on all ranks.
That is wrong twice:

- From loaders without a length, Lightning takes a batch ahead of its step. A resumed run would leave it out. So a
  loader keeps the state that it had before its last batch.
- The streams of data-parallel ranks may have states of their own, such as names of files. So a checkpoint also has the
  states of all data-parallel ranks, under a key of weft's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils import _pytree as pytree

from weft._plugin.loader_check import RecordingLoader, is_stateful

if TYPE_CHECKING:
    from weft._plugin.data_axes import DataAxes

KEY = "weft_loader_states"  # the loaders' states of each data-parallel rank


def save_states(checkpoint: dict[str, Any], trainer: Any, axes: DataAxes) -> None:
    """Replace the states of training loaders by those before a batch taken ahead; add those of all data-parallel ranks.

    Collective over the data axes if there are stateful loaders.
    """
    states = _states_in(checkpoint)
    if not states:
        return
    loaders = [each for each in pytree.tree_leaves(trainer.train_dataloader) if is_stateful(each)]
    if _has_batch_ahead(trainer) and len(loaders) == len(states):
        for idx, loader in enumerate(loaders):
            if isinstance(loader, RecordingLoader):
                states[idx] = loader.state_before_last_batch()
    if axes.size > 1:
        gathered: list[Any] = [None] * axes.size
        dist.all_gather_object(gathered, states, group=axes.data_group)
        checkpoint[KEY] = gathered


def load_states(loaded: dict[str, Any], axes: DataAxes, warn: Callable[[str], object]) -> None:
    """Replace the states of the rank that has saved by those of this data-parallel rank."""
    gathered, states = loaded.pop(KEY, None), _states_in(loaded)
    if not states or gathered is None:
        return
    if len(gathered) != axes.size:
        warn(
            f"weft: the checkpoint has the states of the training loaders of {len(gathered)} data-parallel ranks, and "
            f"this run has {axes.size}: each loader gets that of the first rank."
        )
        return
    states[:] = gathered[axes.rank]


def _states_in(checkpoint: dict[str, Any]) -> list[Any]:
    """Return Lightning's list of the states of training loaders, or an empty list."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states: list[Any] = state.get("combined_loader", [])
    return states


def _has_batch_ahead(trainer: Any) -> bool:
    """Return whether Lightning has taken a batch ahead of the step; it does so from loaders without a length."""
    return bool(getattr(getattr(trainer.fit_loop, "_data_fetcher", None), "batches", None))
