"""Saves the states of random generators with a Trainer's checkpoint, and restores them when training resumes.

Ranks that get the same data draw the same numbers, so a checkpoint has the states of each data-parallel rank, whatever
the layout of the model. They are restored by a run with as many data-parallel ranks.

A resumed run creates the iterators of its loaders again, which draws numbers, as at the start of an epoch. So states of
an epoch's end are restored before that, when the checkpoint is loaded. States of the middle of an epoch are restored
once more, before the first batch is loaded, or with other loaders before the first step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

if TYPE_CHECKING:
    from weft._plugin.engine import Engine

KEY = "random_states"  # of the sharded state: {data-parallel rank: {name: tensor}}
_MERSENNE_TWISTER = "MT19937"
_LOADER = "loader_"  # and its index: the state of the generator of its sampler


class RandomStates:
    """The states of this rank's generators: torch's on the CPU and on the rank's CUDA device, Python's and numpy's.

    Attributes:
        of_loaders: to be saved, too: the states of the samplers of the training loaders.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loaded: dict[str, Tensor] | None = None
        self.of_loaders: Sequence[Tensor | None] = ()

    def to_save(self) -> dict[str, Any]:
        """Return the entries of the sharded state that this rank saves."""
        states = _states(self._engine.device)
        states |= {f"{_LOADER}{idx}": state for idx, state in enumerate(self.of_loaders) if state is not None}
        return {KEY: {str(self._engine.data_axes.rank): states}}

    def to_load(self, metadata: Metadata) -> dict[str, Any]:
        """Return the entries that this rank loads, with tensors to be filled; {}: those of the checkpoint do not fit.

        Logs that random numbers will differ if the checkpoint has the states of another number of ranks.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for name, entry in metadata.state_dict_metadata.items():
            path = metadata.planner_data[name]
            if len(path) == 3 and path[0] == KEY and isinstance(entry, TensorStorageMetadata):
                found.setdefault(str(path[1]), {})[path[2]] = torch.empty(entry.size, dtype=entry.properties.dtype)
        axes = self._engine.data_axes
        if found.keys() != {str(rank) for rank in range(axes.size)}:
            if found:
                self._engine.console.log(
                    f"weft: the checkpoint has the random states of {len(found)} data-parallel ranks, and this run has "
                    f"{axes.size}: it draws other numbers, such as those of dropout."
                )
            return {}
        return {KEY: {str(axes.rank): found[str(axes.rank)]}}

    def loaded(self, entries: dict[str, Any]) -> None:
        """Restore states that `to_load` has named and that have been loaded, now and in `begin_step`; {}: none."""
        self._loaded = None
        if entries:
            [self._loaded] = entries[KEY].values()
            _restore(self._loaded, self._engine.device)

    def with_own_states(self, positions: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
        """Return positions of loaders with the states of this rank's samplers; those saved are of the first rank."""
        loaded = self._loaded or {}
        return [
            position and {**position, "random_state": loaded.get(f"{_LOADER}{idx}", position["random_state"])}
            for idx, position in enumerate(positions)
        ]

    def restore_within_epoch(self) -> None:
        """Restore states once more, before the first batch is loaded within an epoch."""
        if self._loaded is not None:
            _restore(self._loaded, self._engine.device)
        self._loaded = None

    def begin_step(self, batch_idx: int) -> None:
        """Call before each training step: restores states once more, before the first step within an epoch.

        For loaders that do not call `restore_within_epoch`.
        """
        if batch_idx > 0:
            self.restore_within_epoch()
        self._loaded = None


def _states(device: torch.device) -> dict[str, Tensor]:
    _, numbers, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        if name == _MERSENNE_TWISTER:
            states["numpy"] = torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64)
            states["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    return states


def _restore(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate((3, tuple(states["python"].tolist()), next(iter(states["python_gauss"].tolist()), None)))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states:
        import numpy

        *keys, position, has_gauss = states["numpy"].tolist()
        cached = states["numpy_gauss"].item()
        numpy.random.set_state((_MERSENNE_TWISTER, numpy.array(keys, numpy.uint32), position, has_gauss, cached))
